"""A tokenizer.model of sentencepiece, as Llama 2, Mistral and Gemma have it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from overland.data.tokenizer_encoder import Ids, need_for_text, num_threads
from overland.data.tokenizer_files import Beside
from overland.errors import DataError

SPACE = "\u2581"  # what sentencepiece writes for a space
BYTE = re.compile("<0x([0-9A-F]{2})>")


class SentencePiece:
    def __init__(self, path: Path, data: bytes, beside: Beside) -> None:
        library = need_for_text("sentencepiece")
        self._model = library.SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(data)
        except RuntimeError:
            raise DataError(
                f"{path} is neither a sentencepiece model nor tiktoken's ranks: fetch it again"
            ) from None
        size = self._model.vocab_size()
        # Added tokens come after the model's own; it never finds them in text.
        self._added = {i: name for name, i in beside.added.items() if i >= size}
        self.vocab_size = max([size - 1, *self._added]) + 1
        controls = {self._model.id_to_piece(i): i for i in range(size) if self._model.is_control(i)}
        self.specials = controls | {name: i for i, name in self._added.items()}
        self.bos_id = beside.find("bos_token", self._id, _or_none(self._model.bos_id()))
        self.eos_id = beside.find("eos_token", self._id, _or_none(self._model.eos_id()))
        # Meta's code for Llama 2 and Hugging Face's for this family put BOS before every text.
        self.begins, self.convention = True, "by the convention of sentencepiece models with a BOS"

    def encode_batch(self, texts: list[str]) -> list[Ids]:
        ids: list[Ids] = self._model.encode(
            texts, return_type="numpy", num_threads=num_threads(), add_bos=False, add_eos=False
        )
        return ids

    def decode(self, ids: list[int]) -> str:
        return str(self._model.decode(ids))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [self._added[i] if i in self._added else self._piece(i) for i in ids]

    def _piece(self, i: int) -> str:
        if i >= self._model.vocab_size():  # a hole between added tokens
            return "\ufffd"
        piece = str(self._model.id_to_piece(i))
        if self._model.is_byte(i) and (byte := BYTE.fullmatch(piece)):
            return bytes.fromhex(byte[1]).decode(errors="replace")
        return piece.replace(SPACE, " ")

    def _id(self, name: str) -> int | None:
        if name in self.specials:
            return self.specials[name]
        i = int(self._model.piece_to_id(name))
        return i if self._model.id_to_piece(i) == name else None  # unknown ones get unk's


def _or_none(i: int) -> int | None:
    return i if i >= 0 else None
