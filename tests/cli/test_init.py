"""`overland init`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from overland.cli.init import SCRIPTS, about, files_of, init, script_names
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
    assert result.stderr.startswith("there is no recipe quikstart; recipes are ")
    assert result.stderr.endswith("did you mean quickstart?\n")


def test_scripts_are_listed_with_one_line_each() -> None:
    said = runner.invoke(app, []).stdout
    for name in script_names():
        assert f"\n{name}" in said
        title, usage = about(name)
        assert title in said
        assert usage


@pytest.mark.parametrize("name", script_names())
def test_every_script_lands_as_it_is_and_runs_as_it_says(name: str) -> None:
    result = runner.invoke(app, ["--from", name, "sub"])
    assert result.exit_code == 0
    assert about(name)[1] in result.stdout
    files = files_of(name)
    assert files
    for file in files:
        copy, source = Path("sub") / file, SCRIPTS / name / file
        assert copy.read_bytes() == source.read_bytes()
        assert os.access(copy, os.X_OK) == copy.read_bytes().startswith(b"#!")
        assert f"wrote {copy}" in result.stdout


@pytest.mark.parametrize("name", script_names())
def test_no_folder_of_scripts_is_a_package_that_hides_another(name: str) -> None:
    """Without an __init__.py a folder gives way to an installed package of its name."""
    tops = {file.parts[0] for file in files_of(name) if len(file.parts) > 1}
    for top in tops - {"datas"}:  # whose name is no installed package's
        assert not list((SCRIPTS / name / top).rglob("__init__.py"))


@pytest.mark.parametrize("name", script_names())
def test_shell_scripts_pass_shellcheck(name: str) -> None:
    scripts = [
        str(path)
        for path in (SCRIPTS / name / file for file in files_of(name))
        if path.read_bytes().startswith((b"#!/usr/bin/env bash", b"#!/bin/bash", b"#!/bin/sh"))
    ]
    if scripts:
        found = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True)
        assert found.stdout == ""


def test_scripts_are_copied_all_or_none() -> None:
    Path("torchtitan").mkdir()
    Path("torchtitan/train.py").write_text("mine")
    result = runner.invoke(app, ["--from", "torchtitan"])
    assert result.exit_code == 2
    assert result.stderr == "torchtitan/train.py already exists; use --force to overwrite it\n"
    assert not Path("run_train.sh").exists()
    assert runner.invoke(app, ["--from", "torchtitan", "--force"]).exit_code == 0
    assert Path("torchtitan/train.py").read_text() != "mine"
    assert Path("run_train.sh").exists()
    again = runner.invoke(app, ["--from", "torchtitan"])  # what is the same is no obstacle
    assert again.exit_code == 0
    assert "wrote" not in again.stdout
    Path("llama3_8b.toml").write_text("mine")  # a config of that name may be older, or another
    kept = runner.invoke(app, ["--from", "torchtitan"])
    assert "kept" in kept.stdout
    assert "--force overwrites it: llama3_8b.toml\n" in kept.stdout
    assert Path("llama3_8b.toml").read_text() == "mine"


def test_scripts_do_not_follow_a_link_out_of_the_folder() -> None:
    Path("theirs").write_text("theirs")
    Path("run_train.sh").symlink_to("theirs")
    assert runner.invoke(app, ["--from", "torchtitan"]).exit_code == 2
    assert runner.invoke(app, ["--from", "torchtitan", "--force"]).exit_code == 0
    assert Path("theirs").read_text() == "theirs"
    assert not Path("run_train.sh").is_symlink()


def test_a_file_in_the_place_of_a_folder_stops_before_anything_is_written() -> None:
    Path("torchtitan").write_text("a file")
    result = runner.invoke(app, ["--from", "torchtitan"])
    assert result.exit_code == 2
    assert "torchtitan" in result.stderr
    assert sorted(path.name for path in Path().iterdir() if path.is_file()) == ["torchtitan"]


def test_unknown_scripts_name_the_nearest() -> None:
    result = runner.invoke(app, ["--from", "torchtitn"])
    assert result.exit_code == 2
    assert result.stderr.startswith(
        "there are no scripts from torchtitn; did you mean 'torchtitan'?"
    )
    assert runner.invoke(app, ["--from", "torchtitan", "a", "b"]).exit_code == 2
