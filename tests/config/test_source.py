"""Lines of keys in TOML and YAML."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from overland import files
from overland.config import source
from overland.config.errors import ConfigError
from overland.config.source import read_file, read_toml, read_yaml
from overland.files import parse_toml, parse_yaml

TOML = '''top.level = 1
"quoted.key" = 2
[table]
numbers = [
  1, # a ] in a comment
  2,
]
words = [
  ["]"],
  ['x = 1'],
]
text = """
not_a_key = 1
"""
inline = { a = 1, "b.c" = 'x', deep = { d = [1, 2] } }
after = true # and a comment = here

[table.sub]
key = 'single'
[[many]]
a = 1
[[many]]
a = 2
["odd [name]"]
z = 1
'''


@pytest.mark.parametrize(
    "text",
    [
        "a." * 20_000 + "a = 1",
        "[" + "a." * 60 + "a]",
        "x = [{" + "a." * 60 + "a = 1}]",
        '"b" . ' * 60 + "a = 1",
        "x = " + "[" * 5000 + "]" * 5000,
    ],
)
def test_toml_that_is_nested_too_deeply_is_not_parsed(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dotted key of 40 kB would take 18 s and 3.3 GB."""
    asked: list[str] = []
    usual = tomllib.loads
    monkeypatch.setattr(tomllib, "loads", lambda one: asked.append(one) or usual(one))
    with pytest.raises(
        ConfigError, match=r"x\.toml: not valid TOML: its values are nested too deeply"
    ):
        read_toml(text, "x.toml")
    assert "a.a" not in "".join(asked)
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_toml(text)


def test_invalid_toml_is_not_searched_for_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strings that never end would be searched again from each of their characters."""
    monkeypatch.setattr(source, "index_lines", None)
    with pytest.raises(ConfigError, match=r"x\.toml:1: not valid TOML") as error:
        read_toml('a = [""" ' + "x" * 1000, "x.toml")
    assert len(str(error.value)) < 400


def test_yaml_is_refused_as_soon_as_it_has_too_many_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_VALUES", 100)
    text = "[" + "1," * 200 + "}"  # not valid either, behind them
    with pytest.raises(ConfigError, match="more than 100 values"):
        read_yaml(text, "x.yaml")
    with pytest.raises(ValueError, match="more than 100 values"):
        parse_yaml(text)


@pytest.mark.parametrize("value", ["!!bool perhaps", "!!timestamp x", "!!int x", "2001-99-99"])
def test_yaml_values_that_are_not_of_their_type_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"x\.yaml: not valid YAML"):
        read_yaml(f"a: {value}", "x.yaml")
    with pytest.raises(ValueError):  # noqa: PT011
        parse_yaml(f"a: {value}")


def test_a_number_that_cannot_be_printed_is_refused() -> None:
    huge = "0x" + "f" * 5000
    with pytest.raises(ConfigError, match=r"x\.toml:2: .*optimizer\.lr.*too large"):
        read_toml(f"[optimizer]\nlr = [{{ a = {huge} }}]", "x.toml")
    with pytest.raises(ConfigError, match="too large"):
        read_yaml(f"a: {huge}", "x.yaml")


def test_toml_keys_have_the_line_they_stand_on() -> None:
    lines = {
        ".".join(path): int(entry.where.rpartition(":")[2])
        for path, entry in read_toml(TOML, "x.toml").items()
    }
    assert lines == {
        "top.level": 1,
        "quoted.key": 2,
        "table.numbers": 4,
        "table.words": 8,
        "table.text": 12,
        "table.inline.a": 15,
        "table.inline.b.c": 15,
        "table.inline.deep.d": 15,
        "table.after": 16,
        "table.sub.key": 19,
        "many": 20,
        "odd [name].z": 25,
    }


def test_yaml_keys_have_the_line_they_stand_on() -> None:
    text = "a:\n  b: 1\n  # comment\n  c: {d: 2,\n    e: 3}\nf:\n- 1\n"
    entries = read_yaml(text, "x.yaml")
    assert {".".join(p): e.where for p, e in entries.items()} == {
        "a.b": "x.yaml:2",
        "a.c.d": "x.yaml:4",
        "a.c.e": "x.yaml:5",
        "f": "x.yaml:6",
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[a\nx = 1\n", "x.toml:1: not valid TOML: missing closing ] of a section in `[a`"),
        (
            'a = "x\nb = 1\n',
            'x.toml:1: not valid TOML: missing closing quote in `a = "x`',
        ),
        ("[a]\nx 3\n", "x.toml:2: not valid TOML: missing = after the key in `x 3`"),
        (
            "x = 1 y = 2\n",
            "x.toml:1: not valid TOML: unexpected text after the value in `x = 1 y = 2`",
        ),
        ("[a]\n[b]\n[a]\n", "x.toml:3: a: given twice; first on line 1"),
        ("a.b = 1\n\n'a'.b = 2\n", "x.toml:3: a.b: given twice; first on line 1"),
        (
            "a = { c = 1, c = 2 }\n",
            "x.toml:1: not valid TOML: duplicate inline table key 'c' in `a = { c = 1, c = 2 }`",
        ),
    ],
)
def test_toml_syntax_errors_are_sentences(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_toml(text, "x.toml")
    assert str(caught.value) == says


def test_yaml_runs_nothing_and_says_where_it_fails() -> None:
    with pytest.raises(ConfigError, match=r"x.yaml:1: not valid YAML: could not determine"):
        read_yaml("a: !!python/object/apply:os.getcwd []\n", "x.yaml")
    with pytest.raises(ConfigError, match=r"x.yaml:3: not valid YAML"):
        read_yaml("a:\n  b: [1,\nc: 2\n", "x.yaml")
    with pytest.raises(ConfigError, match="expected sections with keys"):
        read_yaml("- 1\n- 2\n", "x.yaml")


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    for name, text in (
        ("a.toml", "[training]\nsteps = 3\n"),
        ("a.yaml", "training:\n  steps: 3\n"),
    ):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        assert read_file(tmp_path / name, name)["training", "steps"].value == 3
