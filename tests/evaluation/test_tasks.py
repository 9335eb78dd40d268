"""Tasks of the harness on our models: the same prompts, ids and scores as plain transformers, on
any number of ranks, resumed after a kill."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from overland.apps.evaluation.evaluate import EvaluationRequest, open_session
from overland.apps.evaluation.ranks import RankedModel
from overland.apps.evaluation.results import Kept
from overland.apps.evaluation.score import ContinuationScorer, Pair, TextScore
from overland.apps.evaluation.task_data import local_files, task_names
from overland.apps.evaluation.task_run import (
    TaskOptions,
    TaskSettings,
    by_task,
    no_network,
    open_manager,
    run_harness,
    scores_of,
    task_errors,
)
from overland.apps.evaluation.tasks import TaskRanks, crew_of, evaluate_tasks, key_of
from overland.apps.proofs.pool import RankPool, clean_processes
from overland.data.tokenizer import Tokenizer
from overland.errors import ClusterError, DataError, ModelError, OverlandError
from overland.world import World
from tests.data.tokenizer_folders import TEXTS
from tests.evaluation.task_files import KINDS, write_tasks
from tests.evaluation.texts import write_text_model

with patch.dict(os.environ):  # which other tests have from this process
    no_network()
    transformers = pytest.importorskip("transformers")
    lm_eval = pytest.importorskip("lm_eval")
    from overland.apps.evaluation.harness import HarnessModel

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}<|{{ m['role'] }}|>{{ m['content'] | trim }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SCORED = [name for name in KINDS if name != "own_answer"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_text_model(
        tmp_path_factory.mktemp("tasks") / "model", max_position_embeddings=512
    )
    config = {
        "eos_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def definitions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("definitions") / "tasks", 6)


class Fake:
    """Keeps what the harness would have computed."""

    def __init__(self, value: float = -1.0) -> None:
        self.pairs: list[Pair] = []
        self.value = value

    def score(self, pairs: list[Pair]) -> list[TextScore]:
        self.pairs += pairs
        return [TextScore(self.value, False)] * len(pairs)

    def require_texts(self) -> None:
        pass

    def generate(self, prompts: Any, settings: dict[str, Any]) -> list[str]:
        return [""] * len(prompts)


def request(*args: str) -> Any:
    kind = "loglikelihood" if len(args) == 2 else "loglikelihood_rolling"
    return lm_eval.api.instance.Instance(kind, {}, args, 0, ("quiz", 3, 1))


def ids_of(folder: Path, requests: list[tuple[str, ...]], **settings: Any) -> list[Pair]:
    engine = Fake()
    ours = HarnessModel(engine, Tokenizer(folder, add_eos=False), max_length=16, **settings)
    for one in requests:
        (ours.loglikelihood if len(one) == 2 else ours.loglikelihood_rolling)([request(*one)])
    return [(list(context), list(continuation)) for context, continuation in engine.pairs]


# Ids


def with_bos(folder: Path) -> None:
    """A tokenizer that puts BOS before every text, as Llama's does."""
    rules = json.loads((folder / "tokenizer.json").read_text())
    rules["added_tokens"].append({**rules["added_tokens"][0], "id": 300, "content": "<bos>"})
    rules["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<bos>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [],
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [300], "tokens": ["<bos>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(rules))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": "<bos>"}))


@pytest.mark.parametrize("begins", [False, True], ids=["plain", "bos"])
def test_ids_are_those_of_transformers(begins: bool, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((model / name).read_bytes())
    if begins:
        with_bos(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    ours = HarnessModel(Fake(), Tokenizer(folder, add_eos=False), max_length=16)
    bos = "<bos>" if begins else "<|endoftext|>"
    for text in [*TEXTS, f"{bos}a text", "a <|endoftext|>\n b", f" {bos} "]:
        has_bos = text.startswith(bos)
        expected = theirs.encode(text, add_special_tokens=not has_bos)
        assert ours.tok_encode(text) == expected, text
        plain = theirs.encode(text, add_special_tokens=False)
        assert ours.tok_encode(text, add_special_tokens=False) == plain, text
    assert ours.prefix_token_id == (300 if begins else theirs.eos_token_id)


def test_contexts_and_continuations_are_split_as_the_harness_does(model: Path) -> None:
    tokenizer = Tokenizer(model, add_eos=False)
    encode, end = tokenizer.encode, tokenizer.eos_id
    found = ids_of(
        model,
        [
            ("a list ", "of names"),
            ("", " of names"),
            ("", "<|endoftext|>of"),
            ("  ", "of"),
            ("abc",),
        ],
    )
    whole = encode("a list of names")
    context = encode("a list")
    assert found[0] == (context, whole[len(context) :])
    assert found[1] == ([end], encode(" of names"))
    assert found[2] == ([end], encode("of"))
    assert found[3] == ([end], encode("  of"))
    assert found[4] == ([end], encode("abc"))


def test_what_has_no_score_is_told_by_task_and_document(model: Path) -> None:
    for one in (("a", ""), ("", ""), ("", "<|endoftext|>")):
        with pytest.raises(DataError, match=r"quiz, document 3: the continuation .* no token"):
            ids_of(model, [one])
    with pytest.raises(DataError, match=r"document 3: the continuation has .* --context"):
        ids_of(model, [("a", "x y z " * 20)])
    assert ids_of(model, [("",)]) == []  # nothing to predict


def test_conversations_are_written_as_transformers_does(model: Path) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(str(model))
    ours = HarnessModel(Fake(), Tokenizer(model, add_eos=False), max_length=16)
    turns = [
        {"role": "user", "content": "a question "},
        {"role": "assistant", "content": " an answer"},
        {"role": "user", "content": "another <|endoftext|>"},
    ]
    assert ours.apply_chat_template(turns) == theirs.apply_chat_template(
        turns, tokenize=False, add_generation_prompt=True
    )
    begun = [*turns, {"role": "assistant", "content": "it begins with "}]
    assert ours.apply_chat_template(begun, add_generation_prompt=False) == (
        theirs.apply_chat_template(begun, tokenize=False, continue_final_message=True)
    )
    told = [{"role": "system", "content": "be brief"}, *turns]  # which this template refuses
    assert ours.apply_chat_template(told) == ours.apply_chat_template(turns)


def test_a_template_that_is_not_there(model: Path) -> None:
    ours = HarnessModel(Fake(), Tokenizer(model, add_eos=False), max_length=16, template="defualt")
    with pytest.raises(DataError, match="did you mean 'default'"):
        ours.apply_chat_template([{"role": "user", "content": "a"}])


# Scores


def plain_scores(model: Path, samples: list[dict[str, Any]]) -> Iterator[tuple[float, Any]]:
    """What transformers says of every request, one at a time."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(model))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32)
    longest = theirs.config.max_position_embeddings
    for sample in samples:
        for arguments, found in zip(sample["arguments"], sample["resps"], strict=True):
            context, continuation = arguments if len(arguments) == 2 else ("", arguments[0])
            before = context.rstrip()
            start = tokenizer.encode(before) if before else [tokenizer.eos_token_id]
            whole = tokenizer.encode(context + continuation)
            whole = whole if before else [tokenizer.eos_token_id, *whole]
            assert len(whole) <= longest + 1
            with torch.no_grad():
                log_probs = theirs(torch.tensor([whole[:-1]])).logits[0].log_softmax(-1)
            wanted = torch.tensor(whole[len(start) :])
            rows = log_probs[len(start) - 1 :]
            total = float(rows.gather(1, wanted[:, None]).double().sum())
            is_greedy = bool((rows.argmax(-1) == wanted).all())
            yield total, (total, is_greedy) if len(arguments) == 2 else total
            value = found[0][0] if isinstance(found[0], list) else found[0]
            assert value == pytest.approx(total, abs=1e-5, rel=1e-6)
            assert not isinstance(found[0], list) or found[0][1] == is_greedy


def evaluated(
    model: Path,
    definitions: Path,
    output: Path,
    world: World,
    *names: str,
    batch_size: int | None = None,
    said: list[str] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    asked = EvaluationRequest(path=model, output=output, datasets=output, batch_size=batch_size)
    report = said.append if said is not None else lambda message: None
    session = open_session(asked, world, torch.device("cpu"), report)
    wanted = TaskOptions(tasks=names, include_path=str(definitions), bootstrap=0, **settings)
    return evaluate_tasks(session, wanted)


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_fewshot": 2}, {"num_fewshot": 2, "chat_template": "default"}],
    ids=["zero-shot", "few-shot", "chat"],
)
def test_every_kind_of_task_has_the_scores_of_transformers(
    settings: dict[str, Any], model: Path, definitions: Path, tmp_path: Path
) -> None:
    names = SCORED if not settings else SCORED[:1]
    record = evaluated(model, definitions, tmp_path, World(), *names, log_samples=True, **settings)
    folder = Path(record["harness"])
    for name in names:
        lines = (folder / f"samples_{name}.jsonl").read_text().splitlines()
        samples = list(map(json.loads, lines))
        assert len(samples) == 6
        if settings:
            prompt = samples[0]["arguments"][0][0]
            assert prompt.count("Question:") == 3
            assert prompt.count("<|user|>") == (3 if "chat_template" in settings else 0)
        for total, _ in plain_scores(model, samples):
            assert total < 0
    results = json.loads((folder / "results.json").read_text())
    assert results["results"]["own_choice"]["acc,none"] == record["results"]["own_choice"]["acc"]
    again = evaluated(model, definitions, tmp_path, World(), *names, log_samples=True, **settings)
    assert again["scores"] == record["scores"]  # found, and not computed
    assert again["time"] == record["time"]


def test_answers_are_those_of_transformers(model: Path, definitions: Path, tmp_path: Path) -> None:
    record = evaluated(
        model, definitions, tmp_path, World(), "own_group", num_fewshot=1, log_samples=True
    )
    assert record["results"].keys() == {"own_choice", "own_answer"}
    lines = Path(record["harness"], "samples_own_answer.jsonl").read_text().splitlines()
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(model))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32)
    for sample in map(json.loads, lines):
        prompt, settings = sample["arguments"][0]
        ids = tokenizer.encode(prompt)
        with torch.no_grad():
            found = theirs.generate(
                torch.tensor([ids]),
                max_new_tokens=24,
                do_sample=False,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.eos_token_id,
            )
        text = tokenizer.decode(found[0, len(ids) :], skip_special_tokens=True)
        for stop in settings["until"]:
            text = text.split(stop)[0]
        assert sample["resps"] == [[text]]


PAIRS: list[Pair] = [([i % 8, 2, 3], [i, i + 1, 5][: 1 + i % 3]) for i in range(40)]


def scores_on_rank(
    world: World, model: Path, output: Path, layout: dict[str, Any]
) -> list[TextScore] | None:
    asked = EvaluationRequest(path=model, output=output, batch_size=3, **layout)
    session = open_session(asked, world, torch.device("cpu"), lambda message: None)
    settings = TaskSettings(tasks=("some",), context=16, dtype="float32")
    kept = Kept(output, "tasks", "some", layout, lambda message: None)
    crew = crew_of(session, settings, kept, [])
    if not world.is_first:
        crew.serve()
        return None
    scores = crew.score(PAIRS)
    crew.dismiss()
    return scores


def test_ranks_of_every_layout_give_the_scores_of_one(
    ranks: RankPool, model: Path, tmp_path: Path
) -> None:
    alone = scores_on_rank(World(), model, tmp_path / "alone", {})
    assert alone is not None
    for layout in ({}, {"shard": True}, {"tensor_parallel": 2}):
        found, nothing = ranks.run(2, scores_on_rank, model, tmp_path, layout)
        assert nothing is None
        for one, other in zip(alone, found, strict=True):
            assert other.log_likelihood == pytest.approx(one.log_likelihood, abs=1e-5)
            assert other.is_greedy == one.is_greedy
    num_files = [len(list(place.glob("*.jsonl"))) for place in tmp_path.glob(".tasks-*.parts")]
    assert sorted(num_files) == [1, 2, 2]  # of two that split matrices, one reports


# What goes wrong


def here(model: torch.nn.Module) -> RankedModel:
    return RankedModel(model, torch.device("cpu"))


class Counting(ContinuationScorer):
    num_scored = 0

    def score(self, requests: Any) -> Any:
        for batch in super().score(requests):
            self.num_scored += len(batch)
            yield batch


def test_a_model_that_is_split_generates_nothing() -> None:
    scorer = ContinuationScorer(here(torch.nn.Linear(1, 1)), max_length=4)
    with pytest.raises(ClusterError, match="cannot generate text: omit --shard"):
        TaskRanks(scorer, None, World()).generate([[1]], {})


class Scoring(Fake):
    """Counts, and has a layout that cannot generate."""

    def require_texts(self) -> None:
        TaskRanks(
            ContinuationScorer(here(torch.nn.Linear(1, 1)), max_length=4), None, World()
        ).require_texts()


def test_a_task_that_generates_is_refused_before_others_are_scored(
    model: Path, definitions: Path, tmp_path: Path
) -> None:
    engine = Scoring()
    ours = HarnessModel(engine, Tokenizer(model, add_eos=False), max_length=256)
    settings = TaskSettings(
        tasks=("own_group",), context=256, dtype="float32", include_path=str(definitions)
    )
    with pytest.raises(ClusterError, match="cannot generate text"):
        run_harness(ours, settings, tmp_path)
    assert not engine.pairs


def test_a_perplexity_that_no_number_holds_is_none(
    model: Path, definitions: Path, tmp_path: Path
) -> None:
    ours = HarnessModel(Fake(-1e4), Tokenizer(model, add_eos=False), max_length=256)
    settings = TaskSettings(
        tasks=("own_text", "own_continuation"), context=256, dtype="float32",
        include_path=str(definitions), bootstrap=100,
    )  # fmt: skip
    found = by_task(scores_of(run_harness(ours, settings, tmp_path)))
    assert found["own_text"]["word_perplexity"] is None
    assert found["own_text"]["bits_per_byte"] is not None
    assert found["own_continuation"] == {"perplexity": None, "acc": 0}


def test_a_first_rank_that_fails_says_why_and_waits_for_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Failing(ContinuationScorer):
        def score(self, requests: Any) -> Any:
            raise ModelError("broken weights")

    told: list[Any] = []
    monkeypatch.setattr("overland.apps.evaluation.tasks.from_first_rank", told.append)
    crew = TaskRanks(Failing(here(torch.nn.Linear(1, 1)), max_length=16), None, World(size=2))
    with pytest.raises(ModelError, match="broken weights"), task_errors("these tasks"):
        crew.score(PAIRS)
    crew.dismiss()
    assert [work[0] for work in told] == ["score"]  # the others wait for its part, and hear nothing


def test_data_and_functions_of_definitions_are_part_of_what_a_result_is_known_by(
    tmp_path: Path,
) -> None:
    data, code = tmp_path / "data" / "train.jsonl", tmp_path / "own" / "functions.py"
    for file in (data, code):
        file.parent.mkdir()
        file.write_text("one")
    config = {
        "dataset_path": str(data.parent),
        "process_docs": f"{code.parent}/functions.prepare",
        "doc_to_text": "/" + "long" * 2000,
        "metric_list": [{"metric": f"{code.parent}/functions.score"}],
    }
    for one in (
        config,
        {"dataset_path": "json", "dataset_kwargs": {"data_files": f"{data.parent}/*"}},
    ):
        before = local_files(one)
        assert before
        data.write_text(data.read_text() + "more")
        assert local_files(one) != before
    before = local_files(config)
    code.write_text("two, and more")
    assert local_files(config) != before


def test_nothing_is_computed_twice(model: Path) -> None:
    from overland.apps.evaluation.main import open_model

    opened = open_model(model, device="cpu")
    pairs: list[Pair] = [([1, 2, 3], [4]), ([1, 2, 3], [5, 6]), ([1, 2, 3], [4])]
    kept: list[Any] = []
    scorer = Counting(here(opened.model), max_length=16)
    crew = TaskRanks(scorer, None, World(), keep=kept.append)
    first = crew.score(pairs)
    assert first[0] == first[2]
    assert scorer.num_scored == 2
    done = [*json.loads(json.dumps(kept)), {"torn": 1}]
    later = Counting(here(opened.model), max_length=16)
    assert TaskRanks(later, None, World(), done=done).score(pairs) == first
    assert later.num_scored == 0
    assert key_of([1], [2, 3]) != key_of([1, 2], [3])


def evaluate_and_die(model: Path, definitions: Path, folder: Path) -> None:
    add, adds = Kept.add, 0

    def add_and_die(self: Kept, record: Any) -> None:
        nonlocal adds
        add(self, record)
        adds += 1
        if adds == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    Kept.add = add_and_die  # type: ignore[method-assign]
    evaluated(model, definitions, folder, World(), "own_choice", batch_size=1)


def test_a_killed_evaluation_continues(model: Path, definitions: Path, tmp_path: Path) -> None:
    run = partial(evaluated, model, definitions, tmp_path, World(), "own_choice", batch_size=1)
    # Not a fork of this process, which has computed: a fork lacks its threads, and may crash.
    child = clean_processes().Process(target=evaluate_and_die, args=(model, definitions, tmp_path))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    (parts,) = tmp_path.glob(".*.parts/*.jsonl")
    assert len(parts.read_text().splitlines()) == 3
    with parts.open("a") as file:
        file.write('{"done": {"torn')
    said: list[str] = []
    record = run(said=said)
    assert any(line.startswith("resuming: ") for line in said)
    assert not list(tmp_path.glob(".*.parts"))
    whole = evaluated(model, definitions, tmp_path / "other", World(), "own_choice")
    assert record["results"] == whole["results"]


def test_mistakes_are_sentences(model: Path, definitions: Path, tmp_path: Path) -> None:
    own = write_tasks(tmp_path / "own", 2)
    broken = (own / "own_choice.yaml").read_text().replace("{{choices}}", "{{choices")
    (own / "own_choice.yaml").write_text(broken)
    text = (own / "own_text.yaml").read_text()
    (own / "own_text.yaml").write_text(text.replace(str(own / "validation.jsonl"), "/none.jsonl"))
    answer = (own / "own_answer.yaml").read_text()
    (own / "own_answer.yaml").write_text(answer.replace("max_gen_toks: 24", "num_beams: 2"))
    open_manager.cache_clear()
    for name, words in (
        ("own_choice", "task own_choice has an error in its definition"),
        ("own_text", "not on this machine, and an evaluation opens no connection"),
        ("own_answer", "is not supported; supported: until"),
    ):
        with pytest.raises(OverlandError, match=words):
            evaluated(model, own, tmp_path / "out", World(), name)
    with pytest.raises(DataError, match="not a folder of task definitions"):
        open_manager(("a",), tmp_path / "nothing")


def test_a_place_that_cannot_be_written_to_is_told_and_the_result_is_there(
    model: Path, definitions: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").write_text("a file where a folder should be")
    said: list[str] = []
    asked = EvaluationRequest(path=model, output=tmp_path / "out", limit=2)
    session = open_session(asked, World(), torch.device("cpu"), said.append)
    wanted = TaskOptions(tasks=("own_schema",), include_path=str(definitions))
    record = evaluate_tasks(session, wanted)
    assert record["kept"] is None
    assert record["scores"][0]["documents"] == 2
    assert any("was not saved" in line for line in said)


def test_names_are_lists_too() -> None:
    assert task_names(["a,b", "a"]) == ("a", "b")
