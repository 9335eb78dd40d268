"""The commands that README and docs tell their readers to type exist, and work
(docs/testing.md)."""

from __future__ import annotations

import re
import shlex
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from overland.cli.main import app
from overland.config.fields import all_keys
from overland.config.schema import JobConfig
from tests.cli.processes import ROOT
from tests.docs.commands import (
    DOCUMENTS,
    TUTORIALS,
    block_commands,
    inline_commands,
    listed_commands,
    pages,
    read,
)
from tests.docs.example import make_example
from tests.docs.shell import Shell
from tests.documents.test_pages import functions_of

RECIPES = {path.stem for path in (ROOT / "overland/recipes").glob("*.toml")}
SECTIONS = {key.partition(".")[0] for key in all_keys()}
TAKE_CONFIGS = ("train", "check", "submit", "init")
SETTING = re.compile(r"(?:--)?([a-z_0-9]+\.[a-z_0-9.]+)=(.+)")


@pytest.mark.parametrize("name", pages())
def test_every_overland_command_can_be_typed(name: str) -> None:
    text = read(name)
    for line in [*block_commands(text), *inline_commands(text)]:
        for command in overland_commands(line):
            can_be_typed(command)


def overland_commands(line: str) -> list[list[str]]:
    """The words behind `overland`, wherever it stands in a line; a|b is one command each. What an
    ellipsis or brackets stand for is left out."""
    line = re.sub(r"\[[^\]]*\]|…", "", line.split(" > ")[0].split(" && ")[0].split(" || ")[0])
    found = re.search(r"(?:^|\s)(?:-m )?overland (.+)", line)
    if not found or re.search(r"git clone|--install-completion|overland VERB", line):
        return []
    words = shlex.split(
        found[1].split(" | ")[0].replace('"', "'") if "--wrap" in line else found[1]
    )
    split = next((i for i, word in enumerate(words) if re.fullmatch(r"\w+(\|\w*)+", word)), None)
    if split is None:
        return [words]
    return [[*words[:split], one, *words[split + 1 :]] for one in words[split].split("|") if one]


@cache
def overland() -> Any:
    return typer.main.get_command(app)


def can_be_typed(words: list[str]) -> None:
    command: Any = overland()
    name = "overland"
    settings = [found for word in words if (found := SETTING.fullmatch(word))]
    for found in settings:
        assert is_key(found[1]), f"there is no key {found[1]}"
    if words[0] in TAKE_CONFIGS and len(words) > 1 and re.fullmatch(r"[a-z][a-z_0-9]+", words[1]):
        assert words[1] in RECIPES, f"there is no recipe {words[1]}"
    try:
        while isinstance(command, TyperGroup) and words and words[0][0] != "-":
            found_name, command, words = command.resolve_command(
                command.context_class(command), words
            )
            name = str(found_name)
        command.make_context(name, [number(word) for word in words])
    except Exception as error:  # typer's classes of errors are private
        if not is_about_a_verb_alone(error):
            raise


def is_about_a_verb_alone(error: Exception) -> bool:
    """`overland convert` in the text, or `overland eval --data`, or a verb with --help."""
    kind = type(error).__name__
    if kind == "BadOptionUsage":
        return "requires an argument" in str(error)
    return kind in ("MissingParameter", "NoArgsIsHelpError", "Exit")


def number(word: str) -> str:
    """Names of the docs that stand for numbers."""
    return "2" if word == "N" else word


def is_key(key: str) -> bool:
    keys = all_keys()
    parents = [key.rsplit(".", depth)[0] for depth in range(key.count("."))]
    return any(one in keys for one in parents)


# Mapped keys


@pytest.mark.parametrize("name", ["nanogpt", "deepspeed"])
def test_mapped_keys_take_their_values(name: str) -> None:
    text = re.sub(r"^```.*?^```$", "", read(f"docs/coming-from/{name}.md"), flags=re.M | re.S)
    ours = [line.split(" | ", 1)[-1] for line in text.splitlines()]  # theirs is the first column
    spans = [span for line in ours for span in re.findall(r"`([^`]+)`", line)]
    keys = [found for span in spans if (found := re.fullmatch(r"(\w+\.\w+)(?: = (.+))?", span))]
    mapped = [(one[1], one[2]) for one in keys if one[1].partition(".")[0] in SECTIONS]
    mapped = [one for one in mapped if one[0] != "metrics.jsonl"]  # a file
    assert len(mapped) > 25
    for key, value in mapped:
        assert key in all_keys(), key
        if value:
            JobConfig.model_validate(tomllib.loads(f"{key} = {value}"))


# Commands in blocks


@cache
def shown() -> frozenset[str]:
    """Those of pages that no test runs whole."""
    names = [one for one in pages() if not one.startswith(TUTORIALS) and one not in DOCUMENTS]
    return frozenset(command for name in names for command in block_commands(read(name)))


def test_every_command_is_listed_with_what_runs_it() -> None:
    missing = sorted(shown() - listed_commands().keys())
    assert not missing, f"say in tests/docs/commands.txt how a test runs these: {missing}"


def test_what_is_listed_is_shown_and_the_tests_are_there() -> None:
    assert sorted(listed_commands().keys() - shown()) == []
    for how in {*listed_commands().values()}:
        if how.startswith(("run", "prove", "not run: ")):
            continue
        file, _, function = how.partition("::")
        assert (ROOT / file).exists(), file
        assert not function or function in functions_of(ROOT / file), how


def test_commands_run(tmp_path: Path) -> None:
    make_example(tmp_path, steps=2)
    shell = Shell(tmp_path, NGPU="1")
    try:
        for command, how in listed_commands().items():
            if how == "run":
                code, said = shell.run(command)
                assert code == 0, f"exit {code} of {command}\n{said}"
    finally:
        shell.close()
