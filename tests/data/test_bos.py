"""A resumed run and an existing corpus keep BOS as they began, whatever the default is by now."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from overland.config.schema import JobConfig
from overland.data.corpus import lay_out
from overland.data.prepare import Place, open_tokenizer
from overland.data.sources import open_source
from overland.data.tokenizer import Tokenizer
from overland.data.wanted import sources_of
from overland.training.folder import RunFolder
from overland.training.resume import bos_of_the_resumed
from tests.data.making import write_lines
from tests.data.tokenizer_folders import write_bpe


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """One that begins documents with BOS by its own convention."""
    write_bpe(tmp_path)
    return Tokenizer(tmp_path)


def job(folder: Path, dataset: Path | str) -> JobConfig:
    sections = {
        "job": {"dump_folder": str(folder)},
        "training": {"dataset_path": str(dataset)},
        "data": {"folder": str(folder / "data")},
    }
    return JobConfig.model_validate(sections)


def opened(config: JobConfig, tokenizer: Tokenizer, place: Place) -> Tokenizer:
    return open_tokenizer(tokenizer.path, config, sources_of(config), place)


@pytest.mark.parametrize("add_bos", [None, False, True])
def test_a_resumed_run_keeps_its_own(
    tmp_path: Path, tokenizer: Tokenizer, add_bos: bool | None
) -> None:
    """Runs from before it was noted (None) began without."""
    assert tokenizer.add_bos
    run = tmp_path / "run"
    config = job(run, write_lines(tmp_path / "lines", 1))
    folder = RunFolder.of(config)
    assert bos_of_the_resumed(config.checkpoint, folder) is None
    (run / "data").mkdir(parents=True)
    noted = {} if add_bos is None else {"add_bos": add_bos}
    (run / "data" / "plan.json").write_text(json.dumps(noted))
    (folder.checkpoints / "step_1").mkdir(parents=True)
    (folder.checkpoints / "step_1" / "COMMITTED").write_text("{}")
    place = Place(add_bos=bos_of_the_resumed(config.checkpoint, folder))
    found = opened(config, tokenizer, place)
    assert found.add_bos == bool(add_bos)
    assert found.bos_because == "as this run began"


@pytest.mark.parametrize("add_bos", [False, True])
def test_a_built_corpus_keeps_its_own(tmp_path: Path, tokenizer: Tokenizer, add_bos: bool) -> None:
    source = open_source(write_lines(tmp_path / "lines", 1))
    corpus = lay_out("lines", source, tokenizer.with_bos(add_bos), tmp_path / "built")
    found = opened(job(tmp_path / "run", corpus), tokenizer, Place())
    assert found.add_bos == add_bos
    assert "was built" in found.bos_because
