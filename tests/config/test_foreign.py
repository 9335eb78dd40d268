"""Configs and descriptions from others: bounded, and one sentence if they are wrong."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from overland.config.source import read_file
from overland.files import parse_yaml, read_json
from tests.limited import limited

BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60))
KEYED = "a0: &a0 {x: 1}\n" + "".join(
    f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}}}\n" for i in range(1, 60)
)
CONFIGS = {
    "deep.toml": "a = " + "[" * 5000 + "]" * 5000,
    "tables.toml": "a = " + "{a = " * 5000 + "1" + "}" * 5000,
    "dotted.toml": ".".join("a" * 5000) + " = 1",
    "header.toml": "[" + ".".join("a" * 5000) + "]\nb = 1",
    "digits.toml": "a = " + "9" * 100_000,
    "large.toml": "# " + "x" * 5_000_000,
    "deep.yaml": "a: " + "[" * 5000 + "]" * 5000,
    "indented.yaml": "\n".join(" " * i + "a:" for i in range(1500)),
    "bomb.yaml": BOMB,
    "keyed.yaml": KEYED,
    "loop.yaml": "a: &a [*a]",
    "loop_of_keys.yaml": "training: &a\n  b: *a\n",
    "merged.yaml": "a: &a\n  <<: *a\n",
    "key.yaml": "? [a, b]\n: 1\n",
    "digits.yaml": "a: " + "9" * 100_000,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_ends_in_a_sentence(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(CONFIGS[name])
    ended = limited(partial(read_file, path, name))
    assert ended.startswith(f"ConfigError: {name}"), ended
    assert "\n" not in ended


def test_yaml_may_name_a_value_and_use_it_again(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("a: &a {x: 1}\ntraining:\n  <<: *a\n  y: 2\nlist: &l [1, 2]\nagain: *l\n")
    found = {key: entry.value for key, entry in read_file(path, "a.yaml").items()}
    assert found[("training", "x")] == 1
    assert found[("again",)] == [1, 2]


@pytest.mark.parametrize("text", [BOMB, KEYED, CONFIGS["deep.yaml"], "a: &a [*a]", "a: [", "\x00"])
def test_yaml_of_others_is_read_or_a_value_error(text: str) -> None:
    assert limited(partial(parse_yaml, text)).startswith("ValueError")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "9" * 10_000, "\xff", "", "{"])
def test_json_of_others_is_read_or_a_value_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(text.encode("latin-1"))
    assert not limited(partial(read_json, path)).startswith(("RecursionError", "died", "read"))
    path.write_text(json.dumps({"a": "b" * 1000}))
    assert read_json(path) == {"a": "b" * 1000}
    assert limited(partial(read_json, path, 100)).startswith("ValueError: it has 1,0")
