"""Writes the notes on how a run reads its conversations (shape, template, which turns are learned),
and on anything about them that may be surprising."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from overland.data.chat import ASSISTANT, ChatError, ChatTemplate
from overland.data.conversations import FLAGS, SPEAKERS, Columns, Record, listed, pair, turns_in
from overland.data.sft import ConversationSource, unknown_tokens
from overland.words import any_of

KNOWN = (*FLAGS, "role", "content", "from", "value")  # keys of turns
LEARNED = {
    "assistant": "assistant turns",
    "last": "the last assistant turn",
    "all": "every token",
}


def notes_of(source: ConversationSource, of_files: Sequence[str]) -> list[str]:
    """Returns notes about a source of conversations; `of_files` are those about its files."""
    return [f"{source.shape} (sft.shape){_how(source)}", *of_files, *_surprises(source)]


def _how(source: ConversationSource) -> str:
    """Describes how the conversations are written, and how the text to learn is found."""
    template, learn = source.writer.template, source.writer.sft.learn
    learned = f"{LEARNED[learn]} (sft.learn)"
    if template is None or source.shape.shape in ("text", "completion", "preference"):
        plain = learn == "all" or source.shape.shape == "text"
        answers = "answers" if source.shape.shape == "preference" else "completions"
        written = "" if source.shape.shape == "text" else ", with texts unchanged"
        if template is not None and written:
            written += f" and turns formatted with {template.whose} (sft.chat_template)"
        return f"{written}; trained on {'every token' if plain else f'the {answers}'}"
    found = "" if learn == "all" else ", found by prefixes"
    if found and template.is_marked:
        found = ", found by its {% generation %} marks"
    return f", formatted with {template.whose} (sft.chat_template); trained on {learned}{found}"


def _surprises(source: ConversationSource) -> Iterator[str]:
    template, tokenizer = source.writer.template, source.tokenizer
    shape, first = source.shape, source.first
    turns = list(_all_turns(first, shape))
    if shape.shape == "preference" and (prompts := prompts_are(first, shape)):
        yield f"the prompt of chosen and rejected is {prompts}"
    if renamed := renamed_roles(first, shape):
        words = [f"{theirs} is {ours}" for theirs, ours in renamed.items()]
        yield f"roles are renamed as in ShareGPT: {any_of(words, 'and')}"
    roles = dict.fromkeys(str(turn.get("role")) for turn in turns)
    unlearned = [role for role in roles if SPEAKERS.get(role.lower()) == ASSISTANT != role]
    if source.writer.sft.learn != "all" and shape.shape != "sharegpt" and unlearned:
        yield (
            f"turns by {any_of(unlearned, 'and')} are not learned, since only those by "
            'assistant are (sft.shape = "sharegpt" renames them)'
        )
    if template is None or source.shape.shape == "text":
        return
    if unknown := unknown_tokens(template, tokenizer):
        yield (
            f"{template.whose} writes {any_of(unknown, 'and')}, which this tokenizer does not "
            "have: it becomes ordinary text (set sft.new_tokens to add special tokens)"
        )
    said = (
        str(key) for turn in turns for key, value in turn.items() if value not in (None, "", [])
    )
    further = dict.fromkeys(key for key in said if key not in KNOWN)
    if left_out := [key for key in further if key not in template.source]:
        yield (
            f"turns also have {any_of(left_out, 'and')}, which {template.whose} leaves out "
            "(set sft.chat_template to use another template)"
        )
    if not template.takes_parts and any(isinstance(one.get("content"), list) for one in turns):
        yield f"contents are lists of texts, which are joined: {template.whose} takes only text"
    if source.writer.sft.learn != "all" and (header := header_of(template)):
        yield (
            f"{header!r} before each answer is learned, too: {template.whose} has neither "
            "{% generation %} marks nor a generation prompt that would show where answers begin"
        )
    if template.asks_for_date and template.date is None:
        yield (
            f"{template.whose} may write the date of training; sft.date is not set, so it uses "
            "its fallback for a missing date"
        )


def header_of(template: ChatTemplate) -> str:
    """Returns what a template writes before each answer, if it is learned with the answer."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\u03a9"}]
    try:
        written = template.write(turns, [0, 1])
    except ChatError:  # it requires something else, such as a system turn
        return ""
    names = {i: name for name, i in template.specials.items()}
    units = [unit for piece in written.pieces
             for unit in (piece if isinstance(piece, str) else [names[piece]])]  # fmt: skip
    text = "".join(units[written.spans[0].start : written.spans[0].stop]) if written.spans else ""
    return text.partition("\u03a9")[0].strip() if not template.is_marked else ""


def renamed_roles(records: Sequence[Record], columns: Columns) -> dict[str, str]:
    """Returns the roles of turns that get another name, which those in ShareGPT format do."""
    found: dict[str, str] = {}
    for turn in _all_turns(records, columns):
        speaker = turn.get("role", turn.get("from"))
        if isinstance(speaker, str) and ("role" not in turn or columns.shape == "sharegpt"):
            found[speaker] = SPEAKERS.get(speaker.lower(), speaker)
    return {theirs: ours for theirs, ours in found.items() if theirs != ours}


def _all_turns(records: Sequence[Record], columns: Columns) -> Iterator[Mapping[str, Any]]:
    for column in (columns.turns, columns.prompt, columns.answer, columns.rejected):
        for record in records:
            yield from (turn for turn in listed(record.get(column)) if isinstance(turn, Mapping))


def prompts_are(records: Sequence[Record], columns: Columns) -> str:
    """Describes where the prompts of pairs come from, which the first usable pair shows."""
    for record in records:
        with contextlib.suppress(ChatError):
            told, _ = pair(record, columns)
            if told.texts is None:
                num_answered = len(told.turns) - told.num_given
                is_shared = len(turns_in(record, columns.answer)) > num_answered
            else:
                is_shared = record.get(columns.prompt) is None
            what = "text" if told.texts else "turns"
            return f"the {what} that both begin with" if is_shared else f"column {columns.prompt}"
    return ""
