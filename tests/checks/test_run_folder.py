"""Runs without a job.dump_folder have a folder each, and resume only themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from overland.checks import check_config
from overland.config.load import load_config
from overland.config.write import write_config


@pytest.fixture(autouse=True)
def _two_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text("[training]\ndataset = 'random'\n")
    Path("b.toml").write_text("[training]\ndataset = 'random'\n")


def folder_of(source: str, *arguments: str) -> str:
    return load_config(source, arguments, {}).config.job.dump_folder


def refusals(source: str, *arguments: str) -> list[str]:
    found = map(str, check_config(load_config(source, arguments, {}), 1))
    return [text for text in found if "job.dump_folder" in text]


def ran(source: str, *arguments: str) -> None:
    """Leaves what a run leaves in its folder."""
    config = load_config(source, arguments, {}).config
    folder = Path(config.job.dump_folder)
    folder.mkdir(parents=True)
    write_config(config, folder / "config.toml", full=True)


def test_each_config_has_a_folder_of_its_own() -> None:
    assert (folder_of("a.toml"), folder_of("b.toml")) == ("./outputs/a", "./outputs/b")
    assert folder_of("a.toml", "job.dump_folder=./outputs") == "./outputs"
    ran("a.toml")
    assert folder_of("outputs/a/config.toml") == "./outputs/a"  # which says so


def test_the_same_config_resumes_also_for_longer_and_at_another_rate() -> None:
    ran("a.toml")
    assert refusals("a.toml", "training.steps=99", "optimizer.lr=1e-5") == []


@pytest.mark.parametrize(
    "change", ["training.dataset=stdlib", "model.flavor=8B", "model.overrides.hidden_size=32"]
)
def test_another_model_or_other_data_does_not_resume_it(change: str) -> None:
    ran("a.toml")
    (said,) = refusals("a.toml", change)
    assert "has a run with another" in said
    assert "--resume none" in said
    assert refusals("a.toml", change, "checkpoint.resume=none") == []
    assert refusals("a.toml", change, "job.dump_folder=./outputs/a") == []  # on purpose


def test_a_recipes_folder_is_not_one_that_the_user_chose() -> None:
    ran("quickstart")
    assert refusals("quickstart") == []
    assert len(refusals("quickstart", "training.dataset_path=a.toml")) == 1


def test_a_folder_with_a_readme_that_is_no_runs_is_refused() -> None:
    Path("project").mkdir()
    Path("project/README.md").write_text("# My thesis\n")
    (line,) = refusals("a.toml", "job.dump_folder=project")
    assert "has a README.md of something else" in line
    Path("project/README.md").write_text("# My run\n\nWritten by `overland train`; edited.\n")
    assert refusals("a.toml", "job.dump_folder=project") == []
    (line,) = refusals("a.toml", "job.dump_folder=")
    assert "name a folder for this run" in line


@pytest.mark.parametrize("folder", ["", "../../etc", "a/../../b"])
def test_checkpoints_stay_in_the_run_folder(folder: str) -> None:
    found = check_config(load_config("a.toml", [f"checkpoint.folder={folder}"], {}), 1)
    (line,) = [str(one) for one in found if "checkpoint.folder" in str(one)]
    assert "expected the name of a folder inside the run folder" in line


def test_a_run_that_saves_nothing_does_not_start_in_a_folder_with_checkpoints() -> None:
    off = "checkpoint.enable=false"
    ran("a.toml")
    assert check("a.toml", off) == []
    saved = Path("outputs/a/checkpoint/step_6")
    saved.mkdir(parents=True)
    (saved / "COMMITTED").touch()
    assert check("a.toml") == []
    (said,) = check("a.toml", off)
    assert "checkpoint.enable" in said
    assert "--resume none" in said
    assert check("a.toml", off, "checkpoint.resume=none") == []
    assert check("a.toml", off, "job.dump_folder=elsewhere") == []


def test_checkpoints_under_another_name_are_not_passed_over() -> None:
    ran("a.toml", "checkpoint.folder=saves")
    saved = Path("outputs/a/saves/step_6")
    saved.mkdir(parents=True)
    (saved / "COMMITTED").touch()
    assert check("a.toml", "checkpoint.folder=saves") == []
    (said,) = check("a.toml")
    assert "checkpoint.folder" in said
    assert "saves" in said


def check(source: str, *arguments: str) -> list[str]:
    found = check_config(load_config(source, arguments, {}), 1)
    return [str(one) for one in found if one.kind != "note"]
