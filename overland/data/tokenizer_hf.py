"""A tokenizer.json, read by Hugging Face's tokenizers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from overland.data.tokenizer_encoder import Ids, need_for_text
from overland.data.tokenizer_files import Beside
from overland.errors import DataError

# By these names where no file beside it says which tokens they are.
KNOWN_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
LARGEST_VOCABULARY = 2**26
KNOWN_BEGINNINGS = ("<|begin_of_text|>", "<s>", "<bos>")


class HuggingFace:
    def __init__(self, path: Path, data: bytes, beside: Beside) -> None:
        library = need_for_text("tokenizers")
        try:
            self._tokenizer = library.Tokenizer.from_str(data.decode())
        except Exception as error:  # the library raises nothing narrower
            raise DataError(f"{path} is no tokenizer: {error}") from None
        # The file may ask for what is right in front of a model, and wrong for a corpus.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if getattr(self._tokenizer.model, "dropout", None):
            self._tokenizer.model.dropout = None
        self._tokenizer.encode_special_tokens = True  # their names in a text are text

        token_id = self._tokenizer.token_to_id
        self.eos_id = beside.find("eos_token", token_id, self._first(KNOWN_ENDS))
        self.bos_id = beside.find("bos_token", token_id, self._first(KNOWN_BEGINNINGS))
        first = self._tokenizer.encode("a").ids[:1]  # with what its post-processor adds
        self.begins, self.convention = first == [self.bos_id], "by its post-processor"
        for special in {self.bos_id, self.eos_id} - {None}:
            # Some files call them ordinary; then text would give them.
            self._tokenizer.add_special_tokens([self._tokenizer.id_to_token(special)])

        self.vocab_size = 1 + max(self._tokenizer.get_vocab().values(), default=0)
        if self.vocab_size > LARGEST_VOCABULARY:
            raise DataError(f"{path} has a token with id {self.vocab_size - 1:,}, beyond any model")
        added = self._tokenizer.get_added_tokens_decoder()
        self.specials = {token.content: i for i, token in added.items() if token.special}
        self._spellings = self._spell_specials(json.loads(data)["model"])
        self._leaks = np.zeros(self.vocab_size, dtype=bool)
        self._leaks[list(self._spellings)] = True

    def encode_batch(self, texts: list[str]) -> list[Ids]:
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [self._without_leaks(np.fromiter(one.ids, dtype=np.int32)) for one in encoded]

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        # Decoders drop the space at the start of a text: so each piece follows another token.
        first = self._tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        start = self._tokenizer.decode(first)
        texts = self._tokenizer.decode_batch([[*first, i] for i in ids], skip_special_tokens=False)
        return [text.removeprefix(start) for text in texts]

    def _without_leaks(self, ids: Ids) -> Ids:
        """Models that hold their special tokens as common pieces (Unigram: T5, XLM-R) find them in
        text even so; what they found is spelt out."""
        if not self._leaks.take(ids).any():
            return ids
        words = (self._spellings.get(i, [i]) for i in ids.tolist())
        return np.fromiter(itertools.chain.from_iterable(words), dtype=np.int32)

    def _spell_specials(self, model: dict[str, Any]) -> dict[int, list[int]]:
        """Each special token's name, character by character; unknown is what text may well be."""
        token_id = self._tokenizer.token_to_id
        name = model.get("unk_token")
        unknown = model.get("unk_id") if name is None else token_id(name)

        def spell(name: str) -> list[int]:
            ids = [token_id(character) for character in name]
            return [i for i in (unknown if i is None else i for i in ids) if i is not None]

        return {i: spell(name) for name, i in self.specials.items() if i != unknown}

    def _first(self, names: Sequence[str]) -> int | None:
        ids = (self._tokenizer.token_to_id(name) for name in names)
        return next((i for i in ids if i is not None), None)
