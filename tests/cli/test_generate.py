"""The verb: prompts from everywhere, conversations, a terminal, and odd input."""

from __future__ import annotations

import json
import os
import pty
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from overland.apps.evaluation.prompts import (
    Prompt,
    encode_prompt,
    has_unread_input,
    piped_prompts,
    read_prompts,
)
from overland.cli.generate import stripped
from overland.cli.main import app
from overland.data.tokenizer import Tokenizer
from tests.cli.processes import environment
from tests.cli.warm import server
from tests.evaluation.texts import write_chat_model, write_text_model
from tests.waiting import LIMIT_SECONDS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("generate") / "model")


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("generate") / "chat")


@pytest.fixture(scope="module")
def endless(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, without a token that ends texts."""
    folder = tmp_path_factory.mktemp("generate") / "endless"
    shutil.copytree(model, folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": 1000000}')
    return folder


def generate(*words: object, code: int = 0, given: str | bytes = "") -> Any:
    result = CliRunner().invoke(app, ["generate", *map(str, words)], input=given)
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result


def records(*words: object, given: str | bytes = "") -> list[dict[str, Any]]:
    lines = generate(*words, "--json", given=given).stdout.splitlines()
    return [json.loads(line) for line in lines]


def test_prompts_from_arguments_a_file_and_standard_input_are_one(
    model: Path, tmp_path: Path
) -> None:
    how = [model, "--num-tokens", 12, "--seed", 3]
    wanted = records(*how, "def a", "import os", "x = ")
    assert [one["prompt"] for one in wanted] == ["def a", "import os", "x = "]
    assert all(one["tokens"] == 12 or one["reason"] == "end of text" for one in wanted)
    lines = tmp_path / "prompts.txt"
    lines.write_bytes(b"\xef\xbb\xbfdef a\r\n\r\n   \nimport os\nx = ")
    assert records(*how, "--file", lines) == wanted
    objects = tmp_path / "prompts.jsonl"
    objects.write_text('{"prompt": "def a"}\n\n"import os"\n{"text": "x = ", "id": 3}\n')
    assert records(*how, "--file", objects) == wanted
    assert records(*how, "--file", "-", given=lines.read_bytes()) == wanted
    assert records(*how, "--file", "-", given=objects.read_bytes()) == wanted
    assert records(*how, given=objects.read_bytes()) == wanted
    assert records(*how, given="def a\n") == wanted[:1]
    assert records(*how, given="def a\nb")[0]["prompt"] == "def a\nb"
    assert records(*how, "def a", "import os", "x = ", given="def b") == wanted
    assert records(*how, "--prompt", "def a", "--prompt", "import os", "--prompt", "x = ") == wanted
    assert records(*how, "def a", "import os", "x = ", "--batch-size", 1) == wanted


def test_a_text_is_shown_with_what_follows_it(model: Path) -> None:
    (one, two) = records(model, "def a", "import", "--num-tokens", 9)
    shown = generate(model, "def a", "import", "--num-tokens", 9)
    assert shown.stdout == f"def a{one['text']}\n\nimport{two['text']}\n"
    assert shown.stderr == f"{model}: float32 (--dtype) on cpu (--device)\n"


def test_without_a_prompt_the_model_begins_a_document(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "standard input is empty" in generate(model, code=2).stderr  # of a command that failed
    assert records(model, "--num-tokens", 5, given="  \n")[0]["prompt"] == "  "
    with Path(os.devnull).open() as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        said: list[str] = []
        assert piped_prompts(said.append) == [Prompt("")]
        assert said == ["no prompt: the model begins a new document"]
        assert not has_unread_input()


def test_a_text_that_is_piped_in_next_to_a_prompt_is_noticed_and_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reader, writer = os.pipe()
    (tmp_path / "text").write_text("a text")
    with os.fdopen(writer, "w") as into, os.fdopen(reader) as pipe:
        monkeypatch.setattr("sys.stdin", pipe)
        assert not has_unread_input()
        print("a text", file=into, flush=True)
        assert has_unread_input()
        assert pipe.readline() == "a text\n"
    with (tmp_path / "text").open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert has_unread_input()
        assert piped_prompts(lambda text: None) == [Prompt("a text")]
        assert not has_unread_input()


def test_settings_reach_the_engine(model: Path) -> None:
    (greedy,) = records(model, "def a", "--num-tokens", 20, "--temperature", 0)
    same = [("--top-k", 1), ("--top-p", 1e-9), ("--min-p", 1), ("--temperature", 1e-6)]
    for words in same:
        assert records(model, "def a", "--num-tokens", 20, *words) == [greedy], words
    for words in (("--temperature", 0, "--repetition-penalty", 3), ("--temperature", 2)):
        assert records(model, "def a", "--num-tokens", 20, *words) != [greedy], words
    stop = greedy["text"][4:7]
    (cut,) = records(
        model, "def a", "--num-tokens", 20, "--temperature", 0, "--stop", "no", "--stop", stop
    )
    assert cut["text"] == greedy["text"][: greedy["text"].index(stop)]
    assert cut["reason"] == "stop string"


def test_texts_that_fill_the_context_are_counted(endless: Path) -> None:
    result = generate(endless, "def a", "--num-tokens", 600)
    assert "1 of 1 texts end where the model's context of 256 tokens is full" in result.stderr


def test_many_prompts_are_answered_in_their_order(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "many.txt"
    file.write_text("".join(f"{'x' * (i % 7 + 1)} = {i}\n" for i in range(150)))
    found = records(model, "--file", file, "--num-tokens", 2, "--batch-size", 2)  # two windows
    assert [one["prompt"].split()[-1] for one in found] == [str(i) for i in range(150)]
    alone = records(model, "--file", file, "--num-tokens", 2, "--batch-size", 150)
    assert found == alone


def test_a_conversation_keeps_what_was_said(chat: Path, tmp_path: Path) -> None:
    how = [chat, "--temperature", 0, "--num-tokens", 8]
    first, second = records(*how, "--chat", "--system", "Be short.", given="Hi there\n\nAnd you?\n")
    turns = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hi there"},
        {"role": "assistant", "content": first["text"]},
        {"role": "user", "content": "And you?"},
    ]
    file = tmp_path / "turns.jsonl"
    file.write_text("".join(json.dumps({"messages": turns[:n]}) + "\n" for n in (2, 4)))
    once = records(*how, "--file", file)
    assert [one["text"].strip() for one in once] == [first["text"], second["text"]]
    (asked,) = records(*how, "--chat", "Hi there", "--system", "Be short.")
    assert asked["text"].strip() == first["text"]
    again = records(*how, "--chat", given="Hi there\n/reset\nHi there\n")
    assert again[0] == again[1]
    assert (again[0]["reason"], again[0]["tokens"]) == ("number of tokens", 8)
    assert again[0]["text"] != first["text"]  # nobody asked it to be short


def test_a_conversation_that_no_longer_fits_loses_its_beginning(chat: Path) -> None:
    lines = "".join(f"Say {i} {'word ' * 12}\n" for i in range(9))
    result = generate(chat, "--chat", "--num-tokens", 4, given=lines)
    assert "the first 2 turns have been dropped" in result.stderr
    assert generate(chat, "--chat", code=2, given="long " * 400).stderr.count("shorten it") == 1


def test_what_a_user_says_is_no_special_token(chat: Path) -> None:
    plain, quoted = records(chat, "--chat", "Hi", "Hi<|im_end|>", "--temperature", 0)
    assert plain["text"] != quoted["text"]


def test_a_conversation_in_a_file_has_its_tools_and_calls(chat: Path, tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    turns = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, call,
             {"role": "tool", "content": "4"}]  # fmt: skip
    file = tmp_path / "turns.jsonl"
    file.write_text(json.dumps({"messages": turns, "tools": [{"name": "f"}], "system": "Be short"}))
    (found,) = read_prompts(file)
    assert [turn["role"] for turn in found.messages] == ["system", "user", "assistant", "tool"]
    assert (found.text, found.tools) == ("4", ({"name": "f"},))
    said = generate(chat, "--file", file, code=2).stderr  # its template would leave them out
    assert "it has tools, but the tokenizer's chat template does not write them" in said
    file.write_text(json.dumps({"messages": turns[:1]}))
    asked = records(chat, "--file", file, "--temperature", 0)
    assert [one["text"] for one in asked] == [
        one["text"] for one in records(chat, "--chat", "Hi", "--temperature", 0)
    ]


def test_objects_are_no_turns_of_a_conversation(chat: Path) -> None:
    given = '{"prompt": "Hi"}\n{"prompt": "you"}\n'
    assert "add --file -" in generate(chat, "--chat", given=given, code=2).stderr
    assert len(records(chat, "--chat", "--file", "-", given=given)) == 2
    assert "is not UTF-8 text" in generate(chat, "--chat", given=b"a\xff\n", code=2).stderr


def test_names_of_special_tokens_are_those_of_transformers(chat: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_file=str(chat / "tokenizer.json"))
    ours = Tokenizer(chat / "tokenizer.json")
    text = "<|im_start|>user\n Hi <|im_end|> there"
    name = theirs.convert_tokens_to_ids("<|im_end|>")
    assert name in ours.specials.values()
    assert encode_prompt(ours, text) == theirs.encode(text, add_special_tokens=False)
    assert name not in encode_prompt(ours, text, parse_specials=False)
    begins = Tokenizer(chat / "tokenizer.json", add_bos=True)
    assert encode_prompt(begins, "a <|im_end|>")[0] == begins.bos_id
    bos = begins.pieces([begins.bos_id or 0])[0]
    assert encode_prompt(begins, f"{bos}a") == encode_prompt(begins, "a")
    how = [chat, "Hi<|im_end|>", "--temperature", 0]
    assert records(*how) != records(*how, "--no-parse-specials")


ODD = [
    (["--chat", "--no-parse-specials", "Hi"], "names of special tokens in a question are text"),
    (["--temperature", "-1"], "--temperature -1.0: expected 0 or more"),
    (["--top-p", "0"], "--top-p 0.0: expected more than 0"),
    (["--stop", ""], "--stop '' would end every text"),
    (["--chat", "Hi"], "has no chat template"),
    (["--file", "nowhere.txt"], "--file nowhere.txt cannot be read: No such file"),
    (["--step", "3"], "--step 3 selects a checkpoint of a run"),
    (["--step", "-1"], "Invalid value for '--step'"),
    (["--device", "warp"], "--device warp cannot be used here"),
    (["x" * 3000], "prompt 1 has"),
    (["--system", "Be short."], "--system needs --chat"),
]


@pytest.mark.parametrize(("words", "message"), ODD, ids=[message[:30] for _, message in ODD])
def test_odd_options_are_one_sentence(words: list[str], message: str, model: Path) -> None:
    said = generate(model, *words, code=2, given="a").stderr
    assert message in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("empty.txt", b"\n  \n", "contains no prompts"),
        ("bytes.txt", b"a\xff\xfe", "is not UTF-8 text"),
        ("cut.jsonl", b'{"prompt": "a"}\n{"prompt": ', "cut.jsonl, line 2: invalid JSON"),
        ("other.jsonl", b'{"id": 3}', "other.jsonl, line 1: expected a string"),
        ("turns.jsonl", b'{"messages": [{"role": 1}]}', "turns.jsonl, line 1: turn 1 has no valid"),
        ("both.jsonl", b'{"text": "a", "messages": [{}]}', "line 1 has text and messages"),
        (
            "done.jsonl",
            b'{"messages": [{"role": "assistant", "content": "a"}]}',
            "its last turn is",
        ),
        ("half.jsonl", b'"a"\n"b\\ud800"', "prompt 2 is not valid UTF-8: character 2 is '\\ud800'"),
    ],
)
def test_odd_files_are_one_sentence(
    name: str, contents: bytes, message: str, model: Path, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(contents)
    assert message in generate(model, "--file", tmp_path / name, code=2).stderr


def test_a_vocabulary_of_more_or_fewer_rows_than_the_tokenizer_has(tmp_path: Path) -> None:
    padded = write_text_model(tmp_path / "padded", vocab_size=400)
    assert len(records(padded, "def a", "--num-tokens", 30, "--temperature", 3)) == 1
    short = write_text_model(tmp_path / "short", vocab_size=64)
    said = generate(short, "zzz", code=2).stderr
    assert "but the model's vocabulary has 64" in said


def test_a_tokenizer_without_an_end_still_ends(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    contents = (folder / "tokenizer.json").read_text().replace("<|endoftext|>", "<|nothing|>")
    (folder / "tokenizer.json").write_text(contents)
    (one,) = records(folder, "def a", "--num-tokens", 7)
    assert (one["tokens"], one["reason"]) == (7, "number of tokens")
    assert "give some text" in generate(folder, "", code=2).stderr


def in_terminal(words: list[str], cwd: Path) -> str:
    """What a terminal shows."""
    ours, theirs = pty.openpty()
    pid = server().start({"words": words, "cwd": str(cwd), "env": environment()}, [theirs, theirs])
    os.close(theirs)
    shown, deadline = b"", time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline:
        try:
            shown += os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
    os.close(ours)
    while server().code_of(pid) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server().code_of(pid) == 0, shown
    return shown.decode("utf-8", "strict")


def test_a_terminal_gets_the_same_text_and_nothing_that_commands_it(endless: Path) -> None:
    words = ["generate", str(endless), "def a", "--num-tokens", "60", "--temperature", "3"]
    shown = in_terminal(words, endless).replace("\r\n", "\n")
    (one,) = records(endless, "def a", "--num-tokens", 60, "--temperature", 3)
    assert any(ord(letter) < 32 for letter in one["text"].replace("\n", ""))
    tail = shown.rpartition("(--device)\n")[2]
    assert "\x1b" not in tail
    printable = "".join(letter for letter in one["text"] if letter.isalnum() and letter.isascii())
    for letter in printable:  # in this order
        assert letter in tail
        tail = tail[tail.index(letter) + 1 :]


def test_blanks_around_an_answer_are_left_out_piece_by_piece() -> None:
    pieces = [" ", "\n", " a", " ", "b ", "\n", "\n"]
    assert "".join(stripped(iter(pieces))) == "a b"
    assert list(stripped(iter(["x", " ", "y"]))) == ["x", "", " y"]
