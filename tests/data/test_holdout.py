"""Documents that are kept out of training: which ones, and who reads them."""

import contextlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import pytest

from overland.apps.check.rehearsal import require_start
from overland.checks import load_checked
from overland.config.errors import ConfigError
from overland.config.load import load_config
from overland.config.schema import JobConfig
from overland.data.corpora import Preparer
from overland.data.corpus import Corpus
from overland.data.holdout import foreign_validation, kept_share
from overland.data.layout import lay_out
from overland.data.plan import Plan, kept_plan
from overland.data.prepare import Dataset, training_data, validation_data
from overland.data.sampler import Sampler
from overland.data.sources import open_source
from overland.data.tokenizer import Tokenizer
from overland.errors import DataError
from overland.run_folder import PLAN
from tests.data.corpora import Numbered, make_corpus, one_segment, rows_of
from tests.data.making import write_lines

SHARE = 0.2
VALIDATES_ON_ITSELF = {"training": {"dataset": "stdlib_heldout"}, "validation": {"enable": True}}


def documents_in_an_epoch(rows: Sampler, held: bool) -> list[int]:
    """The numbers that the documents of an epoch are made of, as often as they begin."""
    windows = next(iter(replaced(rows, held).windows.values()))
    found = [windows.open(number) for number in range(windows.per_epoch)]
    return [
        int(part.files[file].tokens[start])
        for part in found
        for file, start in zip(part.file, part.start, strict=True)
    ]


def replaced(rows: Sampler, held: bool) -> Sampler:
    return Sampler(rows.plan, rows.corpora, replace(rows.reading, held_out=held))


def with_holdout(plan: Plan, share: float = SHARE) -> Plan:
    sources = {name: replace(one, holdout=share) for name, one in plan.sources.items()}
    return replace(plan, sources=sources)


def sides(corpus: Corpus, share: float = SHARE) -> tuple[list[int], list[int]]:
    corpora = {"a": corpus}
    rows = rows_of(with_holdout(one_segment(corpora, {"a": 1.0}), share), corpora)
    return documents_in_an_epoch(rows, held=False), documents_in_an_epoch(rows, held=True)


def test_each_document_is_on_one_side_and_copies_are_on_the_same(tmp_path: Path) -> None:
    class Twice(Numbered):
        """The second half of the documents is the first again."""

        def read(self, chunk: str) -> Iterator[Any]:
            for i in range(int(chunk), int(chunk) + self.num_documents(chunk)):
                yield np.full(self.lengths[i % 300], self.first + i % 300)

    trained, held = sides(make_corpus("a", Twice(100, 600), tmp_path))
    assert set(trained).isdisjoint(held)
    assert sorted(trained + held) == sorted([*range(100, 400), *range(100, 400)])
    assert 0.1 < len(held) / 600 < 0.3


def test_a_document_stays_on_its_side_when_data_is_added(tmp_path: Path) -> None:
    _, few = sides(make_corpus("a", Numbered(100, 300), tmp_path / "few", built=True))
    _, many = sides(make_corpus("a", Numbered(100, 900, per_chunk=5), tmp_path / "many"))
    assert set(few) == {number for number in many if number < 400}
    assert len(many) > len(few) > 0
    _, more = sides(make_corpus("a", Numbered(100, 300), tmp_path / "few"), share=0.4)
    assert set(few) < set(more)


@pytest.mark.parametrize("mixture", ["sequences", "documents"])
@pytest.mark.parametrize("packing", ["pack", "overflow", "trunc", "best_fit"])
def test_no_held_out_document_is_in_any_batch(tmp_path: Path, packing: str, mixture: str) -> None:
    sources = {"a": Numbered(100, 40), "b": Numbered(1000, 60)}
    corpora = {name: make_corpus(name, one, tmp_path) for name, one in sources.items()}
    plan = with_holdout(one_segment(corpora, {"a": 1.0, "b": 2.0}, mixture, packing=packing))
    rows = rows_of(plan, corpora, tmp_path / "counts")
    fed = {int(token) for batch in range(120) for token in np.unique(rows.read(batch).tokens)}
    held = {number for corpus in corpora.values() for number in sides(corpus)[1]}
    assert fed - {0} == {*range(100, 140), *range(1000, 1060)} - held
    again = rows_of(Plan.from_json(plan.to_json()), corpora, tmp_path / "counts")
    for batch, part in itertools.product((119, 7), (0, 1)):
        assert np.array_equal(again.read(batch, part, 2).tokens, rows.read(batch, part, 2).tokens)


def test_the_share_is_part_of_the_plan_and_cannot_change_in_a_run(tmp_path: Path) -> None:
    corpora = {"a": make_corpus("a", Numbered(0, 40), tmp_path)}
    plan = one_segment(corpora, {"a": 1.0})
    held = with_holdout(plan)
    assert plan.to_json()["sources"]["a"] == {  # as it always was, so that runs can be resumed
        "fingerprint": corpora["a"].fingerprint,
        "max_epochs": None,
    }
    assert held.fingerprint != plan.fingerprint
    assert Plan.from_json(held.to_json()) == held
    for before, after in ((plan, held), (held, plan), (held, with_holdout(plan, 0.3))):
        with pytest.raises(DataError, match="validate on documents that it was trained on"):
            before.continued(after, 5)
    assert held.continued(held, 5) == held


def test_shares_that_leave_nothing_are_told(tmp_path: Path) -> None:
    corpus = make_corpus("a", Numbered(0, 20), tmp_path)
    with pytest.raises(DataError, match=r"data\.holdout holds out no document of a"):
        sides(corpus, share=1e-9)
    with pytest.raises(DataError, match=r"data\.holdout holds out every document of a"):
        sides(corpus, share=1 - 1e-12)


def test_a_share_of_one_is_not_taken_for_a_number_of_documents() -> None:
    for value, is_right in ((1, True), (0.999, True), (1.0, False), (20.0, False), (True, False)):
        with contextlib.nullcontext() if is_right else pytest.raises(ConfigError, match="holdout"):
            loaded = load_config("quickstart", [f"data.holdout={json.dumps(value)}"])
            assert loaded.config.data.holdout == value


def test_a_built_corpus_is_split_alike_whatever_stands_around_its_documents(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    source = open_source(write_lines(tmp_path / "text", 2, 50))
    bare = Tokenizer(Path(tokenizer.path), add_eos=False)
    found = []
    for number, one in enumerate((tokenizer, bare)):
        folder = lay_out("a", source, one, tmp_path / str(number))
        corpus = Corpus(folder, lambda: source, one, wait=False)
        found.append(corpus.shard(0).held_out(SHARE).tolist())
    assert found[0] == found[1]
    assert 0 < sum(found[0]) < 100


def config_of(
    text: Path | dict[str, Path], root: Path, tokenizer: Tokenizer, holdout: float, **data: Any
) -> JobConfig:
    sources = {name: {"path": str(path)} for name, path in text.items()} if _many(text) else {}
    place = {} if sources else {"dataset_path": str(text)}
    return JobConfig.model_validate(
        {
            "model": {"hf_assets_path": str(tokenizer.path)},
            "training": {**place, "seq_len": 32},
            "data": {
                "folder": str(root),
                "holdout": holdout,
                "tokenise_processes": 0,
                "sources": sources,
                **data,
            },
            "validation": {"enable": True},
        }
    )


def _many(text: Path | dict[str, Path]) -> TypeGuard[dict[str, Path]]:
    return isinstance(text, dict)


def texts_of(data: Dataset) -> set[str]:
    assert data.tokenizer is not None
    found = [
        windows.open(number)
        for windows in data.rows.windows.values()
        for number in range(windows.per_epoch)
    ]
    return {
        data.tokenizer.decode(part.files[file].tokens[start : start + length - 1])
        for part in found
        for file, start, length in zip(part.file, part.start, part.length, strict=True)
    }


@pytest.mark.parametrize("holdout", [SHARE, 100])
def test_validation_reads_what_training_leaves_out(
    tmp_path: Path, tokenizer: Tokenizer, holdout: float
) -> None:
    text = write_lines(tmp_path / "text", 5, 100)
    config = config_of(text, tmp_path / "data", tokenizer, holdout)
    training = training_data(config, 4, None, Preparer())
    (validation,) = validation_data(config, 4, None, Preparer())
    assert validation.name == "text"
    trained, held = texts_of(training), texts_of(validation)
    records = [json.loads(line) for file in text.iterdir() for line in file.open()]
    assert trained | held == {record["text"] for record in records}
    assert trained.isdisjoint(held)
    assert len(held) == 100 if holdout == 100 else 60 < len(held) < 140
    assert validation.rows.num_batches() > 1
    without = config_of(text, tmp_path / "data", tokenizer, 0)
    with pytest.raises(DataError, match="this run began with"):
        training_data(without, 4, None, Preparer()).continued(training.plan.to_json(), 1)
    with pytest.raises(DataError, match="would hold out all of text"):
        training_data(config_of(text, tmp_path / "data", tokenizer, 1000), 4, None, Preparer())


def sources_with_copies(folder: Path) -> dict[str, Path]:
    """Writes a file of lines and a table that have ten of their fifty documents in common."""
    folder.mkdir(parents=True)
    words = [f"document {number}" for number in range(50)]
    lines, table = folder / "lines.jsonl", folder / "table.csv"
    lines.write_text("".join(json.dumps({"text": one}) + "\n" for one in words[:30]))
    table.write_text("\n".join(["text", *words[20:]]) + "\n")
    return {"lines": lines, "table": table}


@pytest.mark.parametrize("number", [5, 33])
def test_a_number_is_exact_over_all_sources_and_copies_are_on_one_side(
    tmp_path: Path, tokenizer: Tokenizer, number: int
) -> None:
    sources = sources_with_copies(tmp_path / "text")
    config = config_of(sources, tmp_path / "data", tokenizer, number)
    trained = texts_of(training_data(config, 4, None, Preparer()))
    sets = validation_data(config, 4, None, Preparer())
    held = set().union(*map(texts_of, sets))
    assert len(held) == number
    assert trained.isdisjoint(held)
    assert len(trained | held) == 50
    with pytest.raises(DataError, match="50 different documents"):
        training_data(config_of(sources, tmp_path / "data", tokenizer, 50), 4, None, Preparer())


def test_two_folders_with_equal_file_names_are_no_change(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    texts = {name: write_lines(tmp_path / name, 1, size) for name, size in (("a", 5), ("b", 7))}
    config = config_of(texts, tmp_path / "data", tokenizer, 0)
    for _ in range(2):
        said: list[str] = []
        training_data(config, 4, None, Preparer(report=said.append))
        assert not [line for line in said if "changed" in line]
    write_lines(tmp_path / "a", 1, 6)
    training_data(config, 4, None, Preparer(report=said.append))
    assert [line for line in said if "a/000.jsonl changed" in line]


def test_growth_holds_out_no_document_that_was_trained_on(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    sources = sources_with_copies(tmp_path / "text")
    few = config_of(sources["table"], tmp_path / "data", tokenizer, 6)
    many = config_of(sources, tmp_path / "data", tokenizer, 6)
    trained = texts_of(training_data(few, 4, None, Preparer()))
    sets = validation_data(many, 4, None, Preparer())
    assert trained.isdisjoint(set().union(*map(texts_of, sets)))


def test_a_resumed_run_keeps_the_documents_that_it_holds_out(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    sources = sources_with_copies(tmp_path / "text")
    before = config_of({"table": sources["table"]}, tmp_path / "data", tokenizer, 6)
    run, place = tmp_path / "run", tmp_path / "run" / PLAN
    place.parent.mkdir(parents=True)
    data = training_data(before, 4, None, Preparer())
    plan = data.plan.to_json()
    place.write_text(json.dumps({"plan": plan, "holdout": 6}))
    after = config_of(sources, tmp_path / "data", tokenizer, 6)  # with another source
    preparer = Preparer(holdout=kept_share(run, after.data))
    resumed = training_data(after, 4, None, preparer).continued(plan, 3)
    assert texts_of(data) <= texts_of(resumed)
    held = set().union(*map(texts_of, validation_data(after, 4, None, preparer)))
    assert held.isdisjoint(texts_of(resumed))
    with pytest.raises(DataError, match=r"data\.holdout is 7, but this run began with 6"):
        kept_share(run, after.data.model_copy(update={"holdout": 7}))


def test_a_number_is_refused_if_too_many_documents_would_be_tokenized_first(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    text = write_lines(tmp_path / "text", 20, 2)
    config = config_of(text, tmp_path / "data", tokenizer, 3, window_documents=16)
    with pytest.raises(DataError, match=r"data\.holdout = 3 .* text is too large .* fraction"):
        training_data(config, 4, None, Preparer())
    settings = {
        "training.dataset_path": text,
        "model.hf_assets_path": tokenizer.path,
        "data.folder": tmp_path / "data",
        "data.window_documents": 16,
        "job.dump_folder": tmp_path / "run",
    }
    words = [f"{key}={value}" for key, value in settings.items()]
    with pytest.raises(ConfigError, match=r"data\.holdout = 3 .* text is too large"):
        require_start(load_config("quickstart", [*words, "data.holdout=3"]))
    require_start(load_config("quickstart", [*words, "data.holdout=0.1"]))


def test_validation_on_foreign_text_is_told(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    path = f"training.dataset_path={tmp_path / 'mine.txt'}"
    _, problems = load_checked("quickstart", [path])
    (note,) = (str(problem) for problem in problems if problem.kind == "note")
    assert "validation reads stdlib_heldout, which is not held out of mine.txt" in note
    for more in ("data.holdout=0.01", "validation.enable=false", "training.dataset_path=none"):
        assert load_checked("quickstart", [path, more])[1] == []
    assert foreign_validation(JobConfig.model_validate(VALIDATES_ON_ITSELF)) is None
    for wrong in ("data.holdout=1.5", "data.holdout=-1"):
        with pytest.raises(Exception, match=r"data\.holdout"):
            load_checked("quickstart", [wrong])


@pytest.mark.parametrize(("share", "side"), [(1e-6, "no document"), (0.999999, "every document")])
def test_a_side_without_documents_is_refused_before_the_first_step(
    tmp_path: Path, tokenizer: Tokenizer, share: float, side: str
) -> None:
    text = write_lines(tmp_path / "text", 1, 40)
    config = config_of(text, tmp_path / "data", tokenizer, share)
    with pytest.raises(DataError, match=rf"data\.holdout holds out {side} of text \(a fraction"):
        training_data(config, 4, None, Preparer())


@pytest.mark.parametrize("kept", ["[]", "null", '{"plan": {}}', '{"plan": {"sources": {}}}', "{"])
def test_a_plan_that_is_not_whole_is_one_sentence(kept: str, tmp_path: Path) -> None:
    (tmp_path / PLAN).parent.mkdir(parents=True)
    (tmp_path / PLAN).write_text(kept)
    with pytest.raises(DataError, match="contains no data plan"):
        kept_plan(tmp_path)
