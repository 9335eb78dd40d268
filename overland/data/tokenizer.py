"""Text to tokens and back by a Hugging Face tokenizer.json, the model's own or one trained here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from overland.data.errors import DataError

END_OF_TEXT = "<|endoftext|>"
# Names of the end-of-document token where no config next to the tokenizer says which it is.
KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<|im_end|>")


class Tokenizer:
    """A tokenizer.json with the end-of-document token that goes with it."""

    def __init__(self, path: Path) -> None:
        self.path = path / "tokenizer.json" if path.is_dir() else path
        if not self.path.is_file():
            raise DataError(f"{path} holds no tokenizer.json")
        text = self.path.read_text(encoding="utf-8")
        library = _tokenizers()
        try:
            self._tokenizer = library.Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing narrower
            raise DataError(f"{self.path} is no tokenizer: {error}") from None
        self.fingerprint = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        self.vocab_size = int(self._tokenizer.get_vocab_size())
        self.end_id = self._find_end()

    def encode_documents(self, texts: Sequence[str]) -> list[list[int]]:
        """Each text's ids, followed by the end-of-document id."""
        encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [[*one.ids, self.end_id] for one in encoded]

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def _find_end(self) -> int:
        config = self.path.with_name("tokenizer_config.json")
        names = list(KNOWN_ENDS)
        if config.is_file():
            named = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
            named = named.get("content") if isinstance(named, dict) else named
            names = [named, *names] if named else names
        for name in names:
            end_id = self._tokenizer.token_to_id(name)
            if end_id is not None:
                return int(end_id)
        raise DataError(
            f"{self.path}: no end-of-document token; name it as eos_token in tokenizer_config.json"
        )


def train_tokenizer(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Trains a byte-level BPE tokenizer on the texts and writes it as tokenizer.json."""
    _tokenizers()
    from tokenizers import Tokenizer as HFTokenizer
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = HFTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise DataError(
            "text needs the tokenizers package: pip install 'overland[text]' (random tokens and "
            "token shards do without)"
        ) from None
    return tokenizers
