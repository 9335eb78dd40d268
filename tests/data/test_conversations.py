"""Records of every shape become conversations, and those that cannot are one-sentence errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from overland.apps.data.chat_notes import prompts_are, renamed_roles
from overland.data.chat import ChatError, Undecided
from overland.data.conversations import Columns, Conversation, conversation, pair, recognize
from overland.data.learned_tokens import joined, weights_of
from overland.errors import DataError

USER, BOT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
TURNS = [USER, BOT]
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]


def told(record: dict[str, Any], **how: Any) -> Conversation:
    return conversation(record, recognize("file", [record], **how))


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"id": 7, "messages": TURNS}, "conversations in column messages"),
        ({"messages": json.dumps(TURNS)}, "conversations in column messages"),
        ({"conversations": SHAREGPT}, "conversations in ShareGPT format in column conversations"),
        ({"conversations": TURNS}, "conversations in column conversations"),
        ({"instruction": "Hi", "output": "Hello"}, "questions and answers in columns instruction "
         "and output"),
        ({"question": "Hi", "answer": "Hello"}, "questions and answers in columns question and "
         "answer"),
        ({"prompt": [USER], "completion": [BOT]}, "prompts and completions in columns prompt and "
         "completion"),
    ],
)  # fmt: skip
def test_shapes_are_recognised_by_their_columns(record: dict[str, Any], words: str) -> None:
    assert str(recognize("file", [record])) == words
    found = told(record)
    assert [dict(turn) for turn in found.turns] == TURNS
    assert weights_of(found, "assistant") == [0, 1]


def test_texts_stay_as_they_are() -> None:
    assert told({"text": "<s>[INST] a"}).texts == ("", "<s>[INST] a")
    assert told({"prompt": "a", "completion": " [1, 2]"}).texts == ("a", " [1, 2]")
    assert told({"prompt": "a", "completion": "[1, 2]"}).texts == ("a", "[1, 2]")
    assert told({"content": "a", "x": 1}, column="content").texts == ("", "a")
    record = {"instruction": "Add", "input": "1 + 1", "output": "[2]"}
    assert [turn["content"] for turn in told(record).turns] == ["Add\n\n1 + 1", "[2]"]
    assert told({**record, "input": ""}, wanted="completion").texts == ("Add", "[2]")


def test_a_wish_wins_over_what_is_likelier() -> None:
    record = {"messages": TURNS, "text": "a", "chosen": "b", "rejected": "c", "prompt": "d"}
    assert recognize("file", [record]).shape == "messages"
    assert recognize("file", [record], "text") == Columns("text", answer="text")
    assert recognize("file", [record], pairs=True).shape == "preference"
    assert recognize("file", [{"said": TURNS}], column="said").turns == "said"
    with pytest.raises(
        DataError, match=r"file does not contain questions and answers .sft.shape = 'i"
    ):
        recognize("file", [record], "instruction")
    with pytest.raises(DataError, match="file has no column 'x'; its columns: text"):
        recognize("file", [{"text": "a"}], column="x")


def test_columns_of_later_records_count() -> None:
    records = [{"messages": []}, {"messages": SHAREGPT, "tools": "[]"}]
    assert recognize("file", records) == Columns("sharegpt", "messages", tools="tools")


def test_what_is_nothing_to_learn_from_is_listed() -> None:
    with pytest.raises(DataError, match=r"its columns: url, html\. Expected messages, "):
        recognize("file", [{"url": "a", "html": "b"}])
    with pytest.raises(DataError, match="file is empty: it holds no records"):
        recognize("file", [])
    with pytest.raises(DataError, match=r"pairs of a chosen and a rejected .* set preference.loss"):
        recognize("file", [{"chosen": "a", "rejected": "b"}])
    with pytest.raises(
        DataError, match=r"contains texts in column text, but preference.loss needs"
    ):
        recognize("file", [{"text": "a"}], pairs=True)


def test_a_system_prompt_and_tools_of_their_own_columns() -> None:
    tool = {"name": "f"}
    record = {"system": "Be brief.", "messages": TURNS, "tools": json.dumps([tool])}
    found = told(record)
    assert found.turns[0] == {"role": "system", "content": "Be brief."}
    assert found.tools == (tool,)
    both = {**record, "messages": [{"role": "system", "content": "Own"}, *TURNS]}
    assert told(both).turns[0]["content"] == "Own"
    assert told({**record, "system": None, "tools": None}).tools is None


def test_a_prompt_is_given_whoever_speaks_in_it() -> None:
    record = {"prompt": [USER, BOT, USER], "completion": [BOT, USER, BOT]}
    assert weights_of(told(record), "assistant") == [0, 0, 0, 1, 0, 1]
    assert weights_of(told(record), "last") == [0, 0, 0, 0, 0, 1]
    assert weights_of(told(record), "all") is None


def test_pairs_share_their_prompt() -> None:
    other = {"role": "assistant", "content": "Bye"}
    for record in (
        {"prompt": "Hi", "chosen": [BOT], "rejected": [other]},
        {"prompt": "Hi", "chosen": TURNS, "rejected": [USER, other]},
        {"chosen": TURNS, "rejected": [USER, other]},
        {"messages": [USER], "chosen": BOT, "rejected": other},
    ):
        one, two = pair(record, recognize("file", [record], pairs=True))
        assert one.turns == (USER, BOT)
        assert two.turns == (USER, other)
        assert (one.num_given, two.num_given) == (1, 1)
    texts = {"prompt": "a", "chosen": "b", "rejected": "c"}
    one, two = pair(texts, recognize("file", [texts], pairs=True))
    assert (one.texts, two.texts) == (("a", "b"), ("a", "c"))


SYSTEM, OTHER = {"role": "system", "content": "Be kind"}, {"role": "assistant", "content": "Bye"}
LATER = [USER, BOT, {"role": "user", "content": "Why?"}]


@pytest.mark.parametrize(
    ("record", "num_given", "where"),
    [
        ({"prompt": "Hi", "chosen": [SYSTEM, *TURNS], "rejected": [SYSTEM, USER, OTHER]}, 2,
         "the turns that both begin with"),
        ({"prompt": [USER], "chosen": [SYSTEM, *TURNS], "rejected": [SYSTEM, USER, OTHER]}, 2,
         "the turns that both begin with"),
        ({"prompt": "Hi ", "chosen": [*LATER, BOT], "rejected": [*LATER, OTHER]}, 3,
         "the turns that both begin with"),
        ({"chosen": [*LATER, BOT], "rejected": [USER, OTHER, *LATER[2:], BOT]}, 1,
         "the turns that both begin with"),
        ({"chosen": TURNS, "rejected": TURNS}, 1, "the turns that both begin with"),
        ({"prompt": "Hi", "chosen": [BOT], "rejected": [OTHER]}, 1, "column prompt"),
        ({"prompt": [SYSTEM], "chosen": TURNS, "rejected": [USER, OTHER]}, 1, "column prompt"),
        ({"prompt": [SYSTEM, USER], "system": "No", "chosen": [BOT], "rejected": [OTHER]}, 2,
         "column prompt"),
    ],
)  # fmt: skip
def test_the_prompt_of_a_pair_is_the_same_for_both_and_written_once(
    record: dict[str, Any], num_given: int, where: str
) -> None:
    columns = recognize("file", [record], pairs=True)
    one, two = pair(record, columns)
    assert one.num_given == two.num_given == num_given
    assert one.turns[:num_given] == two.turns[:num_given]
    assert [turn["content"] for turn in one.turns].count("Hi") == 1
    assert one.turns[-1] == record["chosen"][-1]
    assert two.turns[-1] == record["rejected"][-1]
    assert prompts_are([{}, record], columns) == where


def test_the_prompt_of_two_texts_is_what_they_begin_with() -> None:
    """As in TRL: characters, without a space at the end."""
    start = "\n\nHuman: Hi\n\nAssistant:"
    for one, two, size in (
        (f"{start} Yes.", f"{start} No.", len(start)),
        (f"{start} It is", f"{start} It was", len(start) + 3),
        (f"{start} It i", f"{start} It was", len(start) + 3),
        ("ab", "abc", 1),
    ):
        record = {"chosen": one, "rejected": two}
        columns = recognize("file", [record], pairs=True)
        chosen, rejected = pair(record, columns)
        assert chosen.texts == (one[:size], one[size:])
        assert rejected.texts == (two[:size], two[size:])
        assert prompts_are([record], columns) == "the text that both begin with"


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"chosen": "a b", "rejected": "c d"}, "different text, so there is no prompt: add a col"),
        ({"prompt": "a", "chosen": "a b", "rejected": "a c"}, "the text of its column prompt, whi"),
        ({"chosen": [BOT], "rejected": [OTHER]}, "different turns, so there is no prompt"),
        ({"chosen": [USER, BOT], "rejected": [SYSTEM, USER, BOT]}, "different turns"),
        (
            {"prompt": "Who?", "chosen": TURNS, "rejected": [USER, OTHER]},
            "whole conversations.*pro",
        ),
    ],
)
def test_a_pair_without_a_prompt_is_refused(record: dict[str, Any], words: str) -> None:
    with pytest.raises(ChatError, match=words):
        pair(record, recognize("file", [record], pairs=True))


@pytest.mark.parametrize("more", [{"system": "S"}, {"tools": [{}]}, {"input": "1 + 1"}])
def test_texts_leave_no_column_out(more: dict[str, Any]) -> None:
    record = {"instruction": "Add", "output": "2", "chosen": "3", "rejected": "4", **more}
    (column,) = more
    with pytest.raises(Undecided, match=f"column {column}, but .*set sft.shape = .instruction"):
        told(record, wanted="completion")
    with pytest.raises(Undecided, match=f"column {column}, but .* lists of turns"):
        pair(record, recognize("file", [record], pairs=True))


def test_a_completion_may_repeat_its_prompt() -> None:
    record = {"prompt": "Hi", "completion": [SYSTEM, *TURNS]}
    assert told(record).turns == (SYSTEM, *TURNS)
    assert told(record).num_given == 2


def test_turns_say_how_much_they_count() -> None:
    flagged = [USER, {**BOT, "weight": 0}, USER, {**BOT, "train": True}, USER, BOT]
    found = told({"messages": flagged})
    assert weights_of(found, "assistant") == [0, 0, 0, 1, 0, 1]
    assert weights_of(found, "last") == [0, 0, 0, 1, 0, 1]
    assert "weight" not in found.turns[1]
    assert weights_of(told({"messages": [USER, {**BOT, "weight": 0.5}]}), "assistant") == [0, 0.5]
    assert weights_of(told({"messages": [{**USER, "train": False}, BOT]}), "assistant") == [0, 1]
    given = {"prompt": [USER, {**BOT, "weight": 1}, USER], "completion": [BOT]}
    assert weights_of(told(given), "assistant") == [0, 0, 0, 1], "a prompt is never learned"
    with pytest.raises(ChatError, match="turn 1, by 'user', is marked to be learned"):
        weights_of(told({"messages": [{**USER, "train": True}, BOT]}), "assistant")


def test_where_every_token_counts_a_turn_cannot_say_otherwise() -> None:
    assert weights_of(told({"messages": [USER, {**BOT, "train": True}]}), "all") is None
    with pytest.raises(Undecided, match="turn 2 has its own weight or train flag"):
        weights_of(told({"messages": [USER, {**BOT, "train": False}]}), "all")


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"messages": TURNS, "system": 3}, "its column system is int"),
        ({"messages": TURNS, "tools": "none"}, "its column tools is not a list of tools: 'none'"),
        ({"messages": TURNS, "tools": 3}, "its column tools is not a list of tools: 3"),
        ({"instruction": "Add", "input": ["1"], "output": "2"}, "its column input is list"),
    ],
)
def test_nothing_is_left_out_without_a_word(record: dict[str, Any], words: str) -> None:
    with pytest.raises(ChatError, match=words):
        told(record)


@pytest.mark.parametrize("tools", [None, [], "", "[]", "null"])
def test_there_may_be_no_tools(tools: Any) -> None:
    assert told({"messages": TURNS, "tools": tools}).tools is None


def test_an_answer_may_be_a_list_in_json() -> None:
    for answer in ('[{"a": 1}]', "[1, 2]", "[]", "[{"):
        found = told({"prompt": "List", "completion": answer})
        assert found.texts == ("List", answer)
    assert told({"prompt": "Hi", "completion": json.dumps([BOT])}).turns == (USER, BOT)


def test_a_template_gets_turns_as_they_are() -> None:
    """Parts, nulls and roles; only ShareGPT has other names for them."""
    parts = [{"type": "text", "text": "He"}, {"type": "text", "text": "llo"}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    others = [
        {"role": "observation", "content": "4", "name": None},
        {"role": "Assistant", "content": parts},
        {"role": "model", "content": ["He", "llo"]},
        {"role": "function", "content": "x"},
    ]
    turns = [USER, call, *others]
    assert list(told({"messages": turns}).turns) == turns
    assert told({"prompt": [USER], "completion": turns[1:]}).turns[1:] == tuple(turns[1:])
    assert joined(turns)[3:5] == [
        {"role": "Assistant", "content": "Hello"},
        {"role": "model", "content": "Hello"},
    ]
    assert joined(turns)[:3] == turns[:3]
    renamed = told({"messages": turns}, wanted="sharegpt")
    assert [turn["role"] for turn in renamed.turns[2:]] == [
        "tool",
        "assistant",
        "assistant",
        "tool",
    ]
    columns = Columns("messages", "messages")
    assert renamed_roles([{"messages": turns}], columns) == {}
    columns = recognize("file", [{"messages": SHAREGPT}])
    assert renamed_roles([{"messages": SHAREGPT}], columns) == {"human": "user", "gpt": "assistant"}


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        ([], "its column messages contains no turns"),
        (None, "its column messages contains no turns"),
        ("[{", "its column messages contains no turns"),
        (["Hi"], "turn 1 is str; expected an object with a role"),
        ([{"content": "Hi"}], "turn 1 has no valid role"),
        ([{"role": 3, "content": "Hi"}], "turn 1 has no valid role"),
        ([{"role": "user|><|eot", "content": "Hi"}], "turn 1 has no valid role; expected a word"),
        ([USER, {"role": "assistant"}], "turn 2, by 'assistant', has no content"),
        ([USER, {**BOT, "content": None}], "turn 2, by 'assistant', has no content"),
        ([{**USER, "content": 3}], "turn 1 has content of type int; expected text"),
        ([{**USER, "content": [{"type": "image"}]}], "turn 1 has content of type image"),
        ([USER, {**BOT, "weight": 1, "train": True}], "turn 2 has both weight and train"),
        ([USER, {**BOT, "weight": -1}], "turn 2 has weight -1; expected"),
        ([USER, {**BOT, "weight": 1e300}], "turn 2 has weight 1e\\+300; .* from 0 to 1,000,000"),
        ([USER, {**BOT, "weight": 10**400}], "turn 2 has weight 1000"),
        ([USER, {**BOT, "weight": "much"}], "turn 2 has weight 'much'; expected"),
    ],
)
def test_a_turn_that_cannot_be_used_is_named(turns: Any, words: str) -> None:
    with pytest.raises(ChatError, match=words):
        conversation({"messages": turns}, Columns("messages", "messages"))


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"text": " \n"}, "its column text is empty"),
        ({"text": None}, "its column text is NoneType; expected text"),
        ({"prompt": "a", "completion": ""}, "its column completion is empty"),
        ({"prompt": TURNS, "completion": TURNS}, "its column completion adds no turn"),
        ({"instruction": "a", "output": 3}, "its column output is int"),
    ],
)
def test_a_column_that_cannot_be_used_is_named(record: dict[str, Any], words: str) -> None:
    columns = recognize("file", [dict.fromkeys(record, "a")])
    with pytest.raises(ChatError, match=words):
        conversation(record, columns)
