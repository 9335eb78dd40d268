"""Prompts a model: continued texts, answers, and conversations in its tokenizer's chat template
(prompts of lm-eval's tasks: harness.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from overland.apps.evaluation.generate import Completion, Done, GenerationRequest, Generator
from overland.apps.evaluation.model import OpenModel
from overland.apps.evaluation.prompts import Prompt, encode_prompt
from overland.apps.evaluation.sampling import Sampling
from overland.config.schema import JobConfig
from overland.data.chat import ASSISTANT, Message
from overland.data.learned_tokens import NoTemplate, joined
from overland.data.sft import end_of_turn, templates_of
from overland.errors import DataError

AT_ONCE = 64  # batches whose prompts are sorted by length together


def turns_of(question: str, system: str | None = None) -> list[Message]:
    """Returns a conversation that starts with this question."""
    first = [{"role": "system", "content": system}] if system is not None else []
    return [*first, {"role": "user", "content": question}]


def prompt_of(
    opened: OpenModel, turns: list[Message], tools: Sequence[Any] | None = None
) -> list[int]:
    """Returns the ids of a conversation, up to where the model answers."""
    if not opened.tokenizer.chat_templates:
        raise DataError(
            f"{opened.tokenizer.path} has no chat template, so questions cannot be formatted: "
            "omit --chat, or put a chat_template.jinja next to it"
        )
    template, _ = templates_of(opened.config or JobConfig(), opened.tokenizer)
    if template is None:
        raise NoTemplate
    pieces = template.write_prompt(turns if template.takes_parts else joined(turns), tools)
    return opened.tokenizer.encode_pieces(pieces)[0].tolist()


def ends_of(opened: OpenModel) -> tuple[int, ...]:
    """Returns the tokens that end an answer."""
    end = end_of_turn(opened.config or JobConfig(), opened.tokenizer)
    return opened.end_ids if end is None else tuple(dict.fromkeys([*opened.end_ids, end]))


@dataclass(frozen=True)
class Asking:
    """A model with the settings used to prompt it."""

    opened: OpenModel
    sampling: Sampling
    num_tokens: int
    stop: Sequence[str] = ()
    chat: bool = False
    system: str | None = None
    parse_specials: bool = True

    def answers(
        self, prompts: Sequence[Prompt], batch_size: int, done: Done = lambda count: None
    ) -> Iterator[Completion]:
        """Yields a completion for each prompt, in order. `done` is called with the number of newly
        completed prompts."""
        if not prompts:
            return
        ids = [self.encoded(prompt) for prompt in prompts]
        length = max(map(len, ids)) + self.num_tokens
        size, wanted = min(batch_size, len(ids)), self.request(self.end_ids(prompts))
        with closing(self.generator(length, size)) as generator:
            generator.check(ids)
            at_once = AT_ONCE * size
            for first in range(0, len(ids), at_once):
                yield from generator.generate(ids[first : first + at_once], wanted, first, done)

    def generator(self, length: int, batch_size: int = 1) -> Generator:
        """Returns what generates texts of this length."""
        return Generator(self.opened, batch_size=batch_size, length=length)

    def request(self, end_ids: Sequence[int]) -> GenerationRequest:
        return GenerationRequest(self.num_tokens, self.sampling, end_ids, self.stop)

    def encoded(self, prompt: Prompt) -> list[int]:
        if not self.chat and not prompt.messages:
            return encode_prompt(self.opened.tokenizer, prompt.text, self.parse_specials)
        if not prompt.messages:
            return prompt_of(self.opened, turns_of(prompt.text, self.system))
        has_system = self.system is None or prompt.messages[0]["role"] == "system"
        first = [] if has_system else turns_of("", self.system)[:1]
        return prompt_of(self.opened, [*first, *prompt.messages], prompt.tools)

    def end_ids(self, prompts: Sequence[Prompt]) -> tuple[int, ...]:
        is_chat = self.chat or any(prompt.messages for prompt in prompts)
        return ends_of(self.opened) if is_chat else self.opened.end_ids


@dataclass
class ChatSession:
    """A conversation so far, with the settings for generating answers."""

    asking: Asking
    generator: Generator
    note: Callable[[str], None] = lambda text: None
    turns: list[Message] = field(default_factory=list)
    answer: Completion | None = None
    """The last answer; None if it was interrupted."""

    def ask(self, question: str) -> Iterator[str]:
        """Yields the answer piece by piece, and adds question and answer to the conversation. An
        interrupted answer is kept as far as it got."""
        begun = len(self.turns) // 2
        self.turns += turns_of(question, self.asking.system if not self.turns else None)
        said: list[str] = []
        self.answer = None
        try:
            wanted = self.asking.request(ends_of(self.asking.opened))
            pieces = self.generator.stream(
                self._prompt(), wanted, begun, lambda one: setattr(self, "answer", one)
            )
            for piece in pieces:
                said.append(piece)
                yield piece
        except Exception:
            self.turns.pop()
            raise
        finally:
            if self.turns and self.turns[-1]["role"] == "user":
                self.turns.append({"role": ASSISTANT, "content": "".join(said).strip()})

    def reset(self) -> None:
        """Clears the conversation."""
        self.turns.clear()

    def _prompt(self) -> list[int]:
        """Returns the ids of the conversation, without its first turns if it is too long."""
        ids = prompt_of(self.asking.opened, self.turns)
        first = 1 if self.turns[0]["role"] == "system" else 0
        left_out = 0
        while len(ids) >= self.generator.length and len(self.turns) - first > 2:
            del self.turns[first : first + 2]
            left_out += 2
            ids = prompt_of(self.asking.opened, self.turns)
        if left_out:
            self.note(
                f"the model's context is {self.generator.length:,} tokens: the first {left_out} "
                "turns have been dropped"
            )
        return ids
