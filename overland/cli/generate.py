"""`overland generate`: what a model says."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from overland.cli.common import user_errors
from overland.progress import progress_bar
from overland.words import visible

if TYPE_CHECKING:
    from overland.tools.evaluation.answers import Asking
    from overland.tools.evaluation.generate import Completion, Generator
    from overland.tools.evaluation.model import OpenModel
    from overland.tools.evaluation.prompts import Prompt
    from overland.tools.evaluation.sampling import Sampling

RESET = "/reset"
CONTEXT, TOKENS = "context is full", "number of tokens"  # reasons why a text ends


@user_errors
def generate(
    path: Annotated[
        Path,
        typer.Argument(
            help="A run folder, a checkpoint of any format, a Hugging Face folder or an adapter."
        ),
    ],
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPT]...", help="Texts to continue.")
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="The same as PROMPT; repeatable.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(help="Prompts: a line of text each, or JSON lines; - is standard input."),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Prompts are questions; without any: a conversation."),
    ] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: the system turn.")] = None,
    num_tokens: Annotated[int, typer.Option(help="Tokens to add at most.", min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Of so many likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Of the likeliest with this probability.")] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Of those this many times as likely as the likeliest.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: less of what was said before.")
    ] = 1.0,
    stop: Annotated[
        list[str] | None, typer.Option(help="End the text before this; repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Another seed, another text.")] = 0,
    step: Annotated[int | None, typer.Option(help="Of a run: which checkpoint.")] = None,
    base: Annotated[
        Path | None, typer.Option(help="The model of an adapter, where it does not say.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Its file or folder, if PATH has none.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="config.json or its folder, if PATH has none.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32 (CPUs), bfloat16 (GPUs) or float16.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, …")] = None,
    batch_size: Annotated[int, typer.Option(help="Prompts at a time.", min=1)] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object per line.")] = False,
) -> None:
    """Let a model continue texts, or answer questions."""
    from overland.tools.evaluation.model import open_model
    from overland.tools.evaluation.prompts import Prompt, check_prompts, read_prompts
    from overland.tools.evaluation.sampling import Sampling

    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
    given = [Prompt(text) for text in [*(prompts or []), *(prompt or [])]]
    given += read_prompts(file) if file is not None else []
    check_prompts(given)
    if system is not None and not chat:
        raise typer.BadParameter("--system is for --chat")
    opened = open_model(
        path, base=base, tokenizer=tokenizer, config=config, dtype=dtype, device=device, step=step
    )
    note(
        f"{opened.path}: {str(opened.dtype).removeprefix('torch.')} (--dtype) on {opened.device} "
        "(--device)"
    )
    asked = Asked(opened, sampling, num_tokens, stop or [], chat, system, batch_size, as_json)
    if chat and not given:
        converse(asked)
    else:
        answer(asked, given or [Prompt("")])


@dataclass(frozen=True)
class Asked:
    opened: OpenModel
    sampling: Sampling
    num_tokens: int
    stop: list[str]
    chat: bool
    system: str | None
    batch_size: int
    as_json: bool

    @property
    def asking(self) -> Asking:
        from overland.tools.evaluation.answers import Asking

        return Asking(
            self.opened, self.sampling, self.num_tokens, self.stop, self.chat, self.system
        )

    def generator(self, batch_size: int, length: int) -> Generator:
        from overland.tools.evaluation.generate import Generator

        made = Generator(self.opened, batch_size=batch_size, length=length)
        note_cache(made)
        return made


def note_cache(made: Generator) -> None:
    if not made.is_cached:
        note("without a cache: parts of this model are your own, and might look at all tokens")


def answer(asked: Asked, prompts: list[Prompt]) -> None:
    """Prints what follows each prompt."""
    asking = asked.asking
    if len(prompts) == 1 and sys.stdout.isatty() and not asked.as_json:
        return stream(asked, asking, prompts[0])
    num_full = 0
    with progress_bar("generating", total=len(prompts), visible=len(prompts) > 1) as bar:
        answers = asking.answers(prompts, asked.batch_size, bar.advance, note_cache)
        for number, one in enumerate(answers):
            if number and not asked.as_json:
                print()
            show(asked, prompts[number], one)
            num_full += one.reason == CONTEXT
    if num_full:
        note(
            f"{num_full:,} of {len(prompts):,} texts end where the model's context of "
            f"{asked.opened.context:,} tokens is full"
        )


def stream(asked: Asked, asking: Asking, prompt: Prompt) -> None:
    """Prints what follows a prompt, as it comes."""
    ids = asking.encoded(prompt)
    generator = asked.generator(1, len(ids) + asked.num_tokens)
    print(visible(beginning(asked, prompt)), end="", flush=True)
    pieces = generator.stream(
        ids, max_new_tokens=asked.num_tokens, sampling=asked.sampling,
        end_ids=asking.end_ids([prompt]), stop=asked.stop,
        ended=lambda one: tell_end(asked, one.reason),
    )  # fmt: skip
    say(stripped(pieces) if asked.chat else pieces)


def beginning(asked: Asked, prompt: Prompt) -> str:
    """A text is shown with its continuation, a question is not."""
    return "" if asked.chat or prompt.messages else prompt.text


def show(asked: Asked, prompt: Prompt, one: Completion) -> None:
    if asked.as_json:
        show_json(prompt.text, one.text, one)
        return
    begun = beginning(asked, prompt)
    say([begun + one.text if begun else one.text.strip()])


def show_json(prompt: str, text: str, one: Completion) -> None:
    """Prints it at once: who reads it may wait for it."""
    record = {"prompt": prompt, "text": text, "reason": one.reason, "tokens": len(one.ids)}
    print(json.dumps(record, ensure_ascii=False), flush=True)


def converse(asked: Asked) -> None:
    """Talks until the input ends."""
    from overland.errors import OverlandError
    from overland.tools.evaluation.chat import Conversation

    generator = asked.generator(1, asked.opened.context)
    talk = Conversation(
        asked.opened, generator, asked.num_tokens, asked.sampling, asked.stop, asked.system, note
    )
    is_watched = sys.stdin.isatty()
    if is_watched:
        note(f"{RESET} forgets what was said; Ctrl-C breaks off an answer; Ctrl-D ends")
    for question in questions(is_watched):
        if question.strip() == RESET:
            talk.reset()
            note("forgotten")
            continue
        try:
            if asked.as_json:
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


def tell_end(asked: Asked, reason: str) -> None:
    """Says why a text ends where it might have gone on."""
    if reason == CONTEXT:
        note(f"(the model's context of {asked.opened.context:,} tokens is full)")
    elif reason == TOKENS and asked.chat:
        note(f"(broken off after {asked.num_tokens:,} tokens; --num-tokens)")


def questions(is_watched: bool) -> Iterator[str]:
    """Lines of the input, but for blank ones."""
    while True:
        try:
            line = input("> " if is_watched else "")
        except (EOFError, KeyboardInterrupt):
            if is_watched:
                print()
            return
        if line.strip():
            yield line


def stripped(pieces: Iterator[str]) -> Iterator[str]:
    """The text without blanks at either end."""
    blanks, has_begun = "", False
    for piece in pieces:
        text = blanks + piece if has_begun else piece.lstrip()
        has_begun = has_begun or bool(text)
        bare = text.rstrip()
        blanks = text[len(bare) :]
        yield bare


def say(pieces: Iterable[str]) -> None:
    """Prints a text as it comes, and ends the line. On a terminal nothing in it is a command to
    that."""
    is_terminal = sys.stdout.isatty()
    for piece in pieces:
        print(visible(piece) if is_terminal else piece, end="", flush=True)
    print()


def note(text: str) -> None:
    print(visible(text), file=sys.stderr, flush=True)
