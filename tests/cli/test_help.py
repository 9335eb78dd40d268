"""`--help` and shell completion."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from overland.cli.main import EXAMPLES, OTHER_NAMES, app
from tests.cli.processes import environment

BIN = str(Path(sys.executable).parent)


def help_of(*words: str) -> str:
    done = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80", "TERM": "dumb"})
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("group", ["", "data", "prove", "config"])
def test_verbs_are_listed_uncut_at_80_columns(group: str) -> None:
    said = help_of(*group.split())
    assert "..." not in said.partition("Commands:")[2]
    for name in EXAMPLES:
        above, _, last = name.rpartition(" ")
        if above == group:
            assert re.search(rf"^  {last} +\S.*\.$", said, flags=re.MULTILINE), name
    assert max(map(len, said.splitlines())) <= 80


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_verb_has_an_example_that_its_options_allow(name: str) -> None:
    said, words = help_of(*name.split()), name.split()
    examples = EXAMPLES[name]
    command = typer.main.get_command(app)
    for word in words:
        command = command.commands[word]  # type: ignore[attr-defined]
    known = {one for parameter in command.params for one in parameter.opts}
    for example in examples:
        assert f"  {example}\n" in said
        given = shlex.split(example.partition(" > ")[0])
        assert given[: len(words) + 1] == ["overland", *words]
        assert {one for one in given if one.startswith("--")} <= known, example


def test_every_verb_is_described_and_has_an_example() -> None:
    def leaves(group: Any, above: str = "") -> Iterator[tuple[str, Any]]:
        for name, one in group.commands.items():
            yield from (
                leaves(one, f"{name} ") if hasattr(one, "commands") else [(above + name, one)]
            )

    shown = {name: one for name, one in leaves(typer.main.get_command(app)) if not one.hidden}
    assert set(shown) == set(EXAMPLES)
    assert all(one.help for one in shown.values())


def test_completion_is_installed_and_completes(tmp_path: Path) -> None:
    env = environment(HOME=str(tmp_path), PATH=f"{BIN}:{os.environ['PATH']}")
    bash = ["bash", "-c", "overland --install-completion; code=$?; exit $code"]
    done = subprocess.run(bash, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "bash completion installed in" in done.stdout
    (script,) = tmp_path.rglob("overland.sh")
    for words, expected in (
        ("overland tr", ["train"]),
        ("overland train quicks", ["quickstart"]),
        ("overland submit quickstart --site fron", ["frontier"]),
    ):
        asked = f"source {script}; COMP_WORDS=({words}); COMP_CWORD={words.count(' ')}; "
        asked += "$(complete -p overland | sed 's/.*-F \\([^ ]*\\).*/\\1/') overland; "
        bash = ["bash", "-c", asked + 'echo "${COMPREPLY[@]}"']
        done = subprocess.run(bash, env=env, cwd=tmp_path, capture_output=True, text=True,
                              timeout=300)  # fmt: skip
        assert done.stdout.split() == expected, done.stderr


def test_help_and_version_do_without_dashes() -> None:
    listed = CliRunner().invoke(app, ["help"])
    assert listed.exit_code == 0
    assert "overland [OPTIONS] COMMAND" in listed.output
    assert "supervise" not in listed.output
    assert CliRunner().invoke(app, ["version"]).output.startswith("overland ")


@pytest.mark.parametrize("words", [["-h"], ["train", "-h"], ["data", "build", "-h"]])
def test_the_short_option_shows_help_too(words: list[str]) -> None:
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, done.output[:6]) == (0, "Usage:")


def test_words_of_other_tools_name_the_verb() -> None:
    verbs = {one.name or one.callback.__name__ for one in app.registered_commands if one.callback}
    verbs |= {str(group.name) for group in app.registered_groups}
    for word, verb in OTHER_NAMES.items():
        assert word not in verbs
        assert verb.split()[0].strip("`") in verbs
    done = CliRunner().invoke(app, ["finetune", "run.toml"])
    assert done.exit_code == 2
    assert "`overland train`" in done.output
