"""A resumed run and an existing corpus keep BOS and EOS as they began, whatever the default is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from overland.config.schema import JobConfig
from overland.data.corpora import Preparer
from overland.data.corpus import Corpus
from overland.data.layout import lay_out
from overland.data.prepare import asked_policy, one_tokenizer, open_tokenizer
from overland.data.sources import open_source
from overland.data.tokenizer import UNKNOWN, Tokenizer
from overland.data.wanted import sources_of
from overland.errors import DataError
from overland.run_folder import RunFolder
from overland.training.resume import preparer_for
from tests.data.making import write_lines
from tests.data.tokenizer_folders import write_bpe


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """One that begins documents with BOS by its own convention."""
    write_bpe(tmp_path)
    return Tokenizer(tmp_path)


def job(folder: Path, dataset: Path | str, **data: object) -> JobConfig:
    sections = {
        "job": {"dump_folder": str(folder)},
        "training": {"dataset_path": str(dataset)},
        "data": {"folder": str(folder / "data"), **data},
    }
    return JobConfig.model_validate(sections)


def opened(config: JobConfig, tokenizer: Tokenizer, place: Preparer) -> Tokenizer:
    return open_tokenizer(tokenizer.path, config, sources_of(config), place)


@pytest.mark.parametrize("add_bos", [False, True])
def test_a_resumed_run_keeps_its_own(tmp_path: Path, tokenizer: Tokenizer, add_bos: bool) -> None:
    assert tokenizer.add_bos
    run = tmp_path / "run"
    config = job(run, write_lines(tmp_path / "lines", 1))
    folder = RunFolder(config)
    assert preparer_for(config, folder).policy == UNKNOWN
    (run / "data").mkdir(parents=True)
    plan: dict[str, object] = {"sources": {}, "segments": []}
    (run / "data" / "plan.json").write_text(json.dumps({"plan": plan, "add_bos": add_bos}))
    (folder.checkpoints / "step_1").mkdir(parents=True)
    (folder.checkpoints / "step_1" / "COMMITTED").write_text("{}")
    found = opened(config, tokenizer, preparer_for(config, folder))
    assert found.add_bos == add_bos
    assert found.bos_because == "as this run began"


@pytest.mark.parametrize("add_bos", [False, True])
def test_a_built_corpus_keeps_its_own(tmp_path: Path, tokenizer: Tokenizer, add_bos: bool) -> None:
    source = open_source(write_lines(tmp_path / "lines", 1))
    corpus = lay_out("lines", source, tokenizer.with_bos(add_bos), tmp_path / "built")
    found = opened(job(tmp_path / "run", corpus), tokenizer, Preparer())
    assert found.add_bos == add_bos
    assert "was built" in found.bos_because


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("add_eos", [False, True])
def test_a_corpus_is_trained_on_as_it_was_built(
    tmp_path: Path, tokenizer: Tokenizer, add_bos: bool, add_eos: bool
) -> None:
    """With the tokenizer's folder given (as the copy in a run folder is) or without; a config that
    asks for something else is refused in both cases."""
    built = Tokenizer(tokenizer.path, add_bos=add_bos, add_eos=add_eos)
    source = open_source(write_lines(tmp_path / "lines", 1))
    corpora = {"lines": Corpus(lay_out("lines", source, built, tmp_path / "built"))}
    folder = corpora["lines"].folder
    given = opened(job(tmp_path / "run", folder), tokenizer, Preparer())
    assert given.fingerprint == built.fingerprint
    for one in (given, None):
        found = one_tokenizer(one, corpora)
        assert found is not None
        assert found.policy == (add_bos, add_eos)
    for key, has in (("add_bos", add_bos), ("add_eos", add_eos)):
        config = job(tmp_path / "run", folder, **{key: not has})
        for one in (opened(config, tokenizer, Preparer()), None):
            with pytest.raises(DataError, match=rf"data\.{key} is {str(not has).lower()}, but"):
                one_tokenizer(one, corpora, asked_policy(config))


def test_corpora_of_different_policies_are_not_mixed(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = open_source(write_lines(tmp_path / "lines", 1))
    bare = Tokenizer(tokenizer.path, add_eos=False)
    folders = [lay_out("lines", source, one, tmp_path / "built") for one in (bare, bare, tokenizer)]
    corpora = dict(zip("abc", map(Corpus, folders), strict=True))
    with pytest.raises(DataError, match=r"c was made with another .* \(with BOS and with EOS\)"):
        one_tokenizer(None, corpora)
    del corpora["c"]
    found = one_tokenizer(None, corpora)
    assert found is not None
    assert found.fingerprint == bare.fingerprint
