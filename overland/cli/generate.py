"""`overland generate`: prints continuations of prompts, as they are generated or as JSON lines, and
holds the chat in the terminal; `apps/evaluation/` generates.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overland.apps.evaluation.main import generate as generate_in_process
from overland.apps.evaluation.main import open_model
from overland.apps.progress import progress_bar
from overland.apps.streams import raw
from overland.cli.common import Json, verb, with_options_of
from overland.errors import DataError, OverlandError

if TYPE_CHECKING:
    from overland.apps.evaluation.chat import Asking
    from overland.apps.evaluation.generate import Completion
    from overland.apps.evaluation.prompts import Prompt

RESET = "/reset"
CONTEXT, TOKENS = "context is full", "number of tokens"  # why a text ended
LOADING = ("base", "tokenizer", "config", "dtype", "device", "step")
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


@verb
@with_options_of(
    generate_in_process,
    {"num_tokens": 1, "batch_size": 1},
    without=["model", "prompts", "chat", "parse_specials"],
)
@with_options_of(open_model, {"step": 0}, without=["needs_tokenizer"])
def generate(
    path: Path,
    prompts: Annotated[list[str] | None, typer.Argument(metavar="[PROMPT]...")] = None,
    *,
    prompt: list[str] | None = None,
    file: Path | None = None,
    chat: bool = False,
    parse_specials: bool | None = None,
    as_json: Json = False,
    **options: Any,
) -> None:
    """Continue prompts with a model, or chat with it.

    Args:
        path: A run folder, a checkpoint of any format, a Hugging Face folder or an adapter.
        prompts: Texts to continue.
        prompt: Same as PROMPT; repeatable.
        file: File of prompts, one per line, or JSON lines; - is standard input.
        chat: Treat prompts as questions; without prompts, start a conversation.
        parse_specials: Treat names of special tokens in PROMPT as those tokens (default).
        as_json: Print a JSON object per line.
    """
    from overland.apps.evaluation.cache import can_cache
    from overland.apps.evaluation.chat import Asking
    from overland.apps.evaluation.prompts import (
        Prompt,
        check_prompts,
        has_unread_input,
        piped_prompts,
        read_prompts,
    )
    from overland.apps.evaluation.sampling import Sampling

    sampling, system = Sampling(**{name: options[name] for name in SAMPLING}), options["system"]
    if chat and parse_specials is not None:
        raise typer.BadParameter(
            "names of special tokens in a question are text; this is for texts to continue",
            param_hint="--parse-specials" if parse_specials else "--no-parse-specials",
        )
    if system is not None and not chat:
        raise typer.BadParameter("--system needs --chat")
    given = [Prompt(text) for text in [*(prompts or []), *(prompt or [])]]
    given += read_prompts(file) if file is not None else []
    if not given and not chat:
        given = piped_prompts(note)
    check_prompts(given)
    loading = {name: options[name] for name in LOADING}
    opened = open_model(path, needs_tokenizer=True, **loading)
    note(
        f"{opened.path}: {str(opened.dtype).removeprefix('torch.')} (--dtype) on {opened.device} "
        "(--device)"
    )
    if not can_cache(opened.model):
        note("generating without a cache: this model's custom parts may attend to all tokens")
    asked = Asking(
        opened,
        sampling,
        options["num_tokens"],
        options["stop"] or [],
        chat,
        system,
        parse_specials is not False,
    )
    if not given:
        converse(asked, as_json)
        return
    if has_unread_input():
        note("standard input is not read: prompts are given")
    if len(given) == 1 and sys.stdout.isatty() and not as_json:
        stream(asked, given[0])
    else:
        answer(asked, given, options["batch_size"], as_json)


def answer(asked: Asking, prompts: list[Prompt], batch_size: int, as_json: bool) -> None:
    """Prints the continuation of each prompt."""
    num_full = 0
    with progress_bar("generating", total=len(prompts), visible=len(prompts) > 1) as bar:
        answers = asked.answers(prompts, batch_size, bar.advance)
        for number, (prompt, one) in enumerate(zip(prompts, answers, strict=True)):
            if as_json:
                show_json(prompt.text, one.text, one)
            else:
                begun = beginning(asked, prompt)
                if number:
                    print()
                say([begun + one.text if begun else one.text.strip()])
            num_full += one.reason == CONTEXT
    if num_full:
        note(
            f"{num_full:,} of {len(prompts):,} texts end where the model's context of "
            f"{asked.opened.context:,} tokens is full"
        )


def stream(asked: Asking, prompt: Prompt) -> None:
    """Prints the continuation of a prompt while it is generated."""
    ids = asked.encoded(prompt)
    generator = asked.generator(len(ids) + asked.num_tokens)
    print(beginning(asked, prompt), end="", flush=True)
    wanted = asked.request(asked.end_ids([prompt]))
    pieces = generator.stream(ids, wanted, ended=lambda one: tell_end(asked, one.reason))
    say(stripped(pieces) if asked.chat else pieces)


def beginning(asked: Asking, prompt: Prompt) -> str:
    """Returns what to print before an answer: a text to continue, but not a question."""
    return "" if asked.chat or prompt.messages else prompt.text


def show_json(prompt: str, text: str, one: Completion) -> None:
    """Prints one record and flushes it, since the reader may be waiting for it."""
    record = {"prompt": prompt, "text": text, "reason": one.reason, "tokens": len(one.ids)}
    say([json.dumps(record, ensure_ascii=False)])


def converse(asked: Asking, as_json: bool) -> None:
    """Talks until the input ends."""
    from overland.apps.evaluation.chat import ChatSession
    from overland.apps.evaluation.prompts import check_turn

    talk = ChatSession(asked, asked.generator(asked.opened.context), note)
    is_watched = sys.stdin.isatty()
    if is_watched:
        note(f"{RESET} clears the conversation; Ctrl-C interrupts an answer; Ctrl-D quits")
    for question in questions(is_watched):
        if not is_watched and not talk.turns:
            check_turn(question)
        if question.strip() == RESET:
            talk.reset()
            note("conversation cleared")
            continue
        try:
            if as_json:
                text = "".join(talk.ask(question)).strip()
                assert talk.answer is not None
                show_json(question, text, talk.answer)
            else:
                say(stripped(talk.ask(question)))
                if is_watched and talk.answer is not None:
                    tell_end(asked, talk.answer.reason)
        except KeyboardInterrupt:
            print()
        except OverlandError as error:
            if not is_watched:
                raise
            note(str(error))


def tell_end(asked: Asking, reason: str) -> None:
    """Reports why a text ended before the model was done."""
    if reason == CONTEXT:
        note(f"(the model's context of {asked.opened.context:,} tokens is full)")
    elif reason == TOKENS and asked.chat:
        note(f"(cut off after {asked.num_tokens:,} tokens; raise --num-tokens for more)")


def questions(is_watched: bool) -> Iterator[str]:
    """Yields the lines of the input, without blank ones."""
    while True:
        try:
            line = input("> " if is_watched else "")
        except UnicodeDecodeError as error:
            raise DataError(f"standard input is not UTF-8 text: {error.reason}") from None
        except (EOFError, KeyboardInterrupt):
            if is_watched:
                print()
            return
        if line.strip():
            yield line


def stripped(pieces: Iterator[str]) -> Iterator[str]:
    """Yields the text without white space at either end."""
    blanks, has_begun = "", False
    for piece in pieces:
        text = blanks + piece if has_begun else piece.lstrip()
        has_begun = has_begun or bool(text)
        bare = text.rstrip()
        blanks = text[len(bare) :]
        yield bare


def say(pieces: Iterable[str]) -> None:
    """Prints a text as it arrives, then a newline. A file gets it as it is; on a terminal, control
    characters are made visible."""
    stream = sys.stdout if sys.stdout.isatty() else raw(sys.stdout)
    for piece in pieces:
        print(piece, end="", file=stream, flush=True)
    print(flush=True)


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
