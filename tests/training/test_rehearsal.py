"""`overland check` finds what `overland train` refuses before its first step."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from overland.apps.check.rehearsal import require_start, try_newest
from overland.apps.data.build import build
from overland.apps.data.tokenizer_training import train_tokenizer
from overland.apps.proofs.pool import RankPool
from overland.checks import check_config
from overland.cli.common import is_user_error
from overland.config.changes import FIXED
from overland.config.errors import ConfigError
from overland.config.load import Loaded
from overland.config.schema import JobConfig
from overland.data.corpora import Preparer
from overland.data.layout import lay_out
from overland.data.prepare import validation_data
from overland.data.tokenizer import Tokenizer
from overland.errors import CheckpointError, DataError
from overland.world import World
from tests.data.chats import ASKS, LLAMA3, ROLES, write_tokenizer
from tests.data.chats import write_lines as write_records
from tests.data.making import lines_of, tokenizer_in, write_lines
from tests.data.tokenizer_folders import write_bpe
from tests.jobs import TINY_MODEL, run_job, tiny_job

TEXT = "A page of text, long enough to fill a row or two of the batch. " * 40
TRAIN = {"steps": 1, "seq_len": 16, "local_batch_size": 2, "global_batch_size": 2}


def outcomes(world: World, configs: list[JobConfig]) -> list[str]:
    """What training says of each config; nothing where it takes its step."""
    said = []
    for config in configs:
        try:
            run_job(world, config)
            said.append("")
        except Exception as error:
            said.append(str(error) if is_user_error(error) else f"a bug: {error!r}")
    return said


def rehearsed(config: JobConfig) -> str:
    loaded = Loaded(config, [], "run.toml")
    try:
        problems = check_config(loaded, 1) + require_start(loaded)
    except ConfigError as error:
        return str(error)
    return "\n".join(str(problem) for problem in problems if problem.kind != "note")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("files")
    for name, text in {"good": TEXT, "blank": ""}.items():
        (root / name).mkdir()
        (root / name / "1.txt").write_text(text)
    (root / "nothing").mkdir()
    lines = [{"title": "a", "id": 1}, {"title": "b", "id": 2}]
    (root / "no_text.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    (root / "broken.jsonl").write_text(json.dumps({"text": TEXT}) + "\n{\n")
    (root / "lines.jsonl").write_text(
        "".join(json.dumps({"text": f"{number}. {TEXT}"}) + "\n" for number in range(6))
    )
    (root / "latin.txt").write_bytes(b"caf\xe9 " * 100)
    (root / "picture.png").write_bytes(b"\x89PNG")
    np.save(root / "ids.npy", np.full(4000, 600, np.uint16))
    np.save(root / "small_ids.npy", np.full(4000, 6, np.uint16))
    (root / "no_tokenizer").mkdir()
    (root / "weights").mkdir()
    (root / "half_corpus").mkdir()
    (root / "half_corpus" / "corpus.json").write_text("{}")
    (root / "half_corpus" / "lines.npy").write_bytes(b"")
    return root


# The sections of a config, and what both must say; None: both accept it.
CASES: dict[str, tuple[dict[str, dict[str, object]], str | None]] = {
    "text on defaults": ({"training": {"dataset_path": "good"}}, None),
    "a vocabulary below that of bytes": (
        {"training": {"dataset_path": "good"}, "model": {"overrides.vocab_size": 128}},
        "a vocabulary of 257 tokens, but the model only 128",
    ),
    "a folder without data": ({"training": {"dataset_path": "nothing"}}, "contains no data files"),
    "an unknown format": ({"training": {"dataset_path": "picture.png"}}, "has an unknown format"),
    "an empty document": ({"training": {"dataset_path": "blank"}}, "blank"),
    "no UTF-8": ({"training": {"dataset_path": "latin.txt"}}, "expected UTF-8 text"),
    "broken JSON": ({"training": {"dataset_path": "broken.jsonl"}}, "not a JSON object"),
    "broken JSON, skipped": (
        {"training": {"dataset_path": "broken.jsonl"}, "data": {"bad_documents": "skip"}},
        None,
    ),
    "ids beyond the vocabulary": (
        {"training": {"dataset_path": "ids.npy"}},
        "has the id 600, which is outside a vocabulary of 512",
    ),
    "a column that is not there": (
        {"data": {"sources": {"a": {"path": "no_text.jsonl", "column": "body"}}}},
        "body",
    ),
    "a split of one file": (
        {"data": {"sources": {"a": {"path": "latin.txt", "split": "train"}}}},
        "is a single file, which has no subsets or splits",
    ),
    "a corpus that is damaged": (
        {"training": {"dataset_path": "half_corpus"}},
        "is not a corpus of token shards",
    ),
    "a part that does not exist": ({"training": {"dataset": "stdlib:7/6"}}, "from 0 to 5"),
    "a part of nothing": ({"training": {"dataset": "stdlib:0/0"}}, "at least one part"),
    "random documents": (
        {"data": {"sources": {"random": {}}, "mixture": "documents"}},
        "random tokens cannot be mixed by documents",
    ),
    "a folder without a tokenizer": (
        {"training": {"dataset_path": "good"}, "model": {"hf_assets_path": "no_tokenizer"}},
        "has no tokenizer.json",
    ),
    "no BOS to begin with": (
        {"training": {"dataset_path": "good"}, "data": {"add_bos": True}},
        "no beginning-of-document token",
    ),
    "more held out than there is": (
        {"training": {"dataset_path": "lines.jsonl"}, "data": {"holdout": 100}},
        "data.holdout = 100 would hold out all of",
    ),
    "nothing held out": (
        {
            "training": {"dataset_path": "lines.jsonl"},
            "data": {"holdout": 1e-6},
            "validation": {"enable": True},
        },
        "data.holdout holds out no document of",
    ),
    "everything held out": (
        {"training": {"dataset_path": "lines.jsonl"}, "data": {"holdout": 0.999999}},
        "data.holdout holds out every document of",
    ),
    "a folder without weights": ({"checkpoint": {"initial_load_path": "weights"}}, "weights"),
    "held-out text of another format": (
        {"validation": {"enable": True, "dataset_path": "picture.png"}},
        "has an unknown format",
    ),
    "held-out text without a tokenizer": (
        {
            "training": {"dataset_path": "small_ids.npy"},
            "validation": {"enable": True, "dataset_path": "good"},
        },
        "good is text: specify the tokenizer for it with model.hf_assets_path",
    ),
    "data that is written into itself": (
        {"training": {"dataset_path": "good"}, "data": {"folder": "good/data"}},
        "or is inside it, so what the run writes there would become part of its data",
    ),
}


def test_check_finds_what_train_refuses_before_its_first_step(
    ranks: RankPool, files: Path, tmp_path: Path
) -> None:
    configs = [
        config_of(sections, files, tmp_path / str(number))
        for number, (sections, _) in enumerate(CASES.values())
    ]
    checked = [rehearsed(config) for config in configs]
    assert not list(tmp_path.iterdir()), "a check writes nothing"
    (trained,) = ranks.run(1, outcomes, configs)
    for name, (_, says), found, met in zip(CASES, CASES.values(), checked, trained, strict=True):
        if says is None:
            assert (found, met) == ("", ""), name
        else:
            assert says in met, (name, met)
            assert says in found, (name, found)


def config_of(sections: dict[str, dict[str, object]], files: Path, folder: Path) -> JobConfig:
    """Relative paths are below `files`, and `a.b` is a key of a table."""

    def placed(key: str, value: object) -> object:
        if isinstance(value, dict):
            return {name: placed(name, one) for name, one in value.items()}
        return str(files / str(value)) if key.endswith(("path", "folder")) else value

    config = tiny_job(folder, training=TRAIN, data={"folder": str(folder / "data")})
    whole = config.model_dump()
    for section, values in sections.items():
        for key, value in values.items():
            name, _, inner = key.partition(".")
            if inner:
                whole[section][name][inner] = value
            else:
                whole[section][name] = placed(key, value)
    if whole["training"]["dataset_path"] is not None or whole["data"]["sources"]:
        del whole["training"]["dataset"]
    return JobConfig.model_validate(whole)


def test_what_is_written_must_have_a_place(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    metrics = {"enable_tensorboard": True, "save_tb_folder": str(file / "tb")}
    said = rehearsed(tiny_job(tmp_path / "run", training=TRAIN, metrics=metrics))
    assert (
        f"metrics.save_tb_folder: {file}/tb/run cannot be created: {file} is not a folder" in said
    )
    said = rehearsed(tiny_job(file / "run", training=TRAIN))
    assert "job.dump_folder" in said


def test_a_checkpoint_of_another_model_or_order_is_found(ranks: RankPool, tmp_path: Path) -> None:
    saves = {"checkpoint": {"enable": True}}
    before = tiny_job(tmp_path / "run", training=TRAIN, **saves)
    more = {**TRAIN, "steps": 2}
    wider = tiny_job(tmp_path / "run", training=more, **saves)
    wider.model.overrides["intermediate_size"] = 96
    reseeded = tiny_job(tmp_path / "run", training=more, debug={"seed": 7}, **saves)
    deeper = tiny_job(tmp_path / "new", training=TRAIN)
    deeper.checkpoint.initial_load_path = str(tmp_path / "run" / "checkpoint" / "step_1")
    deeper.model.overrides["num_hidden_layers"] = 3
    configs = [before, wider, reseeded, deeper]
    ((first, *trained),) = ranks.run(1, outcomes, configs)
    assert first == ""
    checked = [rehearsed(config) for config in configs[1:]]
    for says, found, met in zip(
        ("model.overrides.intermediate_size = 64", "debug.seed is 7", "has no model.layers.2."),
        checked,
        trained,
        strict=True,
    ):
        assert says in met
        assert says in found
    again = tiny_job(tmp_path / "run", training=more, **saves)
    assert rehearsed(again) == ""


def test_state_that_an_optimizer_cannot_resume_is_found(ranks: RankPool, tmp_path: Path) -> None:
    saves, more = {"checkpoint": {"enable": True}}, {**TRAIN, "steps": 2}
    frozen = tiny_job(tmp_path / "run", training=TRAIN, **saves)
    frozen.model.freeze = ["*.mlp.*"]
    lion = tiny_job(tmp_path / "run", training=more, optimizer={"name": "Lion"}, **saves)
    thawed = tiny_job(tmp_path / "run", training=more, **saves)
    ((first, *trained),) = ranks.run(1, outcomes, [frozen, lion, thawed])
    assert first == ""
    for key, said, config in zip(
        ("optimizer.name", "model.freeze"), trained, (lion, thawed), strict=True
    ):
        assert key in said
        assert "--skip-optimizer" in said
        assert key in rehearsed(config)
    for config, key in ((lion, "optimizer.name"), (thawed, "model.freeze")):
        config.checkpoint.skip_optimizer = True
        notes = require_start(Loaded(config, [], "run.toml"))
        assert {one.kind for one in notes} == {"note"}
        assert any(f"{key} is" in one.message for one in notes)


def test_another_tokenizer_is_refused_on_resume(ranks: RankPool, tmp_path: Path) -> None:
    """The tokens of before lie in data.folder; what is validated on would be of other tokens."""
    tokenizer_in(tmp_path / "words")
    (tmp_path / "bytes").mkdir()
    train_tokenizer([TEXT], 260, tmp_path / "bytes" / "tokenizer.json")

    def job(steps: int, tokenizer: str) -> JobConfig:
        return tiny_job(
            tmp_path / "run",
            model={"hf_assets_path": str(tmp_path / tokenizer)},
            training={**TRAIN, "steps": steps, "dataset_path": str(tmp_path / "lines")},
            data={"folder": str(tmp_path / "data"), "tokenise_processes": 0},
            checkpoint={"enable": True, "interval": 1},
        )

    write_lines(tmp_path / "lines", 1)
    configs = [job(1, "words"), job(2, "bytes"), job(2, "words")]
    ((began, *changed),) = ranks.run(1, outcomes, configs[:2])
    for says in (*changed, rehearsed(configs[1])):
        assert "lines is not what this run was trained on: it was tokenized with another" in says
    ((resumed,),) = ranks.run(1, outcomes, configs[2:])
    assert (began, resumed, rehearsed(configs[2])) == ("", "", "")
    for damaged in ("{}", "no JSON"):
        (tmp_path / "run" / "data" / "plan.json").write_text(damaged)
        assert "plan.json is damaged: it contains no data plan" in rehearsed(configs[2])
    ((says,),) = ranks.run(1, outcomes, [job(3, "words")])
    assert "plan.json is damaged: it contains no data plan" in says


def test_a_changed_key_of_the_data_is_named_by_check_as_by_train(
    ranks: RankPool, tmp_path: Path
) -> None:
    tokenizer_in(tmp_path / "words")
    write_lines(tmp_path / "lines", 1)

    def job(**data: object) -> JobConfig:
        return tiny_job(
            tmp_path / "run",
            model={"hf_assets_path": str(tmp_path / "words")},
            training={**TRAIN, "steps": 1 + bool(data), "dataset_path": str(tmp_path / "lines")},
            data={"folder": str(tmp_path / "data"), "tokenise_processes": 0, **data},
            checkpoint={"enable": True},
        )

    elsewhere = str(tmp_path / "empty")
    refused = [job(add_eos=False), job(holdout=2)]
    configs = [job(), *refused, job(add_eos=False, cache_folder=elsewhere)]
    ((began, no_eos, held, far),) = ranks.run(1, outcomes, configs)
    assert began == ""
    for config, key, said in zip(
        refused, ("data.add_eos", "data.holdout"), (no_eos, held), strict=True
    ):
        assert f"{key} is" in said
        assert f"{key} is" in rehearsed(config)
    assert "data.add_eos is false; it was null" in far
    # What was read stays the same, so this may change, even if it is tokenized again.
    skips = job(bad_documents="skip", cache_folder=elsewhere)
    assert "data.bad_documents is" in str(require_start(Loaded(skips, [], "run.toml")))
    assert ranks.run(1, outcomes, [skips]) == [[""]]


def test_a_built_corpus_brings_the_tokenizer_for_validation(tmp_path: Path) -> None:
    tokenizer = tokenizer_in(tmp_path / "words")
    source = lines_of(write_lines(tmp_path / "lines", 1))
    corpus = lay_out("lines", source, tokenizer, tmp_path / "data")
    build(corpus, source, tokenizer, processes=1)
    config = tiny_job(
        tmp_path / "run",
        training={**TRAIN, "dataset_path": str(corpus)},
        data={"folder": str(tmp_path / "data"), "tokenise_processes": 0},
        validation={"enable": True, "dataset_path": str(write_lines(tmp_path / "held", 2))},
    )
    assert rehearsed(config) == ""
    (dataset,) = validation_data(config, 2, 512, Preparer())
    assert dataset.tokenizer is not None
    assert dataset.tokenizer.fingerprint == tokenizer.fingerprint
    dataset.close()
    shutil.rmtree(corpus / "tokenizer")
    message = "held is text: specify the tokenizer for it with model.hf_assets_path"
    assert message in rehearsed(config)
    with pytest.raises(DataError, match=re.escape(message)):
        validation_data(config, 2, 512, Preparer())


def test_held_out_tokens_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    tokenizer = tokenizer_in(tmp_path / "words")
    (tmp_path / "other").mkdir()
    train_tokenizer(["and other words"], 270, tmp_path / "other" / "tokenizer.json")
    built = {}
    for number, made_by in enumerate([tokenizer, Tokenizer(tmp_path / "other")], start=1):
        source = lines_of(write_lines(tmp_path / f"lines{number}", number))
        built[number] = lay_out("lines", source, made_by, tmp_path / "data")
        build(built[number], source, made_by, processes=1)
    by_corpus, by_text = (
        tiny_job(
            tmp_path / "run",
            model={"hf_assets_path": assets},
            training={**TRAIN, "dataset_path": str(path)},
            data={"folder": str(tmp_path / "data"), "tokenise_processes": 0},
            validation={"enable": True, "dataset_path": str(built[2])},
        )
        for path, assets in ((built[1], None), (tmp_path / "lines1", str(tmp_path / "words")))
    )
    message = "was made with another tokenizer than that of the training data"
    for config in (by_corpus, by_text):
        assert message in rehearsed(config)
        with pytest.raises(DataError, match=message):
            validation_data(config, 2, 512, Preparer())


def test_a_given_tokenizer_without_bos_is_one_problem(tmp_path: Path) -> None:
    tokenizer_in(tmp_path / "words")
    config = tiny_job(
        tmp_path / "run",
        model={"hf_assets_path": str(tmp_path / "words")},
        training={**TRAIN, "dataset_path": str(write_lines(tmp_path / "lines", 1))},
        data={"folder": str(tmp_path / "data"), "add_bos": True},
    )
    assert rehearsed(config).count("no beginning-of-document token") == 1


@pytest.mark.parametrize("place", [{"dataset": "c4_test"}, {"dataset_path": "nowhere"}])
def test_data_that_is_still_to_be_fetched_is_no_fault_of_the_tokenizer(
    place: dict[str, str], tmp_path: Path
) -> None:
    """Next to other corpora, which are looked at for how documents begin."""
    write_bpe(tmp_path)
    lines = lines_of(write_lines(tmp_path / "lines", 1))
    lay_out("lines", lines, Tokenizer(tmp_path), tmp_path / "data")
    config = tiny_job(
        tmp_path / "run",
        model={"hf_assets_path": str(tmp_path)},
        training={**TRAIN, **place},
        data={"folder": str(tmp_path / "data"), "add_bos": None},
    )
    require_start(Loaded(config, [], "run.toml"))


def test_a_corpus_of_less_than_a_batch_is_noted(tmp_path: Path) -> None:
    (tmp_path / "tiny.txt").write_text("hello world\n")
    config = tiny_job(
        tmp_path / "run",
        training={**TRAIN, "dataset_path": str(tmp_path / "tiny.txt"), "steps": 100},
        data={"folder": str(tmp_path / "data")},
    )
    assert "tiny.txt has at most 13 tokens, less than a batch of 32" in "\n".join(
        str(note) for note in require_start(Loaded(config, [], "run.toml"))
    )


def test_check_notes_a_disk_without_room_for_the_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    config = tiny_job(tmp_path / "run", training=TRAIN, checkpoint={"enable": True})
    notes = require_start(Loaded(config, [], "run.toml"))
    assert [
        note.key for note in notes if "1.0 kB free, but a checkpoint needs" in note.message
    ] == ["job.dump_folder"]


def test_the_newest_checkpoint_is_the_one_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = {"step_2", "step_3"}

    def tried(path: Path, *_: object) -> list[str]:
        if path.name in damaged:
            raise CheckpointError(f"{path.name} is damaged")
        return []

    monkeypatch.setattr("overland.apps.check.rehearsal.try_checkpoint", tried)
    config, paths = tiny_job(tmp_path), [tmp_path / f"step_{i}" for i in (1, 2, 3)]
    assert try_newest(paths, config, None) == [
        "step_3 is damaged; step_1 will be resumed", "step_2 is damaged; step_1 will be resumed"
    ]  # fmt: skip
    damaged.add("step_1")
    with pytest.raises(CheckpointError, match="step_3 is damaged"):
        try_newest(paths, config, None)


FIXED_TO: dict[str, dict[str, Any]] = {
    "text": {
        "model.hf_assets_path": "chatml", "training.column": "body", "training.split": "test",
        "training.subset": "other", "data.mixture": "documents", "data.holdout": 0.1,
        "data.window_documents": 50, "data.add_bos": True, "data.add_eos": False, "debug.seed": 1,
    },
    "messages": {
        "sft.shape": "text", "sft.chat_template": "chatml", "sft.template_options": {"thinking": 1},
        "sft.date": "2020-01-01", "sft.learn": "last", "sft.too_long": "drop",
        "sft.parse_specials": True, "sft.special_tokens_in_content": True,
        "sft.skip_unlearned": True,
    },
    "preference": {
        "preference.max_prompt": 5, "preference.prompt_side": "right",
        "preference.answer_side": "left",
    },
}  # fmt: skip


def test_every_key_that_fixes_the_data_is_refused_on_resume(
    ranks: RankPool, tmp_path: Path
) -> None:
    """As the table of docs/train.md says; those of images are tried in tests/seams."""
    tried = {key for keys in FIXED_TO.values() for key in keys}
    listed = {f"{section}.{name}" for section, names in FIXED.items() for name in names}
    assert tried == {key for key in listed if not key.startswith("images.")}
    for name in ("llama3", "chatml"):
        write_tokenizer(tmp_path / name, **ROLES[name])
        (tmp_path / name / "chat_template.jinja").write_text(ASKS + LLAMA3)
    turns = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "1 2 3"}]
    records = [{"text": f"a {i}", "body": f"b {i}", "messages": turns} for i in range(40)]
    pair = {"prompt": "say", "chosen": "yes yes", "rejected": "no"}
    for place in ("text/train", "text/test", "text/other", "messages/train"):
        write_records(tmp_path / f"{place}.jsonl", records)
    write_records(tmp_path / "preference/train.jsonl", [pair] * 40)
    files = [{"split": name, "path": f"{name}.jsonl"} for name in ("train", "test")]
    other = {"config_name": "other", "data_files": "other.jsonl"}
    configs = [{"config_name": "default", "data_files": files}, other]
    (tmp_path / "text/README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")

    def job(kind: str, steps: int, key: str = "", value: Any = None) -> JobConfig:
        sections: dict[str, dict[str, Any]] = {
            "model": {"hf_assets_path": str(tmp_path / "llama3"),
                      "overrides": {**TINY_MODEL, "vocab_size": 640}},
            "training": {**TRAIN, "seq_len": 64, "steps": steps,
                         "dataset_path": str(tmp_path / kind)},
            "data": {"folder": str(tmp_path / "data"), "tokenise_processes": 0},
            "checkpoint": {"enable": True, "interval": 1},
            "sft": {"shape": "off" if kind == "text" else kind},
            "preference": {"loss": "dpo"} if kind == "preference" else {},
        }  # fmt: skip
        section, _, name = key.partition(".")
        if key:
            value = str(tmp_path / value) if name == "hf_assets_path" else value
            sections.setdefault(section, {})[name] = value
        return tiny_job(tmp_path / f"run_{kind}", **sections)

    for kind, changes in FIXED_TO.items():
        changed = [job(kind, 2, *change) for change in changes.items()]
        ((began, *said),) = ranks.run(1, outcomes, [job(kind, 1), *changed])
        assert began == ""
        for key, one, config in zip(changes, said, changed, strict=True):
            assert "not what this run was trained on" in one or f"{key} is " in one, (key, one)
            assert rehearsed(config) != "", key
