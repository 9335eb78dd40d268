"""Generates completions of prompts: continued texts, or answers to questions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from overland.apps.evaluation.chat import ends_of, prompt_of, turns_of
from overland.apps.evaluation.generate import Completion, Generator
from overland.apps.evaluation.model import OpenModel, open_model
from overland.apps.evaluation.prompts import Prompt, check_prompts, encode_prompt
from overland.apps.evaluation.sampling import Sampling
from overland.arguments import integer, number, path_of, texts
from overland.errors import ArgumentError

AT_ONCE = 64  # batches whose prompts are sorted by length together

Done = Callable[[int], None]


def generate(
    model: OpenModel | str | Path,
    prompts: str | Sequence[str],
    *,
    num_tokens: int = 128,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop: Sequence[str] = (),
    seed: int = 0,
    chat: bool = False,
    system: str | None = None,
    batch_size: int = 16,
    parse_specials: bool = True,
) -> list[Completion]:
    """Returns a completion for each prompt, as `overland generate` prints it.

    Args:
        model: What `overland.load_model` returned, or the path of a run or checkpoint.
        prompts: One text, or several.
        num_tokens: Maximum number of tokens to generate.
        temperature: 0 always takes the most likely token.
        top_k: Sample from this many of the most likely tokens; 0: from all.
        top_p: Sample from the most likely tokens whose probabilities add up to this.
        min_p: Sample from tokens whose probability is at least this fraction of the highest.
        repetition_penalty: Above 1, tokens that occurred before become less likely.
        stop: Texts that end a completion; they are not part of it.
        seed: The same seed gives the same texts.
        chat: Whether prompts are questions, formatted with the model's chat template.
        system: The system prompt, with `chat`.
        batch_size: Number of prompts processed together.
        parse_specials: Whether names of special tokens in texts to continue stand for the tokens,
            as in transformers. In questions (`chat`) they are always text.
    """
    if system is not None and not chat:
        raise ArgumentError("system has no effect without chat=True: give both")
    sampling = Sampling(
        number(temperature, "temperature"),
        integer(top_k, "top_k"),
        number(top_p, "top_p"),
        number(min_p, "min_p"),
        number(repetition_penalty, "repetition_penalty"),
        integer(seed, "seed"),
    )
    given = [Prompt(text) for text in texts(prompts, "prompts")]
    check_prompts(given)
    num_tokens = integer(num_tokens, "num_tokens", least=1)
    batch_size = integer(batch_size, "batch_size", least=1)
    stop = texts(stop, "stop")
    opened = model
    if not isinstance(opened, OpenModel):
        opened = open_model(path_of(opened, "model"), needs_tokenizer=True)
    asking = Asking(opened, sampling, num_tokens, stop, chat, system, parse_specials)
    return list(asking.answers(given, batch_size))


class Asking:
    """A model with the settings used to prompt it."""

    def __init__(
        self, opened: OpenModel, sampling: Sampling, num_tokens: int, stop: Sequence[str],
        chat: bool, system: str | None, parse_specials: bool = True,
    ) -> None:  # fmt: skip
        self.opened, self.sampling, self.num_tokens = opened, sampling, num_tokens
        self.stop, self.chat, self.system = stop, chat, system
        self.parse_specials = parse_specials

    def answers(
        self, prompts: Sequence[Prompt], batch_size: int, done: Done = lambda count: None,
        made: Callable[[Generator], None] = lambda generator: None,
    ) -> Iterator[Completion]:  # fmt: skip
        """Yields a completion for each prompt, in order. `done` is called with the number of newly
        completed prompts, `made` with the generator."""
        if not prompts:
            return
        ids = [self.encoded(prompt) for prompt in prompts]
        length = max(map(len, ids)) + self.num_tokens
        generator = Generator(self.opened, batch_size=min(batch_size, len(ids)), length=length)
        try:
            made(generator)
            generator.check(ids)
            at_once = AT_ONCE * generator.batch_size
            for first in range(0, len(ids), at_once):
                yield from generator.generate(
                    ids[first : first + at_once], max_new_tokens=self.num_tokens,
                    sampling=self.sampling, end_ids=self.end_ids(prompts), stop=self.stop,
                    first=first, done=done,
                )  # fmt: skip
        finally:
            generator.close()

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
