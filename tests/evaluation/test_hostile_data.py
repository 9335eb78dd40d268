"""Evaluations of data, folders and settings that are odd or wrong: one sentence each, and nothing
is lost."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from overland.apps.evaluation import evaluate as evaluate_module
from overland.apps.evaluation import parts as parts_module
from overland.apps.evaluation.parts import WindowRow
from overland.apps.evaluation.perplexity import Done, row_losses
from overland.apps.evaluation.ranks import RankedModel
from overland.apps.evaluation.results import base_of, mark_of_weights, read_results
from overland.apps.proofs.pool import RankPool
from overland.cli.eval import about_perplexity
from overland.errors import DataError, ModelError
from overland.world import World
from tests.cli.processes import overland, start_overland
from tests.evaluation.test_perplexity import alone, evaluate, on_rank
from tests.evaluation.texts import write_text_model

TEXT = "def first(things):\n    return next(iter(things))\n" * 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("model") / "tiny")


def lines(folder: Path, *texts: str) -> Path:
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    return path


def test_empty_and_short_documents_have_nothing_to_score(model: Path, tmp_path: Path) -> None:
    with_them = alone(model, lines(tmp_path, "", "a", TEXT, "", " "), context=32)
    without = alone(model, lines(tmp_path, TEXT), context=32)
    assert with_them["summed_loss"] == without["summed_loss"]
    assert with_them["documents"] == 5
    assert with_them["unscored"] == 3  # of "a", " " and the text
    with pytest.raises(DataError, match=r"3 documents and no tokens to score.*--prefix eos"):
        alone(model, lines(tmp_path, "", "a", "b"))
    scored = alone(model, lines(tmp_path, "", "a", "b"), prefix="eos")
    assert (scored["tokens"], scored["bytes"], scored["words"]) == (2, 2, 2)


def test_a_prefix_is_advised_where_it_has_an_effect(model: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no tokens to score$"):
        alone(model, lines(tmp_path, "a"), prefix="none")
    record = alone(model, lines(tmp_path, TEXT), context=32)
    assert "--prefix eos" in "".join(about_perplexity(record, advises=True))
    assert "--prefix" not in "".join(about_perplexity(record, advises=False))
    ids = tmp_path / "ids.jsonl"
    ids.write_text('{"tokens": [5, 6, 7]}\n')
    with pytest.raises(DataError, match="--prefix eos has no effect on ids"):
        alone(model, ids, prefix="eos")
    record = alone(model, ids)
    assert record["unscored"] == 1
    assert "--prefix" not in "".join(about_perplexity(record, advises=True))


def test_no_documents_is_an_error(model: Path, tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").write_text("")
    with pytest.raises(DataError, match="no documents and no tokens"):
        alone(model, tmp_path / "none.jsonl")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "none.parquet")
    with pytest.raises(DataError, match="is empty"):
        alone(model, tmp_path / "none.parquet")


def test_text_that_is_no_utf8_stops_or_is_skipped_and_counted(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text(TEXT)
    (folder / "b.txt").write_bytes(b"\xff\xfe broken")
    with pytest.raises(DataError, match=r"b\.txt: expected UTF-8.*--skip-bad"):
        alone(model, folder)
    found = alone(model, folder, skip_bad=True)
    assert (found["documents"], found["skipped_documents"]) == (1, 1)


def test_half_a_character_stops_or_is_skipped(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "half.jsonl"
    path.write_text('{"text": "half \\ud83d of it"}\n{"text": "whole text"}\n')
    with pytest.raises(DataError, match=r"half of a surrogate pair.*--skip-bad"):
        alone(model, path)
    assert alone(model, path, skip_bad=True)["skipped_documents"] == 1


def test_tokens_that_the_model_does_not_have_are_refused(model: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.array([1, 2, 300, 4], np.uint16))
    with pytest.raises(DataError, match="token 300, but the model's vocabulary has 300"):
        alone(model, tmp_path / "ids.npy")


def test_a_vocabulary_larger_than_the_tokenizer_is_fine(tmp_path: Path) -> None:
    wide = write_text_model(tmp_path / "wide", vocab_size=512)
    assert alone(wide, lines(tmp_path, TEXT))["tokens"] > 100


@pytest.mark.long
def test_a_built_corpus_gives_the_numbers_of_its_text(model: Path, tmp_path: Path) -> None:
    path = lines(tmp_path, TEXT, "second " * 50, TEXT[::-1])
    build = ("data", "build", str(path), "--out", "built", "--tokenizer", str(model))
    overland(*build, cwd=tmp_path)
    (built,) = (tmp_path / "built").glob("*/")
    text, tokens = (alone(model, one, context=40) for one in (path, built))
    for key in ("summed_loss", "tokens", "documents", "bytes", "words", "unscored"):
        assert text[key] == tokens[key], key
    other = write_text_model(tmp_path / "other")
    (other / "tokenizer.json").write_text(
        (other / "tokenizer.json").read_text().replace("<|endoftext|>", "<|the_end|>")
    )
    with pytest.raises(DataError, match="not tokenized with the model's tokenizer"):
        alone(other, built)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"context": 1}, "--context must be at least 2"),
        ({"context": 16, "stride": 17}, "--stride 17 is longer than the context, 16"),
        ({"prefix": "bos"}, "--prefix bos: .* has no BOS token"),
    ],
    ids=["context", "stride", "prefix"],
)
def test_settings_that_cannot_be_are_refused(
    model: Path, tmp_path: Path, asked: dict[str, Any], message: str
) -> None:
    with pytest.raises((ModelError, DataError), match=message):
        alone(model, lines(tmp_path, TEXT), **asked)


@pytest.mark.parametrize("words", [("--stride", "-1"), ("--stride", "0"), ("--context", "0")])
def test_windows_that_cannot_be_are_refused(
    model: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    path = lines(tmp_path, TEXT)
    said = overland("eval", str(model), "--data", str(path), *words, cwd=tmp_path, code=2).stderr
    assert f"Invalid value for '{words[0]}'" in said


def refuse_on_rank(world: World, model: Path, path: Path, output: Path) -> str:
    with pytest.raises(ModelError) as error:
        on_rank(world, model, path, output, {"tensor_parallel": 2})
    return str(error.value)


@pytest.mark.long
def test_tensor_parallelism_that_does_not_divide_is_refused(
    tmp_path: Path, ranks: RankPool
) -> None:
    odd = write_text_model(tmp_path / "odd", vocab_size=301, num_key_value_heads=1)
    for said in ranks.run(2, refuse_on_rank, odd, lines(tmp_path, TEXT), tmp_path / "out"):
        assert said == (
            "--tensor-parallel 2 does not divide 1 key-value heads and a vocabulary of 301: use "
            "another degree, or --shard"
        )


def test_a_name_is_no_command_to_the_terminal(model: Path, tmp_path: Path) -> None:
    named = f"a\x1b[31m={lines(tmp_path, TEXT)}"
    shown = overland("eval", str(model), "--data", named, "--limit", "1", cwd=tmp_path).stdout
    assert "a\\x1b[31m" in shown
    assert "\x1b" not in shown


def test_names_that_are_not_known_or_come_twice_are_refused(model: Path, tmp_path: Path) -> None:
    def refused(*words: str) -> str:
        return overland("eval", str(model), *words, cwd=tmp_path, code=2).stderr

    assert "no such file or folder, and no dataset of that name" in refused("--data", "c5")
    twice = ("--data", "stdlib_heldout", "--data", "stdlib_heldout=stdlib")
    assert "stdlib_heldout is given twice" in refused(*twice)
    assert "overland fetch dataset allenai/c4 --include 'en/c4-validation.*'" in refused(
        "--data", "c4_validation"
    )
    assert "does not belong to a run" in refused()
    assert "random tokens are not text" in refused("--data", "random")
    assert "does not divide" in refused("--data", "stdlib", "--tensor-parallel", "2")


def test_c4_is_read_as_it_is_fetched(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "c4_validation" / "en"
    folder.mkdir(parents=True)
    for number in range(2):
        record = {"text": TEXT, "timestamp": "2019-04-25T12:57:54Z", "url": "https://a.b/c"}
        with gzip.open(folder / f"c4-validation.0000{number}-of-00008.json.gz", "wt") as file:
            file.write(json.dumps(record) + "\n")
    words = ("eval", str(model), "--data", "c4_validation", "--joined", "--limit", "2", "--json")
    (found,) = json.loads(overland(*words, cwd=tmp_path).stdout)
    assert (found["name"], found["documents"]) == ("c4_validation", 2)
    assert found["settings"]["joined"]


def test_data_that_changes_starts_again_and_is_refused_while_it_is_read(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = lines(tmp_path, *[TEXT] * 12)

    def killed(*args: Any, keep: Any, **others: Any) -> Iterator[Done]:
        for number, done in enumerate(score(*args, keep=lambda one: None, **others)):
            if number == 2:
                raise KeyboardInterrupt
            keep(done)
        raise AssertionError("too few parts")

    score = evaluate_module.score
    monkeypatch.setattr(parts_module, "LEAST_TOKENS", 64)
    monkeypatch.setattr(evaluate_module, "score", killed)
    with pytest.raises(KeyboardInterrupt):
        alone(model, path, context=8)
    monkeypatch.setattr(evaluate_module, "score", score)
    said: list[str] = []
    lines(tmp_path, *[TEXT] * 11, TEXT.upper())
    changed = evaluate(World(), model, path, said, context=8)
    assert any("with other weights, data or settings" in one for one in said)
    lines(tmp_path, *[TEXT] * 12)
    said.clear()
    whole = evaluate(World(), model, path, said, context=8)
    assert "resuming: 2 parts are already done" in said
    assert whole["summed_loss"] != changed["summed_loss"]

    def changing(*args: Any, **others: Any) -> list[Done]:
        found = score(*args, **others)
        lines(tmp_path, TEXT)
        return found

    monkeypatch.setattr(evaluate_module, "score", changing)
    with pytest.raises(DataError, match="changed during the evaluation"):
        alone(model, path, context=8, again=True)


def test_a_result_is_found_again_until_something_changes(model: Path, tmp_path: Path) -> None:
    path, said = lines(tmp_path, TEXT), list[str]()
    first = evaluate(World(), model, path, said, context=16, output=tmp_path / "out")
    again = evaluate(World(), model, path, said, context=16, output=tmp_path / "out")
    assert first == again
    assert [one for one in said if "using the saved result" in one]
    said.clear()
    for change in ({"context": 17}, {"stride": 3}, {"prefix": "eos"}, {"joined": True},
                   {"limit": 1}, {"dtype": torch.bfloat16}, {"again": True}):  # fmt: skip
        asked = {"context": 16, "output": tmp_path / "out", **change}
        evaluate(World(), model, path, said, **asked)
    assert not [one for one in said if "using the saved result" in one]


def test_weights_of_the_base_that_an_adapter_names_count(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    for folder in (base, adapter):
        folder.mkdir()
        (folder / "weights").write_text("one")
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "../base"}')
    assert base_of(adapter) == adapter / "../base"
    assert base_of(base) is None
    before = mark_of_weights(adapter, base_of(adapter))
    (base / "weights").write_text("two")
    assert mark_of_weights(adapter, base_of(adapter)) != before


def test_a_folder_that_cannot_be_written_to_is_reported_and_the_result_given(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    said: list[str] = []
    path = lines(tmp_path, TEXT)
    found = evaluate(World(), model, path, said, output=tmp_path / "file" / "results")
    assert found["kept"] is None
    assert found["perplexity"] > 1
    assert any("the result was not saved" in one and "--output" in one for one in said)
    assert any("progress cannot be saved" in one for one in said)


@pytest.mark.long
def test_two_evaluations_at_once_do_not_disturb_each_other(model: Path, tmp_path: Path) -> None:
    path = lines(tmp_path, *[TEXT] * 20)
    words = ("eval", str(model), "--data", str(path), "--context", "8", "--output", "out", "--json")
    both = [start_overland(*words, cwd=tmp_path) for _ in range(2)]
    found = []
    for process in both:
        assert process.wait() == 0, process.stdout
        found.append(json.loads(process.stdout[process.stdout.index("[") :])[0]["summed_loss"])
    assert found[0] == found[1]
    assert len(list((tmp_path / "out").iterdir())) == 1


@pytest.mark.parametrize("shard", [True, pytest.param(False, marks=pytest.mark.long)])
def test_more_ranks_than_documents(
    model: Path, tmp_path: Path, ranks: RankPool, shard: bool
) -> None:
    path = lines(tmp_path, TEXT)
    found = ranks.run(3, on_rank, model, path, tmp_path / "out", {"shard": shard})
    assert found[0]["documents"] == 1
    assert {one["summed_loss"] for one in found} == {found[0]["summed_loss"]}


def test_broken_weights_are_named(tmp_path: Path) -> None:
    broken = write_text_model(tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="not finite"):
        alone(broken, lines(tmp_path, TEXT))


def test_a_model_of_somebodys_own_is_scored_by_its_logits() -> None:
    class Own(nn.Module):
        def forward(self, tokens_BS: Tensor, positions_BS: Tensor) -> Tensor:
            return nn.functional.one_hot(tokens_BS, 8).float()

    ranked = RankedModel(Own(), torch.device("cpu"))
    (loss,) = row_losses(ranked, [WindowRow(np.array([3, 5]), np.array([3, -100]))])
    assert loss == pytest.approx(float(np.log(np.e + 7) - 1))


def test_results_of_a_run_are_listed_by_step(tmp_path: Path) -> None:
    for step, name in ((20, "b"), (100, "a"), (20, "a")):
        place = tmp_path / "evaluations" / f"step_{step}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"perplexity-{name}-1.json").write_text(
            json.dumps({"kind": "perplexity", "name": name})
        )
    (tmp_path / "evaluations" / "step_20" / "torn.json").write_text('{"kind": "perp')
    found = [(one["step"], one["name"]) for one in read_results(tmp_path)]
    assert found == [(20, "a"), (20, "b"), (100, "a")]
