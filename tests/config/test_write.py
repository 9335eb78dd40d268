"""What is written is read back as the same config."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from overland.apps.reference import json_schema, reference_rows, reference_text
from overland.config.fields import all_keys
from overland.config.load import load_config, recipe_names
from overland.config.schema import JobConfig
from overland.config.write import to_toml, write_config


def changed() -> JobConfig:
    return JobConfig.model_validate(
        {
            "job": {"description": 'a "quoted" \\ line\nand é', "dump_folder": "/x y/$1"},
            "model": {"overrides": {"rope": {"factor": 8.0}, "odd.key": [1, 2], "tie": True}},
            "training": {"steps": 7, "max_norm": 0.0, "dataset_path": "/a"},
            "optimizer": {"lr": 1e-12, "eps": 1e-20},
            "lr_scheduler": {"min_lr": 0.0, "total_steps": 5},
            "validation": {"dataset": ["a", "b"], "steps": -1},
            "data": {"datasets": {"c4": "/scratch/c4", "my set": "x"}},
        }
    )


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("config", [JobConfig(), changed()], ids=["defaults", "changed"])
def test_written_toml_reads_back_equal(config: JobConfig, full: bool, tmp_path: Path) -> None:
    path = tmp_path / "written.toml"
    write_config(config, path, full=full, heading="first\nsecond line")
    loaded = load_config(str(path), env={})
    assert loaded.config == config
    assert loaded.notes == []
    assert max(map(len, path.read_text().splitlines())) <= 120


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_survive_writing(name: str, tmp_path: Path) -> None:
    config = load_config(name, env={}).config
    write_config(config, tmp_path / "x.toml")
    assert load_config(str(tmp_path / "x.toml"), env={}).config == config


def test_only_what_differs_is_written_unless_all_is_asked_for() -> None:
    """But for the run folder, whose default depends on where a config is read from."""
    job = {"job": {"dump_folder": "./outputs"}}
    assert tomllib.loads(to_toml(JobConfig())) == job
    config = JobConfig.model_validate({"training": {"steps": 7}})
    assert tomllib.loads(to_toml(config)) == {**job, "training": {"steps": 7}}
    full = tomllib.loads(to_toml(config, full=True))
    unset = {key.dotted for key in all_keys().values() if key.default is None}
    assert {f"{s}.{k}" for s, keys in full.items() for k in keys} == set(all_keys()) - unset


def test_every_key_is_described_in_reference_and_schema() -> None:
    text = reference_text()
    for row in reference_rows():
        assert row["description"], row
        assert row["type"], row
        assert f"  {row['key']} = " in text
    schema = json_schema()
    assert schema["title"] == "Overland run config"
    for definition in [schema, *schema["$defs"].values()]:
        assert definition["additionalProperties"] is False
    for definition in schema["$defs"].values():
        assert definition["description"]
        assert all("description" in item for item in definition["properties"].values())
