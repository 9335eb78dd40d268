"""`overland init`."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from overland.cli.init import init
from overland.config.load import recipe_names, recipe_path

runner = CliRunner()
app = typer.Typer()
app.command()(init)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_recipes_are_listed_with_one_line_each() -> None:
    lines = runner.invoke(app, []).stdout.splitlines()
    assert {"quickstart", "llama3_debug", "llama3_8b", "llama3_8b_frontier", "qwen3_0.6b"} <= set(
        recipe_names()
    )
    for name in recipe_names():
        (line,) = [line for line in lines if line.split(maxsplit=1)[:1] == [name]]
        assert len(line.split(maxsplit=1)[1]) > 10


def test_a_recipe_is_copied_with_its_comments() -> None:
    assert runner.invoke(app, ["quickstart"]).exit_code == 0
    source = recipe_path("quickstart")
    assert source is not None
    assert Path("quickstart.toml").read_text() == source.read_text()
    assert runner.invoke(app, ["quickstart", "sub/mine.toml"]).exit_code == 0
    assert Path("sub/mine.toml").is_file()
    assert runner.invoke(app, ["quickstart", "sub"]).exit_code == 0
    assert Path("sub/quickstart.toml").is_file()


def test_nothing_is_overwritten_unless_forced() -> None:
    Path("quickstart.toml").write_text("mine")
    result = runner.invoke(app, ["quickstart"])
    assert result.exit_code == 2
    assert result.stderr == "quickstart.toml exists already; --force overwrites it\n"
    assert Path("quickstart.toml").read_text() == "mine"
    assert runner.invoke(app, ["quickstart", "--force"]).exit_code == 0


def test_an_unknown_recipe_names_the_nearest() -> None:
    result = runner.invoke(app, ["quikstart"])
    assert result.exit_code == 2
    assert result.stderr.startswith("there is no recipe quikstart (recipes: ")
    assert result.stderr.endswith("did you mean quickstart?\n")
