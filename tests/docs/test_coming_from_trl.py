"""What docs/coming-from/trl.md says to write here is there: keys take the values that it gives
them, commands have their options, and its config is one."""

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from overland.cli.main import app
from overland.config.fields import all_keys
from overland.config.load import load_config
from overland.config.schema import JobConfig
from tests.cli.processes import ROOT

PAGE = (ROOT / "docs" / "coming-from" / "trl.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, flags=re.M | re.S)
SPANS = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", PAGE, flags=re.M | re.S))
KEY = re.compile(r"([a-z_]+\.[a-z_0-9]+)(?: = (.+))?")
SECTIONS = {key.partition(".")[0] for key in all_keys()}
KEYS = sorted({
    (found[1], (found[2] or "").replace("\\|", "|"))
    for span in SPANS
    if (found := KEY.fullmatch(span)) and found[1].partition(".")[0] in SECTIONS
})  # fmt: skip
COMMANDS = sorted({
    line.replace("\\|", "|")
    for text in (*SPANS, *(line for _, block in BLOCKS for line in block.splitlines()))
    for line in [text.split("  #")[0]]
    if line.startswith("overland ")
})  # fmt: skip


def test_keys_take_their_values() -> None:
    assert len(KEYS) > 60
    for key, value in KEYS:
        assert key in all_keys(), key
        if value:
            JobConfig.model_validate(tomllib.loads(f"{key} = {value}"))


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_have_their_options(line: str) -> None:
    command: Any = typer.main.get_command(app)
    name = "overland"
    words = shlex.split(line)[1:]
    while isinstance(command, TyperGroup):
        found, command, words = command.resolve_command(command.context_class(command), words)
        name = str(found)
    command.make_context(name, words)


def test_the_config_is_one(tmp_path: Path) -> None:
    (config,) = [block for language, block in BLOCKS if language == "toml"]
    (tmp_path / "run.toml").write_text(config)
    loaded = load_config(str(tmp_path / "run.toml"), [], {}, resolve=False)
    assert loaded.config.lora.rank == 16
    assert not loaded.notes
