"""Conversations as training data: from any format to rows whose loss is on what assistants say."""

from __future__ import annotations

import csv
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from overland.apps.data.build import build
from overland.apps.data.standard_library import StandardLibrary
from overland.checks.hyperparameters import check_objective, check_sft
from overland.config.load import Loaded, load_config
from overland.config.schema import JobConfig
from overland.data.batch import load_batch
from overland.data.corpora import Preparer
from overland.data.lanes import IGNORED
from overland.data.layout import lay_out
from overland.data.learned_tokens import OTHER_ROLES
from overland.data.plan import ChangedSource
from overland.data.prepare import Dataset, training_data, validation_data
from overland.data.sft import BUILT_IN, ConversationSource
from overland.data.tokenizer import Tokenizer
from overland.data.wanted import sources_of
from overland.errors import DataError
from tests.data.chats import ASKS, LLAMA3, MARKED, ROLES, TALK, write_lines, write_tokenizer
from tests.data.sources.test_mds import write_mds

NUM = 24
SEQ_LEN = 256


def talk(i: int, turns: int = 2) -> list[dict[str, str]]:
    """A conversation whose answers are its own."""
    return [
        {"role": role, "content": f"{role} {i}.{turn} " + "word " * (i % 5)}
        for turn in range(turns)
        for role in ("user", "assistant")
    ]


def answers(turns: list[dict[str, str]]) -> list[str]:
    """What is learned of a conversation."""
    contents = [turn["content"] for turn in turns if turn["role"] == "assistant"]
    return [f"{content.strip()}<|eot_id|>" for content in contents]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    return write_tokenizer(folder, **ROLES["llama3"], chat_template=LLAMA3)


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    records = [{"messages": talk(i, 1 + i % 3)} for i in range(NUM)]
    return write_lines(tmp_path_factory.mktemp("talks") / "talks.jsonl", records)


def job(folder: Path, tokenizer: Path, path: Path, **sections: Any) -> JobConfig:
    settings: dict[str, Any] = {
        "job": {"dump_folder": str(folder / "run")},
        "model": {"hf_assets_path": str(tokenizer)},
        "training": {"dataset_path": str(path), "seq_len": SEQ_LEN},
        "data": {"folder": str(folder / "data"), "packing": "best_fit", "document_mask": True},
        "sft": {"shape": "auto"},
    }
    for section, values in sections.items():
        settings.setdefault(section, {}).update(values)
    return JobConfig.model_validate(settings)


def opened(config: JobConfig) -> ConversationSource:
    (wanted,) = sources_of(config).values()
    source = wanted.open()
    assert isinstance(source, ConversationSource)
    return source


def samples(source: ConversationSource) -> list[tuple[list[int], list[float]]]:
    documents: list[Any] = [one for chunk in source.chunks() for one in source.read(chunk)]
    return [(one["tokens"].tolist(), one["weights"].tolist()) for one in documents]


def learned(source: ConversationSource) -> list[str]:
    """The text that each sample's loss is on."""
    return [
        "".join(source.tokenizer.pieces(np.asarray(ids)[np.asarray(weights) > 0].tolist()))
        for ids, weights in samples(source)
    ]


def data_of(config: JobConfig, rows: int = 4, **how: Any) -> Dataset:
    return training_data(config, rows, 640, Preparer(**how))


# From records to samples


def test_loss_is_on_what_assistants_say(tmp_path: Path, tokenizer: Path, talks: Path) -> None:
    source = opened(job(tmp_path, tokenizer, talks))
    assert learned(source) == ["".join(answers(talk(i, 1 + i % 3))) for i in range(NUM)]
    for ids, weights in samples(source):
        assert ids.count(source.tokenizer.bos_id) == 1
        assert ids[0] == source.tokenizer.bos_id
        assert weights[0] == 0
    assert source.notes == [
        "conversations in column messages (sft.shape), formatted with the tokenizer's chat "
        "template (sft.chat_template); trained on assistant turns (sft.learn), found by prefixes"
    ]


def write_as(form: str, folder: Path, records: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True)
    path = folder / f"talks.{form}"
    if form == "jsonl":
        return write_lines(path, records)
    if form == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["messages"])
            writer.writeheader()
            writer.writerows({"messages": json.dumps(one["messages"])} for one in records)
        return path
    if form == "mds":
        rows = [{"messages": json.dumps(one["messages"]).encode()} for one in records]
        write_mds(folder / "mds", {"messages": "json"}, rows)
        return folder / "mds"
    table = pa.Table.from_pylist(records)
    if form == "parquet":
        pq.write_table(table, path)
        return path
    with pa.OSFile(str(path), "wb") as sink:
        make = pa.ipc.new_stream if form == "arrow" else pa.ipc.new_file
        with make(sink, table.schema) as writer:
            writer.write_table(table)
    return path


@pytest.mark.parametrize("form", ["csv", "mds", "parquet", "arrow", "feather"])
def test_every_format_gives_the_same_samples(tmp_path: Path, tokenizer: Path, form: str) -> None:
    """Tables give every field to every turn: nulls are what it had not."""
    records = [{"messages": talk(i, 1 + i % 3)} for i in range(5)]
    records[1]["messages"][1]["weight"] = 0.5  # type: ignore[assignment]
    records[4]["messages"][1]["train"] = False  # type: ignore[assignment]
    lines = opened(job(tmp_path, tokenizer, write_as("jsonl", tmp_path / "l", records)))
    other = opened(job(tmp_path, tokenizer, write_as(form, tmp_path / "o", records)))
    assert samples(other) == samples(lines)
    assert {w for _, weights in samples(lines) for w in weights} == {0, 0.5, 1}


GUANACO = [{"text": "<s>[INST] Hi [/INST] Hello </s>"}, {"text": "<s>[INST] A [/INST] B </s>"}]


def test_a_cached_arrow_stream_of_raw_text(tmp_path: Path, tokenizer: Path) -> None:
    path = write_as("arrow", tmp_path / "cache", GUANACO)
    folder = write_tokenizer(tmp_path / "llama2", **ROLES["mistral"], add_bos_token=True)
    with pytest.raises(DataError, match=r"talks\.arrow: row 0: its text contains <s>, .*parse_spe"):
        samples(opened(job(tmp_path, folder, path)))
    parsed = opened(job(tmp_path, folder, path, sft={"parse_specials": True}))
    assert parsed.notes == ["texts in column text (sft.shape); trained on every token"]
    bos, eos = parsed.tokenizer.specials["<s>"], parsed.tokenizer.specials["</s>"]
    for ids, weights in samples(parsed):
        assert [i for i, id_ in enumerate(ids) if id_ in (bos, eos)] == [0, len(ids) - 1]
        assert weights == [0, *[1] * (len(ids) - 1)] or weights == [1] * len(ids)
    plain = opened(job(tmp_path, folder, path, sft={"parse_specials": False}))
    for ids, _ in samples(plain):
        assert (ids.count(bos), ids.count(eos)) == (1, 1)  # around it; in it they are spelt
        assert plain.tokenizer.decode(ids).startswith("<s>[INST]")


def test_what_a_template_leaves_out_of_turns_is_said(tmp_path: Path, tokenizer: Path) -> None:
    answer = {"role": "assistant", "content": "4", "reasoning_content": "2 + 2", "name": "bot"}
    path = write_lines(tmp_path / "a.jsonl", [{"messages": [talk(0)[0], answer]}])
    assert (
        "turns also have reasoning_content and name, which the tokenizer's chat template leaves "
        "out (set sft.chat_template to use another template)"
    ) in opened(job(tmp_path, tokenizer, path)).notes
    (tmp_path / "t.jinja").write_text("{{ messages[0].reasoning_content }}{{ messages[0].name }}")
    sft = {"chat_template": str(tmp_path / "t.jinja")}
    assert "turns also" not in "".join(opened(job(tmp_path, tokenizer, path, sft=sft)).notes)


def test_a_template_asks_for_content_that_is_null(tmp_path: Path, tokenizer: Path) -> None:
    """In every format: a table also gives nulls to turns and arguments that have no such field."""
    template = (
        "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.content is none %}"
        "{{ m.tool_calls | tojson }}{% endif %}{% else %}{{ m.content }}{% endif %}<|eot_id|>"
        "{% endfor %}"
    )
    (tmp_path / "t.jinja").write_text(template)
    calls = [{"function": {"name": "f", "arguments": {name: 1}}} for name in "ab"]
    call = {"role": "assistant", "content": None, "tool_calls": calls}
    record = {"messages": [talk(0)[0], call, {"role": "assistant", "content": "4"}]}
    sft = {"chat_template": str(tmp_path / "t.jinja")}
    for form in ("jsonl", "csv", "mds", "parquet", "arrow"):
        path = write_as(form, tmp_path / form, [record])
        (text,) = learned(opened(job(tmp_path, tokenizer, path, sft=sft)))
        assert text == f"{json.dumps(calls)}<|eot_id|>4<|eot_id|>", form


def test_names_of_special_tokens_in_messages_are_text_and_counted(
    tmp_path: Path, tokenizer: Path
) -> None:
    turns = [talk(0)[0], {"role": "assistant", "content": "a <|eot_id|> b"}]
    path = write_lines(tmp_path / "a.jsonl", [{"messages": talk(0)}, {"messages": turns}])

    def ends(**sft: Any) -> tuple[int, list[int]]:
        source = opened(job(tmp_path, tokenizer, path, sft=sft))
        (_, (ids, _)) = samples(source)
        assert all("special_tokens_in_content" in what for what in source.counts)
        return ids.count(source.tokenizer.specials["<|eot_id|>"]), list(source.counts.values())

    assert ends() == (2, [1])
    assert ends(special_tokens_in_content=True) == (3, [])
    assert ends(special_tokens_in_content=["<|eot_id|>"]) == (3, [])
    assert ends(special_tokens_in_content=["<s>"]) == (2, [1])
    with pytest.raises(DataError, match="special_tokens_in_content: '<think>' is not a special"):
        ends(special_tokens_in_content=["<think>"])


LISTS = (
    "{% for m in messages %}{% for part in m.content %}{{ part.text }}|{% endfor %}<|eot_id|>"
    "{% endfor %}"
)


def test_what_is_changed_of_turns_is_said(tmp_path: Path, tokenizer: Path) -> None:
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    turns = [{"role": role, "content": parts} for role in ("user", "assistant")]
    path = write_lines(tmp_path / "parts.jsonl", [{"messages": turns}])
    source = opened(job(tmp_path, tokenizer, path))
    assert learned(source) == ["AB<|eot_id|>"]
    assert any("lists of texts, which are joined" in note for note in source.notes)
    (tmp_path / "lists.jinja").write_text(LISTS)
    source = opened(
        job(tmp_path, tokenizer, path, sft={"chat_template": f"{tmp_path}/lists.jinja"})
    )
    assert learned(source) == ["A|B|<|eot_id|>"]
    assert not any("joined" in note for note in source.notes)
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "A"}]
    path = write_lines(tmp_path / "s.jsonl", [{"conversations": turns}])
    notes = opened(job(tmp_path, tokenizer, path)).notes
    assert any("human is user and gpt is assistant" in note for note in notes)


def test_roles_are_as_in_the_data(tmp_path: Path, tokenizer: Path) -> None:
    turns = [{"role": "human", "content": "a"}, {"role": "gpt", "content": "A"}]
    path = write_lines(tmp_path / "r.jsonl", [{"messages": turns}])
    with pytest.raises(DataError, match=r"they are human and gpt .* sft.shape = .sharegpt"):
        samples(opened(job(tmp_path, tokenizer, path)))
    source = opened(job(tmp_path, tokenizer, path, sft={"shape": "sharegpt"}))
    assert learned(source) == ["A<|eot_id|>"]
    path = write_lines(tmp_path / "r.jsonl", [{"messages": [*TALK[:2], *turns]}])
    assert any("turns by gpt are not learned" in note for note in opened(
        job(tmp_path, tokenizer, path)).notes)  # fmt: skip


def test_a_header_that_is_learned_is_said(tmp_path: Path, tokenizer: Path, talks: Path) -> None:
    plain = "{% for m in messages %}{{ m.role + ': ' + m.content + '<|eot_id|>' }}{% endfor %}"
    asks = plain + "{% if add_generation_prompt %}assistant: {% endif %}"
    marked = plain.replace("{{ m.r", "{% generation %}{{ m.r").replace(
        "{% endfor", "{% endgeneration %}{% endfor"
    )
    for source, is_said in ((plain, True), (asks, False), (marked, False), (LLAMA3, False)):
        (tmp_path / "t.jinja").write_text(source)
        sft = {"chat_template": f"{tmp_path}/t.jinja"}
        notes = "".join(opened(job(tmp_path, tokenizer, talks, sft=sft)).notes)
        assert ("'assistant:' before each answer is learned" in notes) == is_said


def test_what_the_prompt_of_pairs_is_is_said(tmp_path: Path, tokenizer: Path) -> None:
    texts = {"chosen": "\n\nHuman: Hi\n\nAssistant: A", "rejected": "\n\nHuman: Hi\n\nAssistant: B"}
    for record, where in (
        (texts, "the text that both begin with"),
        ({"prompt": "Hi", "chosen": "A", "rejected": "B"}, "column prompt"),
    ):
        path = write_lines(tmp_path / "p.jsonl", [record])
        config = job(tmp_path, tokenizer, path, preference={"loss": "dpo"})
        source = opened(config)
        assert f"the prompt of chosen and rejected is {where}" in source.notes
        assert ", with texts unchanged and turns formatted with" in source.notes[0]
        assert source.notes[0].endswith("; trained on the answers")
        assert learned(source) == [f"{'A' if where[0] == 'c' else ' A'}<|eot_id|>"
                                   f"{'B' if where[0] == 'c' else ' B'}<|eot_id|>"]  # fmt: skip


def test_turns_as_prompt_and_completion_are_said_to_be_written_by_the_template(
    tmp_path: Path, tokenizer: Path
) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": "Hi", "completion": "Hello"}])
    assert opened(job(tmp_path, tokenizer, path)).notes == [
        "prompts and completions in columns prompt and completion (sft.shape), with texts "
        "unchanged and turns formatted with the tokenizer's chat template (sft.chat_template); "
        "trained on the completions"
    ]


def test_a_prompt_is_not_learned(tmp_path: Path, tokenizer: Path) -> None:
    path = write_lines(tmp_path / "pairs.jsonl", [{"prompt": "2 + 2 =", "completion": " 4"}])
    source = opened(job(tmp_path, tokenizer, path))
    assert learned(source) == [" 4<|eot_id|>"]
    everything = opened(job(tmp_path, tokenizer, path, sft={"learn": "all"}))
    assert learned(everything) == ["2 + 2 = 4<|eot_id|>"]


@pytest.mark.parametrize(
    ("sft", "expected"),
    [
        ({}, ["A<|eot_id|>B<|eot_id|>"]),
        ({"learn": "last"}, ["B<|eot_id|>"]),
        ({"chat_template": "marked.jinja"}, ["A<|eot_id|>B<|eot_id|>"]),
        ({"chat_template": "chatml"}, ["A<|im_end|>\nB<|im_end|>\n"]),
    ],
)
def test_keys_decide_what_is_learned(
    tmp_path: Path, tokenizer: Path, sft: dict[str, Any], expected: list[str]
) -> None:
    if sft.get("chat_template") == "marked.jinja":
        (tmp_path / "marked.jinja").write_text(MARKED["llama3"])
        sft = {"chat_template": str(tmp_path / "marked.jinja")}
    turns = [
        {"from": who, "value": what}
        for who, what in (("human", "a"), ("gpt", "A"), ("human", "b"), ("gpt", "B"))
    ]
    path = write_lines(tmp_path / "s.jsonl", [{"conversations": turns}])
    assert learned(opened(job(tmp_path, tokenizer, path, sft=sft))) == expected


@pytest.mark.parametrize(
    ("too_long", "expected"),
    [
        ("error", r"long\.jsonl:2: it has [\d,]+ tokens, but training.seq_len = 32 has room"),
        ("truncate", {"truncated": 1}),
        ("drop", {"too long": 1}),
        ("split", {"split": 1}),
    ],
)
def test_long_conversations(tmp_path: Path, tokenizer: Path, too_long: str, expected: Any) -> None:
    talks = [
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": words}]
        for words in ("b", "word " * 50)
    ]
    path = write_lines(tmp_path / "long.jsonl", [{"messages": turns} for turns in talks])
    config = job(tmp_path, tokenizer, path, sft={"too_long": too_long}, training={"seq_len": 32})
    if too_long == "error":
        with pytest.raises(DataError, match=expected):
            samples(opened(config))
        return
    source = opened(config)
    whole = samples(opened(job(tmp_path, tokenizer, path)))
    found = samples(source)
    assert dict(source.counts) == expected
    assert found[0] == whole[0]
    if too_long == "truncate":
        assert found[1:] == [(whole[1][0][:33], whole[1][1][:33])]
    elif too_long == "drop":
        assert found[1:] == []
    else:  # rows are cut when they are packed
        assert found[1:] == whole[1:]
    dataset = data_of(config, rows=1)
    dataset.rows.read(0)
    assert dict(dataset.counts) == expected


ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately "
    "completes the request.\n\n### Instruction:\n{}\n\n### Response:\n"
)


@pytest.mark.parametrize(("add_bos", "bos"), [(True, "<s>"), (False, "")])
def test_the_prompt_of_alpaca_is_built_in(tmp_path: Path, add_bos: bool, bos: str) -> None:
    """BOS comes before it if the tokenizer begins texts with it."""
    write_tokenizer(tmp_path / "own", **ROLES["mistral"], add_bos_token=add_bos)
    asked = [("Add", ""), ("Add", "1 + 1")]
    records = [{"instruction": a, "input": b, "output": "It <s> is"} for a, b in asked]
    path = write_lines(tmp_path / "alpaca.jsonl", records)
    context = ", paired with an input that provides further context"
    prompts = [ALPACA.format("", "Add"), ALPACA.format(context, "Add\n\n### Input:\n1 + 1")]
    source = opened(job(tmp_path, tmp_path / "own", path, sft={"chat_template": "alpaca"}))
    texts = ["".join(source.tokenizer.pieces(ids)) for ids, _ in samples(source)]
    assert texts == [f"{bos}{prompt}It <s> is</s>" for prompt in prompts]
    assert learned(source) == ["It <s> is</s>"] * 2


def test_nothing_to_learn_is_an_error_that_shows_it(tmp_path: Path, tokenizer: Path) -> None:
    other = [{**turn, "role": turn["role"].replace("assistant", "gpt")} for turn in TALK]
    records = [{"messages": TALK[:1]}, {"messages": TALK}, {"messages": other}]
    path = write_lines(tmp_path / "one.jsonl", records)
    with pytest.raises(DataError, match=r"one\.jsonl:1: there is nothing to learn .*Hello there"):
        samples(opened(job(tmp_path, tokenizer, path, data={"bad_documents": "skip"})))
    source = opened(job(tmp_path, tokenizer, path, sft={"skip_unlearned": True}))
    assert len(samples(source)) == 1
    assert dict(source.counts) == {"without anything to learn": 1, OTHER_ROLES: 1}


def test_what_cannot_be_used_is_named_or_skipped(tmp_path: Path, tokenizer: Path) -> None:
    records = [{"messages": TALK}, {"messages": []}, {"messages": "Hi"}, {"messages": TALK}]
    path = write_lines(tmp_path / "bad.jsonl", records)
    with pytest.raises(DataError, match=r"bad\.jsonl:2: its column messages .*data.bad_documents"):
        samples(opened(job(tmp_path, tokenizer, path)))
    with path.open("a") as file:
        file.write("\n{not json\n")
    source = opened(job(tmp_path, tokenizer, path, data={"bad_documents": "skip"}))
    assert len(samples(source)) == 2
    assert source.num_bad == 3


def test_what_is_too_long_names_the_key_that_says_so(tmp_path: Path, tokenizer: Path) -> None:
    turns = [{"role": "user", "content": "word " * 99}, {"role": "assistant", "content": "x"}]
    path = write_lines(tmp_path / "long.jsonl", [{"messages": turns}])
    config = job(tmp_path, tokenizer, path, sft={"too_long": "truncate"}, training={"seq_len": 32})
    with pytest.raises(DataError, match=r"that counts was cut off \(training.seq_len = 32\)"):
        samples(opened(config))
    shorter = {"validation": {"seq_len": 16}, "sft": {"too_long": "error"}}
    config = job(tmp_path, tokenizer, path, **shorter)
    (wanted,) = sources_of(config).values()
    source = replace(wanted, table="validation").open()
    with pytest.raises(DataError, match=r"tokens, but validation.seq_len = 16 has room for 17"):
        list(source.read(source.chunks()[0]))


def test_packing_that_cuts_conversations_is_said(
    tmp_path: Path, tokenizer: Path, talks: Path
) -> None:
    for packing, words in (("pack", "cuts conversations wherever a sequence ends"), ("trunc", "")):
        config = job(tmp_path, tokenizer, talks, data={"packing": packing})
        said = "".join(map(str, check_sft(Loaded(config, [], "run.toml"))))
        assert words in said
        assert bool(said) == bool(words)


def test_pairs_are_checked_whatever_the_objectives_keys(
    tmp_path: Path, tokenizer: Path, talks: Path
) -> None:
    more = {"preference": {"loss": "dpo"}, "training": {"z_loss": 1e-4}}
    config = job(tmp_path, tokenizer, talks, **more)
    said = "".join(map(str, check_objective(Loaded(config, [], "run.toml"))))
    assert "each pair is a row" in said


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"sft": {"chat_template": "nowhere.jinja"}}, "sft.chat_template = 'nowhere.jinja': there"),
        ({"sft": {"shape": "instruction"}}, "does not contain questions and answers"),
        ({"sft": {"date": "tomorrow"}}, "sft.date = 'tomorrow': expected a date"),
        (
            {"sft": {"template_options": {"messages": 1}}},
            "messages is reserved, since every template gets it",
        ),
        ({"sft": {"template_options": {"thinkign": True}}}, "sft.template_options.thinkign has no"),
        ({"sft": {"date": "2026-07-01"}}, "sft.date has no effect"),
        ({"data": {"add_bos": True}}, "data.add_bos is only for texts"),
        ({"training": {"column": "turns"}}, "has no column 'turns'; its columns: messages"),
        ({"model": {"hf_assets_path": None}}, "needs the tokenizer of the model: set model.from"),
    ],
)
def test_settings_that_cannot_be_used_are_named(
    tmp_path: Path, tokenizer: Path, talks: Path, sections: dict[str, Any], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        opened(job(tmp_path, tokenizer, talks, **sections))


def test_a_tokenizer_without_a_template_or_its_tokens_is_told(tmp_path: Path, talks: Path) -> None:
    from overland.apps.data.tokenizer_training import train_tokenizer

    (tmp_path / "bare").mkdir()
    train_tokenizer(["a b"], 300, tmp_path / "bare" / "tokenizer.json")
    with pytest.raises(DataError, match=r"no chat template .* sft.chat_template to a file, or to"):
        opened(job(tmp_path, tmp_path / "bare", talks))
    chatml = {"chat_template": "chatml"}
    with pytest.raises(DataError, match=r'set sft.new_tokens = \["<\|im_start\|>", "<\|im_end\|>"'):
        opened(job(tmp_path, tmp_path / "bare", talks, sft=chatml))
    (tmp_path / "own.jinja").write_text(BUILT_IN["chatml"].read_text())
    own = {"chat_template": str(tmp_path / "own.jinja")}
    notes = opened(job(tmp_path, tmp_path / "bare", talks, sft=own)).notes
    assert "<|im_start|> and <|im_end|>, which this tokenizer does not have: it" in notes[1]


@pytest.mark.parametrize(("name", "words"), [("  ", "is not a name"), ("a", "already an")])
def test_new_tokens_have_names_of_their_own(tokenizer: Path, name: str, words: str) -> None:
    with pytest.raises(DataError, match=f"sft.new_tokens: '{name}' {words}|is {words}"):
        Tokenizer(tokenizer, add_eos=False, new_tokens=["<new>", name])
    opened = Tokenizer(tokenizer, add_eos=False, new_tokens=["<new>", "<s>", "<new>"])
    assert opened.new_tokens == ("<new>",)
    assert opened.vocab_size == Tokenizer(tokenizer, add_eos=False).vocab_size + 1


def test_text_has_no_records(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(DataError, match="is text, or mixes formats: records must all be in"):
        opened(job(tmp_path, tokenizer, tmp_path / "a.txt"))
    stdlib = job(tmp_path, tokenizer, tmp_path, training={"dataset_path": None})
    with pytest.raises(DataError, match="has no records to fine-tune on"):
        opened(stdlib)


def test_templates_of_a_tokenizer(tmp_path: Path, talks: Path) -> None:
    listed = [
        {"name": "default", "template": LLAMA3},
        {"name": "tool_use", "template": "{{ 'tools: ' + tools[0].name }}" + MARKED["llama3"]},
    ]
    folder = write_tokenizer(tmp_path / "t", **ROLES["llama3"], chat_template=listed)
    path = write_lines(
        tmp_path / "tools.jsonl",
        [{"messages": TALK, "tools": None}, {"messages": TALK, "tools": [{"name": "add"}]}],
    )
    source = opened(job(tmp_path, folder, path))
    texts = ["".join(source.tokenizer.pieces(ids)) for ids, _ in samples(source)]
    assert [text.startswith("tools: add") for text in texts] == [False, True]
    (folder / "chat_template.jinja").write_text(MARKED["llama3"])  # wins over the config
    assert Tokenizer(folder).chat_templates["default"] == MARKED["llama3"]
    assert "marks" in opened(job(tmp_path, folder, talks)).notes[0]
    (folder / "chat_template.jinja").unlink()
    for wrong in (3, [3], [{"name": "a"}]):
        about = {**ROLES["llama3"], "chat_template": wrong}
        (folder / "tokenizer_config.json").write_text(json.dumps(about))
        with pytest.raises(DataError, match="a chat_template that is neither text nor a list"):
            Tokenizer(folder)


# From samples to rows


def answers_in(dataset: Dataset, batch: int, parts: int = 1) -> Counter[str]:
    """The answers that a batch learns, over all ranks."""
    tokenizer, found = dataset.tokenizer, Counter[str]()
    assert tokenizer is not None
    for part in range(parts):
        rows = load_batch(dataset.rows, batch, part, parts)
        labels, weights = rows["labels_BS"].numpy(), rows["weights_BS"].numpy()
        counts = (labels != IGNORED) & (weights > 0)
        for row in range(len(labels)):
            text = "".join(tokenizer.pieces(labels[row][counts[row]].tolist()))
            found.update(one + "<|eot_id|>" for one in text.split("<|eot_id|>")[:-1])
    return found


@pytest.mark.parametrize("packing", ["best_fit", "trunc"])
def test_every_answer_once_per_epoch_for_any_ranks(
    tmp_path: Path, tokenizer: Path, talks: Path, packing: str
) -> None:
    config = job(tmp_path, tokenizer, talks, data={"packing": packing}, training={"epochs": 1.0})
    dataset = data_of(config)
    total = Counter(one for i in range(NUM) for one in answers(talk(i, 1 + i % 3)))
    for parts in (1, 2, 4):
        batches = range(dataset.rows.num_batches(1.0))
        found = sum((answers_in(dataset, batch, parts) for batch in batches), Counter())
        assert found == total


def test_held_out_conversations_are_the_others(
    tmp_path: Path, tokenizer: Path, talks: Path
) -> None:
    sections = {"data": {"holdout": 0.3}, "training": {"epochs": 1.0}}
    config = job(tmp_path, tokenizer, talks, validation={"enable": True}, **sections)
    trained = data_of(config)
    (held,) = validation_data(config, 4, 640, Preparer())
    sides = [
        sum((answers_in(one, i) for i in range(one.rows.num_batches(1.0))), Counter())
        for one in (trained, held)
    ]
    assert not set(sides[0]) & set(sides[1])
    assert sides[0] + sides[1] == Counter(
        one for i in range(NUM) for one in answers(talk(i, 1 + i % 3))
    )


def test_validation_needs_conversations_of_its_own(
    tmp_path: Path, tokenizer: Path, talks: Path
) -> None:
    config = job(tmp_path, tokenizer, talks, validation={"enable": True})
    with pytest.raises(DataError, match=r"data.holdout = 0.02 .* or set validation.dataset_path"):
        validation_data(config, 4, 640, Preparer())


CHANGES = {
    "sft.learn is 'last' and was 'assistant'": {"sft": {"learn": "last"}},
    "sft.too_long is 'drop' and was 'error'": {"sft": {"too_long": "drop"}},
    "training.seq_len is 64 and was 256": {"training": {"seq_len": 64}},
    "sft.date is '2026-07-01' and was None": {"sft": {"date": "2026-07-01"}},
    "conversations use another chat template": {"sft": {"chat_template": "chatml"}},
    "sft.template_options is": {"sft": {"template_options": {"thinking": True}}},
    "sft.skip_unlearned is True and was False": {"sft": {"skip_unlearned": True}},
    "sft.parse_specials is True and was None": {"sft": {"parse_specials": True}},
    r"sft.special_tokens_in_content is \['<s>'\] and was": {
        "sft": {"special_tokens_in_content": ["<s>"]}
    },
}


@pytest.mark.parametrize("words", CHANGES)
def test_a_changed_key_is_another_corpus_and_a_resume_says_which(
    tmp_path: Path, talks: Path, words: str
) -> None:
    tokenizer = write_tokenizer(tmp_path / "t", **ROLES["llama3"], chat_template=ASKS + LLAMA3)
    before = data_of(job(tmp_path, tokenizer, talks))
    assert data_of(job(tmp_path, tokenizer, talks)).plan == before.plan
    after = data_of(job(tmp_path, tokenizer, talks, **CHANGES[words]))
    (one,), (other,) = (set(data.plan.sources.values()) for data in (before, after))
    assert one.fingerprint != other.fingerprint
    with pytest.raises(ChangedSource, match=words) as caught:
        after.continued(before.plan.to_json(), 1)
    key, _, was = words.partition(" is")
    key = key if "." in key else "sft.chat_template"
    way_out = str(caught.value).rpartition(". ")[2]
    assert way_out.startswith(f"Set {key} back")
    assert way_out.endswith(", or start a new run with --resume none")
    if was.endswith("256"):
        assert way_out.startswith("Set training.seq_len back to 256,")


def test_shapes_may_be_mixed(tmp_path: Path, tokenizer: Path, talks: Path) -> None:
    texts = write_lines(tmp_path / "texts.jsonl", [{"text": f"a text {i}"} for i in range(9)])
    sources = {"chat": {"path": str(talks)}, "texts": {"path": str(texts)}}
    config = job(
        tmp_path, tokenizer, talks, data={"sources": sources}, training={"dataset_path": None}
    )
    dataset = data_of(config)
    found = sum((answers_in(dataset, batch) for batch in range(4)), Counter())
    assert any("text " in one for one in found)
    assert any(one.startswith("assistant ") for one in found)


def test_a_corpus_that_was_built_is_trained_on_as_it_was_built(
    tmp_path: Path, tokenizer: Path, talks: Path
) -> None:
    config = job(tmp_path, tokenizer, talks)
    source = opened(config)
    folder = lay_out("talks", source, source.tokenizer, tmp_path / "built")
    build(folder, source, source.tokenizer, processes=1)
    built = job(tmp_path, tokenizer, folder)
    total = answers_in(data_of(config), 0) + answers_in(data_of(config), 1)
    assert answers_in(data_of(built), 0) + answers_in(data_of(built), 1) == total
    own = job(tmp_path, tokenizer, folder, model={"hf_assets_path": None})
    assert answers_in(data_of(own), 0) == answers_in(data_of(built), 0)
    with pytest.raises(DataError, match=r"with different settings: sft.learn is .last. and"):
        data_of(job(tmp_path, tokenizer, folder, sft={"learn": "last"}))
    with pytest.raises(DataError, match=r"is a corpus of conversations: set sft\.shape"):
        data_of(job(tmp_path, tokenizer, folder, sft={"shape": "off"}))


def test_a_corpus_of_documents_cannot_be_mixed_in(
    tmp_path: Path, tokenizer: Path, talks: Path
) -> None:
    texts, own = StandardLibrary(part=(0, 400)), Tokenizer(tokenizer)
    folder = lay_out("built", texts, own, tmp_path / "built")
    build(folder, texts, own, processes=1)
    sources = {"talks": {"path": str(talks)}, "texts": {"path": str(folder)}}
    mixed = {"training": {"dataset_path": None}, "data": {"sources": sources}}
    with pytest.raises(DataError, match=r"texts is a corpus of documents, .* --sft shape=text"):
        data_of(job(tmp_path, tokenizer, talks, **mixed))


def test_the_tokenizer_that_is_kept_has_the_template(
    tmp_path: Path, tokenizer: Path, talks: Path
) -> None:
    config = job(tmp_path, tokenizer, talks, sft={"chat_template": "chatml"})
    found = data_of(config).tokenizer
    assert found is not None
    (tmp_path / "copy").mkdir()
    for name, data in found.files().items():
        (tmp_path / "copy" / name).write_bytes(data)
    copy = Tokenizer(tmp_path / "copy", add_bos=False, add_eos=False)
    assert copy.chat_templates == {"default": BUILT_IN["chatml"].read_text()}
    assert copy.fingerprint == found.fingerprint


# The config


def config_file(folder: Path, text: str) -> str:
    (folder / "run.toml").write_text(text)
    return str(folder / "run.toml")


def test_defaults_fit_conversations_and_are_said(tmp_path: Path) -> None:
    from overland.config.write import to_toml

    loaded = load_config(config_file(tmp_path, '[sft]\nshape = "auto"\n'))
    assert (loaded.config.data.packing, loaded.config.data.document_mask) == ("best_fit", True)
    assert any("data.packing" in note for note in loaded.notes)
    mine = '[sft]\nshape = "auto"\n[data]\npacking = "pack"\ndocument_mask = false\n'
    loaded = load_config(config_file(tmp_path, mine))
    assert (loaded.config.data.packing, loaded.config.data.document_mask) == ("pack", False)
    assert loaded.notes == []
    again = load_config(config_file(tmp_path, to_toml(loaded.config)))
    assert again.config == loaded.config
    one = '[sft]\nshape = "auto"\n[data]\npacking = "trunc"\n'
    assert load_config(config_file(tmp_path, one)).config.data.document_mask is False


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[sft]\nlearn = "last"', r"run.toml:2: sft.learn .*has no effect unless sft.shape is set"),
        ("[lora]\nalpha = 16.0", r"lora.alpha .*has no effect unless lora.rank or lora.adapter"),
        ("[preference]\nbeta = 0.3", r"preference.beta .*unless preference.loss is set"),
    ],
)
def test_keys_of_a_section_that_is_off_are_refused(tmp_path: Path, text: str, words: str) -> None:
    from overland.config.errors import ConfigError

    with pytest.raises(ConfigError, match=words):
        load_config(config_file(tmp_path, text))


def test_a_run_folders_config_with_every_key_loads(tmp_path: Path) -> None:
    from overland.config.write import to_toml

    text = to_toml(JobConfig(), full=True)
    assert load_config(config_file(tmp_path, text)).config.sft == JobConfig().sft
