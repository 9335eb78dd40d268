"""Text to tokens and back, with the tokenizer in a model's folder: keeps special tokens out of
text, adds BOS and EOS to documents, and computes the fingerprint that tells tokenizers apart.

Three kinds of files are read, each with its own library: `tokenizer.json` (Hugging Face), and
`tokenizer.model` as either a sentencepiece model or tiktoken's ranks. All of them work the same:

1. Text gives only ordinary tokens, whatever it says: a page about `<|endoftext|>` does not end a
   document.
2. A document is BOS (if `add_bos`), its text, and EOS (if `add_eos`); nothing else adds special
   tokens. By default, the tokenizer itself decides about BOS.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from overland.data.tokenizer_encoders import (
    HuggingFace,
    Ids,
    SentencePiece,
    Spots,
    TextEncoder,
    Tiktoken,
)
from overland.data.tokenizer_files import (
    ADDED,
    CONFIG,
    DEFAULT,
    TEMPLATE,
    Beside,
    find_file,
    is_ranks,
    read_tokenizer_file,
)
from overland.errors import DataError
from overland.files import read_object
from overland.world.records import record

RULES = 1  # part of every fingerprint; increased when the same files give different ids
PADS = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>")


@record
class Policy(NamedTuple):
    """Whether documents begin with BOS and end with EOS; None if unspecified."""

    add_bos: bool | None = None
    add_eos: bool | None = None


UNKNOWN = Policy()


class Tokenizer:
    """A tokenizer from a folder or file, with the policy for BOS and EOS."""

    path: Path
    """The tokenizer.json or tokenizer.model itself."""
    vocab_size: int
    """One more than the largest id, including special and added tokens: the rows of an
    embedding."""
    specials: dict[str, int]
    """Special tokens by name. Text never gives them; chat templates insert them by id."""
    bos_id: int | None
    eos_id: int | None
    """None only if no document ends with it."""
    add_bos: bool
    bos_because: str
    """The reason for `add_bos`, for messages."""
    fingerprint: str
    """Fingerprint of everything that determines the ids of a document; independent of the path."""
    chat_templates: dict[str, str]
    """Chat templates by name; see `tokenizer_files`. Copies of the tokenizer include these."""
    new_tokens: tuple[str, ...]
    """Special tokens that its files lack, and that copies of it include."""

    def __init__(
        self,
        path: Path,
        *,
        add_bos: bool | None = None,
        add_eos: bool = True,
        new_tokens: Sequence[str] = (),
    ) -> None:
        """If `add_bos` is None, the tokenizer's own convention decides. Those of `new_tokens` that
        it does not have get ids after all others."""
        self.path = find_file(path)
        self.add_eos = add_eos
        self._beside = Beside.of(self.path)
        self.chat_templates = dict(self._beside.chat_templates)
        data = read_tokenizer_file(self.path)
        self._encoder = _encoder(self.path, data, self._beside)
        if blank := [name for name in new_tokens if not name.strip()]:
            raise DataError(f"sft.new_tokens: {blank[0]!r} is not a name for a token")
        known = self._encoder.specials
        self.new_tokens = tuple(dict.fromkeys(name for name in new_tokens if name not in known))
        if self.new_tokens:
            data, self._beside = _with_new(data, self._beside, self._encoder, self.new_tokens)
            self._encoder = _encoder(self.path, data, self._beside)
        self._data = data
        self.vocab_size = self._encoder.vocab_size
        self.specials = self._encoder.specials
        self.bos_id = self._encoder.bos_id
        self.add_bos, self.bos_because = self._convention() if add_bos is None else (add_bos, "")
        self.eos_id = self._encoder.eos_id
        self._before: list[int] = []
        self._after: list[int] = []
        if add_eos and self.eos_id is not None:
            self._after = [self.eos_id]
        elif add_eos:
            raise DataError(
                f"{self.path} has no end-of-document token: name one as eos_token in the "
                "tokenizer_config.json next to it, or set data.add_eos = false (--no-eos)"
            )
        if self.add_bos and self.bos_id is not None:
            self._before = [self.bos_id]
        elif self.add_bos:
            raise DataError(
                f"{self.path} has no beginning-of-document token: turn add_bos off, or name one as "
                "bos_token in the tokenizer_config.json next to it"
            )
        self._hidden = set(self.specials.values())
        self._pieces: dict[int, str] = {}
        rules = json.dumps([RULES, self.vocab_size, self._before, self._after])
        self.fingerprint = hashlib.blake2b(data, digest_size=8, key=rules.encode()).hexdigest()

    @property
    def policy(self) -> Policy:
        return Policy(self.add_bos, self.add_eos)

    @property
    def pad_id(self) -> int | None:
        """The padding token if the model's config has none: the tokenizer's, or one with a usual
        name, or the end-of-document token."""
        name = self.named.get("pad_token")
        for one in ([name] if name else []) + list(PADS):
            if one in self.specials:
                return self.specials[one]
        return self.eos_id

    @property
    def begins_with_bos(self) -> bool:
        """Whether a text begins with BOS by the tokenizer's own convention, despite the policy."""
        return self._convention()[0]

    @property
    def named(self) -> dict[str, str]:
        """Special tokens by their role, as chat templates name them: `bos_token`, …"""
        names = {i: name for name, i in self.specials.items()}
        found = {role: name for role, name in self._beside.names.items() if name is not None}
        for role, i in (("bos_token", self.bos_id), ("eos_token", self.eos_id)):
            if i in names:
                found[role] = names[i]
        return found

    def with_bos(self, add_bos: bool) -> Tokenizer:
        """Returns the same tokenizer with that policy."""
        return Tokenizer(
            self.path, add_bos=add_bos, add_eos=self.add_eos, new_tokens=self.new_tokens
        )

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without BOS and EOS."""
        ids: list[int] = self._encode_batch([text])[0].tolist()
        return ids

    def encode_documents(self, texts: Sequence[str]) -> list[Ids]:
        """Returns each text's ids, with BOS and EOS as the policy says. Uses all cores, or only one
        with TOKENIZERS_PARALLELISM=false, which pools of processes set."""
        before, after = (np.asarray(ids, np.int32) for ids in (self._before, self._after))
        encoded = self._encode_batch(list(texts))
        return [np.concatenate((before, ids, after), dtype=np.int32) for ids in encoded]

    def encode_pieces(self, pieces: Sequence[str | int]) -> tuple[Ids, Spots, Spots]:
        """Returns the ids of text with special tokens in between, and where each token begins and
        ends, in characters (a special token counts as one). Nothing is added at either end."""
        pieces = [piece if isinstance(piece, int) else _valid(piece) for piece in pieces]
        return self._encoder.encode_pieces(pieces)

    def decode(self, ids: Sequence[int], after: Sequence[int] = ()) -> str:
        """Returns the text of the ids, without special tokens and ids beyond the vocabulary (which
        only pad an embedding). `after`: the preceding ids, which determine a space in between."""
        if not after:
            plain = [int(i) for i in ids if 0 <= i < self.vocab_size and i not in self._hidden]
            return self._encoder.decode(plain)
        before = self.decode(after)
        return self.decode([*after, *ids]).removeprefix(before)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Returns the text of each token on its own, and the names of special ones; bytes that are
        only part of a character become U+FFFD."""
        new = {int(i) for i in ids} - self._pieces.keys()
        known = sorted(i for i in new if 0 <= i < self.vocab_size)
        self._pieces.update(zip(known, self._encoder.pieces(known), strict=True))
        return [self._pieces.get(int(i), "\ufffd") for i in ids]

    def files(self) -> dict[str, bytes]:
        """Returns the files of a copy, by name; together in any folder, they open as this
        tokenizer."""
        found = {file.name: read_tokenizer_file(file) for file in self._beside.files}
        if self.new_tokens and not isinstance(self._encoder, HuggingFace):
            found[ADDED] = _as_json(self._beside.added)
        if self.chat_templates != self._beside.chat_templates:
            text = found.get(CONFIG, b"{}")
            config = read_object(self.path.with_name(CONFIG), DataError, text=text)
            template = self.chat_templates[DEFAULT]
            found[CONFIG] = _as_json({**config, "chat_template": template})
            found[TEMPLATE] = template.encode()
        return {self.path.name: self._data, **found}

    def _convention(self) -> tuple[bool, str]:
        """Returns whether a text begins with BOS, and the reason."""
        if self.bos_id is None:
            return False, "it has none"
        if self._beside.adds_bos is not None:
            return self._beside.adds_bos, "by add_bos_token in its tokenizer_config.json"
        return self._encoder.begins, self._encoder.convention

    def _encode_batch(self, texts: list[str]) -> list[Ids]:
        try:
            return self._encoder.encode_batch(texts)
        except (TypeError, UnicodeEncodeError):  # half a surrogate pair, which JSON allows
            return self._encoder.encode_batch([_valid(text) for text in texts])

    def __reduce__(self) -> tuple[Any, ...]:
        # Sent as a path: the libraries' own state is large, or cannot be pickled.
        how = (self.add_bos, self.add_eos, self.new_tokens)
        return _reopen, (self.path.absolute(), *how, self.fingerprint)


def _reopen(
    path: Path, add_bos: bool, add_eos: bool, new_tokens: Sequence[str], fingerprint: str
) -> Tokenizer:
    tokenizer = Tokenizer(path, add_bos=add_bos, add_eos=add_eos, new_tokens=new_tokens)
    if tokenizer.fingerprint != fingerprint:
        raise DataError(f"{path} was changed while it was in use: run the command again")
    return tokenizer


def _encoder(path: Path, data: bytes, beside: Beside) -> TextEncoder:
    if path.suffix == ".json" or data.lstrip()[:1] == b"{":
        return HuggingFace(path, data, beside)
    if is_ranks(data):
        return Tiktoken(path, data, beside)
    return SentencePiece(path, data, beside)


def _with_new(
    data: bytes, beside: Beside, encoder: TextEncoder, names: Sequence[str]
) -> tuple[bytes, Beside]:
    """Returns the contents of the files with additional special tokens, whose ids come last."""
    ids = {name: encoder.vocab_size + place for place, name in enumerate(names)}
    if isinstance(encoder, HuggingFace):
        data = encoder.with_specials(ids)
    return data, replace(beside, added={**beside.added, **ids})


def _as_json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _valid(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
