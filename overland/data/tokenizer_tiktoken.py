"""A tokenizer.model of tiktoken's ranks, as Llama 3 has it in its `original/` folder.

The file holds the tokens alone. How text is split before they are looked for and which special
tokens follow them is known by Meta's convention.
"""

from __future__ import annotations

import base64
import binascii
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from overland.data.tokenizer_encoder import Ids, need_for_text, num_threads
from overland.data.tokenizer_files import Beside
from overland.errors import DataError

# Contractions; words with the sign before them; up to three digits; signs; line ends; spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

NUM_SPECIALS = 256
BEGIN, END = 0, 1
# By their place after the ranks; the others are reserved, and numbered. Llama 3 itself had reserved
# 4, 8 and 10 still, which Llama 3.1 took into use.
NAMED = {
    BEGIN: "<|begin_of_text|>",
    END: "<|end_of_text|>",
    4: "<|finetune_right_pad_id|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    8: "<|eom_id|>",
    9: "<|eot_id|>",
    10: "<|python_tag|>",
}

# Ranks of other families split text in other ways, which would go unseen.
OTHERS = {200_000: "Llama 4", 163_584: "Kimi", 151_643: "Qwen"}

# The library dies on 999,122 blanks in a row (0.14; of other long runs, 4,000,000 characters take
# less than a second). So runs are cut when they fill a stretch of this length; twice it is the
# longest that stays. Text without such runs is never cut.
LONG_BLANK = 250_000


class Tiktoken:
    def __init__(self, path: Path, data: bytes, beside: Beside) -> None:
        library = need_for_text("tiktoken")
        ranks = _read_ranks(path, data)
        if len(ranks) in OTHERS:
            raise DataError(
                f"{path} holds {len(ranks):,} ranks, which are {OTHERS[len(ranks)]}'s, and only "
                "Llama 3's are read: use the model's tokenizer.json"
            )
        names = llama3_specials(len(ranks))
        names |= {i: name for name, i in beside.added.items() if i >= len(ranks)}
        self.specials = {name: i for i, name in sorted(names.items())}
        self.vocab_size = max(names) + 1
        self._names = names
        self._encoding = library.Encoding(
            str(path), pat_str=SPLIT, mergeable_ranks=ranks, special_tokens=self.specials
        )
        self.bos_id = beside.find("bos_token", self.specials.get, len(ranks) + BEGIN)
        self.eos_id = beside.find("eos_token", self.specials.get, len(ranks) + END)
        self.begins, self.convention = True, "by the convention of Llama 3"

    def encode_batch(self, texts: list[str]) -> list[Ids]:
        threads = min(num_threads(), len(texts))
        if threads <= 1:
            return self._encode_some(texts)
        # Some parts per thread, as texts differ in length; a task per text costs more than a text.
        size = -(-len(texts) // (8 * threads))
        parts = [texts[i : i + size] for i in range(0, len(texts), size)]
        with ThreadPoolExecutor(threads) as pool:
            return list(itertools.chain.from_iterable(pool.map(self._encode_some, parts)))

    def decode(self, ids: list[int]) -> str:
        return str(self._encoding.decode(ids, errors="replace"))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        first = min(self.specials.values())
        return [self._names.get(i, "\ufffd") if i >= first else self.decode([i]) for i in ids]

    def _encode_some(self, texts: list[str]) -> list[Ids]:
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> Ids:
        parts = [text] if len(text) <= LONG_BLANK else cut_long_blanks(text)
        # None is disallowed and none allowed: special tokens' names in a text are text.
        ids = [self._encoding.encode_to_numpy(part, disallowed_special=()) for part in parts]
        joined = ids[0] if len(ids) == 1 else np.concatenate(ids)
        return joined.view(np.int32)


def llama3_specials(num_ranks: int) -> dict[int, str]:
    reserved = itertools.count()
    return {
        num_ranks + place: NAMED.get(place) or f"<|reserved_special_token_{next(reserved)}|>"
        for place in range(NUM_SPECIALS)
    }


def cut_long_blanks(text: str) -> list[str]:
    step = LONG_BLANK
    cuts = [i for i in range(step, len(text), step) if text[i - step : i].isspace()]
    return [text[start:stop] for start, stop in itertools.pairwise([0, *cuts, len(text)])]


def _read_ranks(path: Path, data: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise DataError(
                f"{path}:{number}: expected a token in base64 and its rank; fetch it again"
            ) from None
    whole = sorted(ranks.values()) == list(range(len(ranks)))
    if not whole or any(bytes([byte]) not in ranks for byte in range(256)):
        raise DataError(f"{path} lacks some of its ranks: it is damaged, fetch it again")
    return ranks
