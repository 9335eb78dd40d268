"""A model as lm-evaluation-harness calls it: how its requests become tokens (BOS, truncation), and
how a task's turns are put into a chat template.

Texts are tokenized as the harness's own `hf` model does with the exported folder, so that both give
the same scores: names of special tokens in a text become those tokens, BOS follows the tokenizer's
convention unless the text starts with it, spaces at the end of a context belong to the
continuation, and text that is too long is truncated on the left.

Importing this imports the harness, which takes seconds; `tasks.py` does so only when tasks are run.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from functools import lru_cache
from typing import Any, Protocol

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from overland.apps.evaluation.score import Pair, TextScore
from overland.data.chat import ChatError, ChatTemplate
from overland.data.learned_tokens import split_specials
from overland.data.tokenizer import Tokenizer
from overland.data.tokenizer_files import DEFAULT
from overland.errors import DataError
from overland.words import did_you_mean

NEW_TOKENS = 256  # the harness's default for tasks that do not specify it
# Appended to a final message that is to be continued, to find where it ends. The same string as in
# transformers, so that a template that trims messages treats it the same way.
CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "


class Engine(Protocol):
    """Computes scores and texts, in one process or on all ranks."""

    def score(self, pairs: Sequence[Pair]) -> list[TextScore]: ...

    def require_texts(self) -> None:
        """Raises an error if it cannot generate text."""

    def generate(self, prompts: Sequence[Sequence[int]], settings: dict[str, Any]) -> list[str]: ...


class HarnessModel(LM):
    """One of our models. The harness sees one process, whatever the number of ranks."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        max_length: int,
        add_bos: bool | None = None,
        template: str = DEFAULT,
        facts: dict[str, Any] | None = None,
    ) -> None:
        """`template` names one of the tokenizer's chat templates."""
        super().__init__()
        self.engine = engine
        self.max_length = max_length
        self.facts = facts or {}
        self.num_cut = 0
        """Number of prompts that were truncated."""
        self._own = tokenizer
        self._add_bos = tokenizer.begins_with_bos if add_bos is None else add_bos
        if self._add_bos and tokenizer.bos_id is None:
            raise DataError(f"--add-bos: {tokenizer.path} has no BOS token")
        self._prefix_name = self._name(self.prefix_token_id)
        self._template_name = template
        self._encode = lru_cache(maxsize=1 << 14)(self._encode_now)

    # properties that the harness reads

    @property
    def eot_token_id(self) -> int:
        if self._own.eos_id is None:
            raise DataError(
                f"{self._own.path} has no EOS token, which is needed to end generated text: set "
                "eos_token in the tokenizer_config.json next to it"
            )
        return self._own.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The token that the first token of a text is predicted from."""
        return self.eot_token_id if self._own.bos_id is None else self._own.bos_id

    @property
    def tokenizer_name(self) -> str:
        return self._own.fingerprint

    def get_model_info(self) -> dict[str, Any]:
        return self.facts

    def chat_template(self, chat_template: bool | str = False) -> str:
        return self._template.source

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        try:
            return self._write(chat_history, add_generation_prompt)
        except ChatError:
            without = [turn for turn in chat_history if turn["role"] != "system"]
            if without == chat_history:
                raise
            return self._write(without, add_generation_prompt)

    # requests

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        pairs = [self._pair(request) for request in requests]
        self.num_cut += sum(len(a) + len(b) > self.max_length + 1 for a, b in pairs)
        return [(one.log_likelihood, one.is_greedy) for one in self.engine.score(pairs)]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        windows: list[Pair] = []
        counts = []
        for request in requests:
            of_text = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            some = [make_disjoint_window(window) for window in of_text]
            windows += some
            counts.append(len(some))
        values = iter(self.engine.score(windows))
        return [sum(next(values).log_likelihood for _ in range(count)) for count in counts]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Requests with the same settings are generated together."""
        by_settings: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            by_settings.setdefault(repr(request.args[1]), []).append(number)
        texts = [""] * len(requests)
        for numbers in by_settings.values():
            some = [requests[number] for number in numbers]
            for number, text in zip(numbers, self._generate(some), strict=True):
                texts[number] = text
        return texts

    def _generate(self, requests: list[Instance]) -> list[str]:
        settings = dict(normalize_gen_kwargs(requests[0].args[1], NEW_TOKENS))
        num_new = settings["max_gen_toks"]
        stop = handle_stop_sequences(settings["until"], self._name(self.eot_token_id))
        room = self.max_length - num_new
        if room <= 0:
            raise DataError(
                f"{requests[0].task_name} generates up to {num_new:,} tokens, but the context is "
                f"{self.max_length:,} including the prompt: raise --context, or lower "
                "--gen-kwargs max_gen_toks=N"
            )
        prompts = [
            self.tok_encode(request.args[0]) or [self.prefix_token_id] for request in requests
        ]
        self.num_cut += sum(len(prompt) > room for prompt in prompts)
        prompts = [prompt[-room:] for prompt in prompts]
        found = self.engine.generate(prompts, {**settings, "until": stop})
        return [postprocess_generated_text(text, stop, None) for text in found]

    # texts to ids

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        ids = list(self._encode(string))
        begins = self._add_bos if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and string.startswith(self._prefix_name):
            begins = False
        if begins and self._own.bos_id is not None and (self._add_bos or self._own.begins_with_bos):
            return [self._own.bos_id, *ids]
        return ids

    def _pair(self, request: Instance) -> Pair:
        context, continuation = request.args
        if before := context.rstrip():  # spaces belong to the continuation
            ids = self.tok_encode(before)
            whole = self.tok_encode(context + continuation)
            pair = (ids, whole[len(ids) :])
        else:
            ids = self.tok_encode(context + continuation, add_special_tokens=False)
            begins = ids[:1] == [self.prefix_token_id]
            pair = (ids[:1], ids[1:]) if begins else ([self.prefix_token_id], ids)
        where = f"{request.task_name}, document {request.doc_id}"
        if not pair[1]:
            raise DataError(
                f"{where}: the continuation {continuation!r:.60} has no tokens of its own and "
                "cannot be scored: fix the task's doc_to_choice or doc_to_target"
            )
        if len(pair[1]) > self.max_length:
            raise DataError(
                f"{where}: the continuation has {len(pair[1]):,} tokens, but the context is "
                f"{self.max_length:,}: raise --context, or omit the task"
            )
        return pair

    def _encode_now(self, string: str) -> tuple[int, ...]:
        pieces = split_specials(string, self._own.specials)
        return tuple(self._own.encode_pieces(pieces)[0].tolist())

    def _name(self, i: int) -> str:
        names = {i: name for name, i in self._own.specials.items()}
        return names.get(i) or self._own.pieces([i])[0]

    # conversations

    @property
    def _template(self) -> ChatTemplate:
        templates = self._own.chat_templates
        if self._template_name not in templates:
            if not templates:
                raise DataError(
                    f"{self._own.path} has no chat template: omit --apply-chat-template, or put a "
                    "chat_template.jinja next to it"
                )
            raise DataError(
                f"there is no chat template '{self._template_name}'"
                f"{did_you_mean(self._template_name, templates)}"
            )
        # Without special tokens: the harness expects text, which contains their names.
        source = templates[self._template_name]
        return ChatTemplate(source, {}, self._own.named, date.today())

    def _write(self, turns: list[dict[str, str]], asks: bool) -> str:
        if asks:
            return "".join(map(str, self._template.write_prompt(turns)))
        *earlier, last = turns
        marked = [*earlier, {**last, "content": last["content"] + CONTINUED}]
        text = "".join(map(str, self._template.write(marked).pieces))
        place = text.rfind(CONTINUED.strip())
        if place < 0:
            raise ChatError("the chat template drops the end of the last message")
        is_kept = text.startswith(CONTINUED, place)
        return text[:place] if is_kept else text[:place].rstrip()
