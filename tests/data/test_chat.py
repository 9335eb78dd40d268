"""Chat templates: the tokens are those of transformers, content is never a special token, and what
an assistant wrote is known."""

from __future__ import annotations

import pickle
import resource
import subprocess
import sys
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from overland.data import chat_renderer
from overland.data.chat import ChatError, ChatTemplate, Undecided
from overland.data.learned_tokens import encode
from overland.data.sft import BUILT_IN
from overland.data.tokenizer import Tokenizer
from overland.errors import DataError
from tests.data.chats import (
    LLAMA3,
    MARKED,
    PLAIN_CHATML,
    PUBLISHED,
    QWEN3,
    ROLES,
    TALK,
    THOUGHT,
    write_tokenizer,
)
from tests.data.tokenizer_folders import write_ranks, write_sentencepiece
from tests.limited import limited

KINDS = ("byte level", "metaspace")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("chat")
    return {kind: write_tokenizer(root / kind, kind) for kind in KINDS}


@pytest.fixture(scope="module")
def tokenizer(folders: dict[str, Path]) -> Tokenizer:
    return Tokenizer(folders["byte level"], add_bos=False, add_eos=False)


def template_of(source: str, tokenizer: Tokenizer, name: str = "llama3", **more: Any) -> Any:
    return ChatTemplate(source, tokenizer.specials, ROLES[name], **more)


def said(turns: list[dict[str, Any]]) -> list[float]:
    return [float(turn["role"] == "assistant") for turn in turns]


def learned(tokenizer: Tokenizer, written: Any) -> str:
    ids, weights = encode(tokenizer, written)
    return "".join(tokenizer.pieces(ids[weights > 0].tolist()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_ids_and_masks_are_those_of_transformers(
    folders: dict[str, Path], kind: str, name: str
) -> None:
    tokenizer = Tokenizer(folders[kind], add_bos=False, add_eos=False)
    file = str(folders[kind] / "tokenizer.json")
    peer = PreTrainedTokenizerFast(tokenizer_file=file, **ROLES[name])
    talk = THOUGHT if name == "qwen3" else TALK
    published = template_of(PUBLISHED[name], tokenizer, name)
    marked = template_of(MARKED[name], tokenizer, name)
    expected = peer.apply_chat_template(
        talk,
        chat_template=MARKED[name],
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    plain = peer.apply_chat_template(talk, chat_template=PUBLISHED[name], return_dict=True)
    assert plain["input_ids"] == expected["input_ids"]
    for template in (published, marked):
        ids, weights = encode(tokenizer, template.write(talk, said(talk)))
        assert ids.tolist() == expected["input_ids"]
        assert (weights > 0).astype(int).tolist() == expected["assistant_masks"]
        asked = template.write_prompt(talk[:1])
        prompt = peer.apply_chat_template(
            talk[:1], chat_template=template.source, add_generation_prompt=True, return_dict=True
        )
        assert tokenizer.encode_pieces(asked)[0].tolist() == prompt["input_ids"]


@pytest.mark.parametrize("kind", ["sentencepiece", "tiktoken"])
def test_other_kinds_of_tokenizers_find_the_same_characters(tmp_path: Path, kind: str) -> None:
    if kind == "tiktoken":
        write_ranks(tmp_path)
        tokenizer = Tokenizer(tmp_path, add_eos=False)
        template = ChatTemplate(LLAMA3, tokenizer.specials, tokenizer.named)
    else:
        write_sentencepiece(tmp_path, "bpe")
        tokenizer = Tokenizer(tmp_path, add_eos=False)
        template = ChatTemplate(PUBLISHED["mistral"], tokenizer.specials, tokenizer.named)
    written = template.write(TALK, said(TALK))
    ids, weights = encode(tokenizer, written)
    assert ids[0] == tokenizer.bos_id
    for span, turn in zip(written.spans, TALK[1::2], strict=True):
        assert span.stop - span.start == len(turn["content"]) + 1  # and the end of the turn
    ends = np.flatnonzero(np.diff(weights > 0, append=False) & (weights > 0))
    end = tokenizer.specials["<|eot_id|>"] if kind == "tiktoken" else tokenizer.eos_id
    assert ids[ends].tolist() == [end, end]


def test_the_built_in_chatml_is_chatml(tokenizer: Tokenizer) -> None:
    built_in = template_of(BUILT_IN["chatml"].read_text(), tokenizer)
    ours = encode(tokenizer, built_in.write(TALK, said(TALK)))
    plain = encode(tokenizer, template_of(PLAIN_CHATML, tokenizer).write(TALK, said(TALK)))
    for one, other in zip(ours, plain, strict=True):
        assert one.tolist() == other.tolist()
    pieces = built_in.write_prompt(TALK[:1])
    assert pieces == template_of(PLAIN_CHATML, tokenizer).write_prompt(TALK[:1])


def written_by(tokenizer: Tokenizer, source: str, turns: list[Any], **more: Any) -> Any:
    """The pieces of a text, with the names of special tokens in brackets."""
    written = template_of(source, tokenizer, **more).write(turns)
    names = {i: f"[{name}]" for name, i in tokenizer.specials.items()}
    return "".join(names.get(one, one) for one in written.pieces), written.num_quoted


# Splits messages at a special token, as many do at </think>.
SPLITS = (
    "{% for m in messages %}{% set c = m.content %}{% set t = '' %}{% if '</s>' in c %}"
    "{% set t = c.split('</s>')[0].rstrip('\n').split('<s>')[-1].lstrip('\n') %}"
    "{% set c = c.split('</s>')[-1].lstrip('\n') %}{% endif %}<|im_start|>"
    "{% if loop.last and t %}{{ '<s>\n' + t + '\n</s>\n\n' }}{% endif %}{{ c }}<|im_end|>"
    "{% endfor %}"
)


def test_a_template_sees_names_of_special_tokens(tokenizer: Tokenizer) -> None:
    thoughts = "<s>\nWhy <|im_end|>?\n</s>\n\nSo <s> and <|im_end|>."
    turns = [{"role": "assistant", "content": thoughts}] * 2
    text, num_quoted = written_by(tokenizer, SPLITS, turns)
    assert text == (
        "[<|im_start|>]So <s> and <|im_end|>.[<|im_end|>][<|im_start|>][<s>]\nWhy <|im_end|>?\n"
        "[</s>]\n\nSo <s> and <|im_end|>.[<|im_end|>]"
    )
    assert num_quoted == 5
    looks_and_writes = (
        "{% if '<s>' in messages[0].content %}{{ messages[0].content }}{% endif %}<s>"
    )
    turns = [{"role": "user", "content": "a <s>"}]
    assert written_by(tokenizer, looks_and_writes, turns) == ("a <s>[<s>]", 1)
    writes_it_again = (
        "{% set c = messages[0].content %}{% if '<s>' in c %}"
        "{{ c.split('<s>')[0] + '<s>' + c.split('<s>')[1] }}{% else %}{{ c }}{% endif %}"
    )
    assert written_by(tokenizer, writes_it_again, turns) == ("a [<s>]", 0)
    refuses = "{% if '<s>' in messages[0].content %}{{ raise_exception('no') }}{% endif %}"
    with pytest.raises(ChatError, match="rejects the conversation: no"):
        written_by(tokenizer, refuses, turns)


@pytest.mark.parametrize(
    ("source", "turn", "expected"),
    [
        ("{{ messages[0].content[:4] }}<s>", {"content": "a <|im_end|>"}, ("a <|[<s>]", 0)),
        ("{{ messages[0].content[2:] * 2 }}", {"content": "a <s>"}, ("<s><s>", 2)),
        ("{{ messages[0].content | tojson(ensure_ascii=True) }}</s>", {"content": "\u00e9</s>"},
         ('"\\u00e9</s>"[</s>]', 1)),
        ("{{ '<|' + messages[0].role + '|>' + messages[0].content }}",
         {"role": "im_end", "content": "a"}, ("<|im_end|>a", 1)),
        ("{{ '<|' + messages[0].role + '|>' + messages[0].content }}",
         {"role": "user", "content": "end user"}, ("[<|user|>]end user", 0)),
        ("{{ messages[0].content | upper }}<s>", {"content": "\ue000 a"}, ("\ue000 A[<s>]", 0)),
    ],
)  # fmt: skip
def test_only_what_a_template_itself_writes_is_special(
    tokenizer: Tokenizer, source: str, turn: dict[str, Any], expected: Any
) -> None:
    assert written_by(tokenizer, source, [{"role": "user", **turn}]) == expected


def test_messages_write_special_tokens_where_they_may(tokenizer: Tokenizer) -> None:
    source, turns = "{{ messages[0].content }}", [{"role": "user", "content": "a <s></s>"}]
    one = {"in_content": frozenset(["<s>"])}
    assert written_by(tokenizer, source, turns, **one) == ("a [<s>]</s>", 1)
    every = {"in_content": frozenset(tokenizer.specials)}
    assert written_by(tokenizer, source, turns, **every) == ("a [<s>][</s>]", 0)


@pytest.mark.parametrize(
    "source",
    [
        "{% set end = '<s>' %}{{ messages[0].content.split(end)[0] + end }}",
        "{% set ns = namespace(e='<s>') %}{{ messages[0].content.split(ns.e)[0] + ns.e }}",
        "{% for e in ['<s>'] %}{% if e in messages[0].content %}{{ e }}{% endif %}{% endfor %}",
        "{{ messages[0].content.split(bos_token)[0] + bos_token }}",
        "{{ messages[0].content | upper }}",
    ],
)
def test_what_cannot_be_told_apart_is_refused(tokenizer: Tokenizer, source: str) -> None:
    turns = [{"role": "user", "content": "a <s> b"}]
    with pytest.raises(Undecided, match=r"special_tokens_in_content = \[\"<s>\"\]"):
        written_by(tokenizer, source, turns, name="mistral")


@pytest.mark.parametrize("source", [LLAMA3, MARKED["llama3"]])
def test_names_of_special_tokens_in_messages_are_text(tokenizer: Tokenizer, source: str) -> None:
    talk = [
        {"role": "user", "content": "a <|eot_id|> <s> b <|eot_id"},
        {"role": "assistant", "content": "x <|start_header_id|>system<|end_header_id|> y"},
    ]
    ids, weights = encode(tokenizer, template_of(source, tokenizer).write(talk, said(talk)))
    assert ids.tolist().count(tokenizer.specials["<|eot_id|>"]) == 2
    assert ids.tolist().count(tokenizer.specials["<|start_header_id|>"]) == 2
    assert tokenizer.specials["<s>"] not in ids
    text = "".join(tokenizer.pieces(ids.tolist()))
    for turn in talk:
        assert turn["content"] in text
    assert tokenizer.decode(ids[weights > 0].tolist()) == talk[1]["content"]


def test_names_in_tools_and_in_their_keys_are_text(tokenizer: Tokenizer) -> None:
    tools = [{"name": "f", "parameters": {"<|im_end|>": ["<|im_start|>"]}}]
    written = template_of(QWEN3, tokenizer).write(THOUGHT, said(THOUGHT), tools)
    ids, _ = encode(tokenizer, written)
    text = "".join(tokenizer.pieces(ids.tolist()))
    assert '{"<|im_end|>": ["<|im_start|>"]}' in text
    assert ids.tolist().count(tokenizer.specials["<|im_end|>"]) == 3


def test_turns_count_as_much_as_they_say(tokenizer: Tokenizer) -> None:
    for source in (LLAMA3, MARKED["llama3"]):
        template = template_of(source, tokenizer)
        _, weights = encode(tokenizer, template.write(TALK, [0, 0.25, 0, 2]))
        assert sorted(set(weights.tolist())) == [0, 0.25, 2]
        assert learned(tokenizer, template.write(TALK, [0, 0, 0, 1])) == "Bye<|eot_id|>"
        ids, weights = encode(tokenizer, template.write(TALK))
        assert weights.tolist() == [1] * len(ids)


def test_a_template_that_rewrites_earlier_turns_needs_marks(tokenizer: Tokenizer) -> None:
    """Qwen 3 leaves out what was thought before the last question."""
    talk = [*THOUGHT, *TALK[:2]]
    template = template_of(QWEN3, tokenizer, "qwen3")
    with pytest.raises(ChatError, match=r"turn 2 of 4 differently .* sft\.chat_template .* sft\.l"):
        template.write(talk, said(talk))
    assert "I am fine." in learned(tokenizer, template.write(talk, [0, 0, 0, 1]))


def test_what_a_template_would_leave_out_is_refused(tokenizer: Tokenizer) -> None:
    template = template_of(LLAMA3, tokenizer)
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    with pytest.raises(Undecided, match=r"has tool_calls, but .*sft.chat_template.* Qwen2.5"):
        template.write([TALK[0], call], [0, 1])
    with pytest.raises(Undecided, match=r"has tools, but .* does not write .* Qwen2.5"):
        template.write(TALK, said(TALK), [{"name": "f"}])
    with pytest.raises(ChatError, match="turn 1 of 3 differently than its generation prompt"):
        template.write(TALK[1:], said(TALK[1:]))


EOS_AT_THE_END = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
THREE_MARKS = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|end|>\n' }}{% endgeneration %}{% else %}"
    "{{ m.content + '<|end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}"
    "{% generation %}{{ eos_token }}{% endgeneration %}{% endif %}"
)


def test_a_template_may_end_all_conversations_by_eos(tokenizer: Tokenizer) -> None:
    by_prefixes = template_of(EOS_AT_THE_END, tokenizer, "mistral").write(TALK, said(TALK))
    by_marks = template_of(THREE_MARKS, tokenizer, "mistral").write(TALK, said(TALK))
    assert len(by_marks.spans) == 3
    for one, other in zip(encode(tokenizer, by_prefixes), encode(tokenizer, by_marks), strict=True):
        assert one.tolist() == other.tolist()
    with pytest.raises(ChatError, match=r"marks 3 parts .* 2 assistant turns"):
        template_of(THREE_MARKS, tokenizer, "mistral").write(TALK, [0, 1, 0, 0])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('a' * 9999999) }}", "rejects the conversation: a{500} …$"),
        ("{{ raise_exception('no system turns') }}", "rejects the conversation: no system turns"),
        ("{{ messages[0].nothing.at.all }}", "rejects the conversation: .*nothing"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "not finish: it recurses without end"),
        ("{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}", "not finish: it writes"),
        ("{{ messages.__class__.__mro__ }}", "rejects the conversation: access to attribute"),
        ("{{ ''.__class__.__mro__ }}", "rejects the conversation: access to attribute"),
        ("{% set _ = messages.append(1) %}", "rejects the conversation: access to attribute"),
        ("{{ strftime_now('%Y') }}", "set sft.date"),
    ],
)  # fmt: skip
def test_a_template_that_goes_wrong_is_one_sentence(
    tokenizer: Tokenizer, source: str, words: str
) -> None:
    with pytest.raises(ChatError, match=words):
        template_of(source, tokenizer).write(TALK, said(TALK))


GROWING = (
    "{{% set ns = namespace(x='aaaa') %}}{{% for i in range(60) %}}{}{{% endfor %}}{{{{ ns.x }}}}"
)
HUGE = [
    GROWING.format("{% set ns.x = ns.x + ns.x %}"),
    GROWING.format("{% set ns.x = [ns.x, ns.x] | join %}"),
    GROWING.format("{% set ns.x = ns.x.replace('a', 'aaaa') %}"),
    GROWING.format("{% set ns.x = [ns.x, ns.x] %}").replace("ns.x }}", "ns.x | tojson }}"),
    "{{ 'a' * 999999999999 }}",
    "{{ '{:>{w}}'.format(1, w=9999999999) }}",
    "{{ '%9999999999d' % 3 }}",
    "{{ messages | tojson(indent=9999999999) }}",
    "{{ [1] | slice(999999999) | list }}",
]
LONG = [
    "{% set x = range(9999) | list %}{% for i in x %}{% for j in x %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{{ 9 ** 999999999 }}",
    "{{ ([[1]] * 199999) | sum(start=[]) }}",
    "{% set ns = namespace(x='a', y='a') %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
]


@pytest.mark.parametrize("source", [*HUGE, *LONG])
def test_a_template_has_limits_of_time_and_memory(
    tokenizer: Tokenizer, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_renderer, "SECONDS", 1)
    chat_renderer.renderer.close()
    try:
        with pytest.raises(Undecided, match=r"template does not finish: it .*sft.chat_template"):
            template_of(source, tokenizer).write(TALK, said(TALK))
    finally:
        chat_renderer.renderer.close()
    assert template_of(LLAMA3, tokenizer).write(TALK, said(TALK)).spans


def test_a_template_is_run_again_after_its_process_was_killed(tokenizer: Tokenizer) -> None:
    template = template_of(LLAMA3, tokenizer)
    before = template.write(TALK, said(TALK))
    process = chat_renderer.renderer._process
    assert process is not None
    process.kill()
    process.wait()
    assert template.write(TALK, said(TALK)) == before
    ended = limited(partial(template.write, TALK, said(TALK)))  # a fork has a process of its own
    assert ended == "read"
    assert template.write(TALK, said(TALK)) == before


def test_an_answer_is_never_that_to_another_request(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = template_of(LLAMA3, tokenizer)
    before = template.write(TALK, said(TALK))

    class Interrupted:
        pack = chat_renderer.SIZE.pack

        def __getattr__(self, name: str) -> Any:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(chat_renderer, "SIZE", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            template.write(TALK[:1], [0])
    assert template.write(TALK, said(TALK)) == before
    chat_renderer.renderer.close()
    with monkeypatch.context() as patch:
        patch.setattr(chat_renderer, "SANDBOX", tmp_path / "ends.py")
        for written in (b"abc", chat_renderer.SIZE.pack(9) + b'["tex'):
            (tmp_path / "ends.py").write_text(f"import os; os.write(1, {written!r})")
            with pytest.raises(Undecided, match="its process was killed"):
                template.write(TALK, said(TALK))
    assert template.write(TALK, said(TALK)) == before


def test_a_template_runs_where_the_machine_has_limits_of_its_own() -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (5, 5))

    request = pickle.dumps(("{{ messages }}", {}, None, ["a"], [(1, False)]))
    done = subprocess.run(
        [sys.executable, chat_renderer.SANDBOX, "10", "1000"],
        input=chat_renderer.SIZE.pack(len(request)) + request,
        capture_output=True,
        check=True,
        preexec_fn=limit,
    )
    assert done.stdout.endswith(b'["texts", ["[\'a\']"]]')


def test_a_template_writes_the_same_each_time(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="No filter named 'random'"):
        template_of("{{ [1, 2] | random }}", tokenizer).check()


def test_what_templates_of_others_do_to_texts_still_works(tokenizer: Tokenizer) -> None:
    source = (
        "{{ 'a' ~ 1 ~ 'b' }}{{ '%s-%d' % ('x', 3) }}{{ '{:03d}'.format(7) }}"
        "{{ ['p', 'q'] | join(', ') }}{{ 'a\\nb' | indent(2) }}{{ 'aXb'.replace('X', 'Y') }}"
    )
    (text,) = template_of(source, tokenizer).write_prompt(TALK)
    assert text == "a1bx-3007p, qa\n  baYb"


def test_by_prefixes_only_so_many_turns_can_be_told(tokenizer: Tokenizer) -> None:
    turns = TALK[:2] * 2000
    with pytest.raises(Undecided, match="it has 4,000 turns, and to find the assistant"):
        template_of(LLAMA3, tokenizer).write(turns, said(turns))
    template_of(LLAMA3, tokenizer).write(turns, [0] * (len(turns) - 1) + [1])
    template_of(MARKED["llama3"], tokenizer).write(turns, said(turns))


def test_what_is_no_template_is_said_with_its_line(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="cannot be parsed, line 2: "):
        template_of("a\n{% for %}", tokenizer).check()
    with pytest.raises(DataError, match="cannot be parsed"):
        template_of("{% generation %}", tokenizer).check()
    with pytest.raises(DataError, match="has 1,000,001 characters; expected 1,000,000 at most"):
        template_of("a" * 1_000_001, tokenizer).check()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a\ufdd0b", r"U\+FDD0, which is not a character"),
        ("\ufdd3\U000f0000", r"U\+FDD3"),
        ("a\ud83d", "half of a surrogate pair"),
    ],
)
def test_what_is_no_text_is_refused(tokenizer: Tokenizer, content: str, words: str) -> None:
    with pytest.raises(ChatError, match=words):
        template_of(LLAMA3, tokenizer).write([{"role": "user", "content": content}], [0])


def test_nesting_has_a_limit(tokenizer: Tokenizer) -> None:
    deep: Any = "a"
    for _ in range(40):
        deep = [deep]
    with pytest.raises(ChatError, match="nested more than 32 levels deep"):
        template_of(LLAMA3, tokenizer).write([{"role": "user", "content": "a", "x": deep}], [0])


def test_a_template_is_told_the_day_and_its_options(tokenizer: Tokenizer) -> None:
    source = "{{ strftime_now('%d %b %Y') }} {{ mood }}"
    template = template_of(source, tokenizer, date=date(2026, 7, 1), options={"mood": "good"})
    assert template.write(TALK).pieces == ("01 Jul 2026 good",)


def test_it_can_be_sent_to_another_process(tokenizer: Tokenizer) -> None:
    template = template_of(LLAMA3, tokenizer)
    before = template.write(TALK, said(TALK))
    assert pickle.loads(pickle.dumps(template)).write(TALK, said(TALK)) == before
