"""Variables and home folders in the paths of a config."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from overland.cli.main import app
from overland.config.errors import ConfigError
from overland.config.fields import all_keys
from overland.config.load import load_config
from overland.config.write import write_config

ENV = {"SCRATCH_ROOT": "/lustre/x$y", "EMPTY": "", "HF_TOKEN": "hf_secret", "my_token": "hf_secret"}
NO_PATHS = {"metrics.sample_prompt", "model.attention"}  # of text, and left as they are

CONFIG = """
[job]
dump_folder = "$SCRATCH_ROOT/run"
description = "costs $SCRATCH_ROOT"

[model]
config = "~/models/8B"

[data]
datasets = { c4 = "${SCRATCH_ROOT}/c4", plain = "a$$b" }

[data.sources.books]
path = "$SCRATCH_ROOT/books"
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    Path("run.toml").write_text(CONFIG)


def test_variables_and_the_home_folder_are_resolved_in_paths_and_nowhere_else() -> None:
    loaded = load_config("run.toml", ["checkpoint.folder=$SCRATCH_ROOT/ckpt"], ENV)
    config = loaded.config
    assert config.job.dump_folder == "/lustre/x$y/run"
    assert config.job.description == "costs $SCRATCH_ROOT"
    assert config.model.config == "/home/me/models/8B"
    assert config.data.datasets == {"c4": "/lustre/x$y/c4", "plain": "a$b"}
    assert config.data.sources["books"].path == "/lustre/x$y/books"
    assert config.checkpoint.folder == "/lustre/x$y/ckpt"
    assert loaded.variables == {"SCRATCH_ROOT": "/lustre/x$y"}


def test_every_key_that_is_a_path_takes_variables() -> None:
    """A new key called folder or path must be marked as one."""
    named = {
        key.dotted
        for key in all_keys().values()
        if key.name.endswith(("folder", "path")) and key.accepts(str)
    }
    assert {key for key in named if not all_keys()[key].has_paths} == set()
    assert all_keys()["data.sources"].has_paths


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("$NOWHERE/x", "the variable NOWHERE is not set here"),
        ("$EMPTY/x", "the variable EMPTY is not set here"),
        ("/x/$HF_TOKEN", "$HF_TOKEN looks like a secret"),
        ("/x/$my_token", "$my_token looks like a secret"),
        ("${SCRATCH_ROOT:-/tmp}/x", "expected ${NAME}, not ${SCRATCH_ROOT:-/tmp}"),
        ("~nobody_of_that_name/x", "~nobody_of_that_name: there is no such user"),
        ("${SCRATCH_ROOT/x", "the closing brace is missing"),
    ],
)
def test_what_cannot_be_resolved_is_one_sentence(path: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("run.toml", [f"training.dataset_path={path}"], ENV)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f'command line: training.dataset_path = "{path}": ')
    assert says in line
    assert "hf_secret" not in line


def test_a_config_that_a_run_keeps_means_the_same_in_any_environment() -> None:
    config = load_config("run.toml", env=ENV).config
    write_config(config, Path("kept.toml"), full=True)
    assert load_config("kept.toml", env={"SCRATCH_ROOT": "/elsewhere"}).config == config


def test_config_show_gives_both_forms_and_convert_keeps_the_written_one() -> None:
    run = CliRunner().invoke(app, ["config", "show", "run.toml"], env=ENV)
    assert '# dump_folder is written "$SCRATCH_ROOT/run"' in run.output
    assert 'dump_folder = "/lustre/x$$y/run"' in run.output
    assert CliRunner().invoke(app, ["config", "convert", "run.toml", "new.toml"]).exit_code == 0
    assert load_config("new.toml", env=ENV).config == load_config("run.toml", env=ENV).config
    assert '"$SCRATCH_ROOT/run"' in Path("new.toml").read_text()
