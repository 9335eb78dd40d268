"""`overland config …`."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from overland.cli.config import app
from overland.config.fields import all_keys
from overland.words import command

runner = CliRunner()


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_reference_prints_every_key_as_text_and_as_json() -> None:
    text = runner.invoke(app, ["reference"]).stdout
    rows = json.loads(runner.invoke(app, ["reference", "--json"]).stdout)
    names = {f"{row['section']}.{row['key']}" for row in rows}
    assert {name for name in names if name.count(".") == 1} == set(all_keys())
    assert {"data.sources.NAME.weight", "model.sparse.pattern"} <= names
    assert "data.sources.NAME.weight" in names
    assert all(row["description"][:20] in text for row in rows)


def test_reference_of_a_word_shows_only_the_keys_that_have_it() -> None:
    text = runner.invoke(app, ["reference", "Column"]).stdout
    rows = json.loads(runner.invoke(app, ["reference", "Column", "--json"]).stdout)
    assert {"column"} < {row["key"] for row in rows}
    assert all("column" in (row["key"] + row["description"]).lower() for row in rows)
    assert "[training]" in text
    assert "[optimizer]" not in text
    assert "local_batch_size" not in text
    done = runner.invoke(app, ["reference", "nonsense"])
    assert done.exit_code == 2
    assert "no key has 'nonsense' in its name or description" in done.stderr


def test_reference_has_a_table_for_the_terminal() -> None:
    from rich.console import Console

    from overland.apps.reference import reference_tables

    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for table in reference_tables():
        console.print(table)
    text = console.export_text()
    assert "[training] Data, batch size" in text
    assert "local_batch_size" in text


def test_schema_is_json_schema() -> None:
    schema = json.loads(runner.invoke(app, ["schema"]).stdout)
    assert schema["additionalProperties"] is False
    assert "training" in schema["properties"]


def test_show_prints_the_resolved_config() -> None:
    result = runner.invoke(app, ["show", "llama3_debug", "training.steps=3", "--compile.enable"])
    config = tomllib.loads(result.stdout)
    assert config["training"]["steps"] == 3
    assert config["compile"] == {"enable": True}
    full = tomllib.loads(runner.invoke(app, ["show", "llama3_debug", "--full"]).stdout)
    assert full["optimizer"]["beta1"] == 0.9


def test_convert_writes_todays_keys_and_lists_what_has_no_meaning() -> None:
    Path("old.toml").write_text("[training]\nbatch_size = 3\n[comm]\ntrace_buf_size = 5\n")
    result = runner.invoke(app, ["convert", "old.toml", "new.toml"])
    assert result.exit_code == 0, result.output
    assert "note: old.toml:2: training.batch_size is now" in result.stderr
    text = Path("new.toml").read_text()
    assert tomllib.loads(text) == {"training": {"local_batch_size": 3}}
    assert "comm.trace_buf_size" in text
    again = runner.invoke(app, ["convert", "old.toml", "new.toml"])
    assert again.exit_code == 2
    assert again.stderr == "new.toml exists already; --force overwrites it\n"
    assert runner.invoke(app, ["convert", "old.toml", "new.toml", "--force"]).exit_code == 0


def test_a_broken_config_ends_with_2_and_its_lines_alone() -> None:
    Path("run.toml").write_text("[training]\nstep = 3\nseq_len = 0\n")
    result = runner.invoke(app, ["show", "run.toml"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == (
        "run.toml:2: training.step = 3: unknown key; did you mean training.steps?\n"
        "run.toml:3: training.seq_len = 0: expected a positive whole number\n"
    )


def test_a_path_with_an_equals_sign_is_a_config(tmp_path: Path) -> None:
    folder = tmp_path / "lr=1e-3"
    folder.mkdir()
    (folder / "run.toml").write_text("[training]\nsteps = 7\n")
    for path in ("lr=1e-3/run.toml", "./lr=1e-3/run.toml"):
        assert "steps = 7" in runner.invoke(app, ["show", path]).stdout


def test_suggested_commands_take_a_path_with_a_dash_for_a_path() -> None:
    assert command("overland", "report", Path("-run"), "--json").endswith(" report ./-run --json")
