"""The three kinds of tokenizers, each read by its own library, behind one protocol.

A `tokenizer.json` is read by Hugging Face's tokenizers. A `tokenizer.model` is of sentencepiece, as
Llama 2, Mistral and Gemma have it, or of tiktoken's ranks, as Llama 3 has it in its `original/`
folder. Ranks hold the tokens alone: how text is split before they are looked for, and which special
tokens follow them, is known by Meta's convention.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from overland.data.tokenizer_files import Beside
from overland.errors import DataError
from overland.packages import need

Ids = npt.NDArray[np.int32]
Spots = npt.NDArray[np.int64]
"""Places in a text, in characters."""
Spotted = list[tuple[int, int, int]]
"""Tokens: the id, where it begins, and where it ends."""
# By these names where no file beside it says which tokens they are.
KNOWN_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
KNOWN_BEGINNINGS = ("<|begin_of_text|>", "<s>", "<bos>")
LARGEST_VOCABULARY = 2**26
ALIAS, FIRST_NUMBER = "\ufdd3", 0xF0000  # no character, and a number; together no text
PLAIN_TOKEN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}

SPACE = "\u2581"  # what sentencepiece writes for a space
BYTE = re.compile("<0x([0-9A-F]{2})>")

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


class TextEncoder(Protocol):
    """The protocol of all kinds of tokenizers."""

    vocab_size: int
    specials: dict[str, int]
    bos_id: int | None
    eos_id: int | None
    begins: bool
    """Whether a text begins with BOS by the convention of its kind."""
    convention: str
    """What says so, for people."""

    def encode_batch(self, texts: list[str]) -> list[Ids]:
        """Encodes as ordinary tokens only. Raises TypeError or UnicodeEncodeError for text that is
        not Unicode."""

    def encode_pieces(self, pieces: Sequence[str | int]) -> tuple[Ids, Spots, Spots]:
        """Encodes text with special tokens in between; returns also where each token began and
        ended, in characters, of which a special token counts as one."""

    def decode(self, ids: list[int]) -> str:
        """Returns the text of ordinary tokens."""

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Returns the text of each of any ids below vocab_size."""


def need_for_text(package: str) -> Any:
    """Imports a tokenizer's library."""
    return need(package, "text", "text", note=" (random tokens and token shards do without)")


def num_threads() -> int:
    """The cores of this process, or one: by the variable that Hugging Face's library obeys."""
    wish = os.environ.get("TOKENIZERS_PARALLELISM", "").lower()
    if wish in ("off", "false", "f", "no", "n", "0"):
        return 1
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class HuggingFace:
    """A tokenizer.json, read by Hugging Face's tokenizers."""

    def __init__(self, path: Path, data: bytes, beside: Beside) -> None:
        library = need_for_text("tokenizers")
        try:
            self._tokenizer = library.Tokenizer.from_str(data.decode())
        except Exception as error:  # the library raises nothing narrower
            raise DataError(f"{path} is no tokenizer: {error}") from None
        _undisturbed(self._tokenizer)
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
        self._library, self._data = library, data

    def encode_batch(self, texts: list[str]) -> list[Ids]:
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [self._without_leaks(np.fromiter(one.ids, dtype=np.int32)) for one in encoded]

    def encode_pieces(self, pieces: Sequence[str | int]) -> tuple[Ids, Spots, Spots]:
        tokenizer, aliases, real_ids = self._aliased
        text = "".join(piece if isinstance(piece, str) else aliases[piece] for piece in pieces)
        found = tokenizer.encode(text, add_special_tokens=False)
        ids = np.asarray([real_ids.get(i, i) for i in found.ids], np.int32)
        # An alias is two characters, and its special token counts as one.
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        seconds = np.append(0, np.cumsum(codes == ord(ALIAS)))
        spots = np.asarray(found.offsets, np.int64).reshape(-1, 2)
        spots = spots - seconds[spots]
        return ids, spots[:, 0], spots[:, 1]

    @cached_property
    def _aliased(self) -> tuple[Any, dict[int, str], dict[int, int]]:
        """The tokenizer, with names for its special tokens that no text has, these names by id, and
        the ids that are meant by its own. So text with special tokens is encoded as one, and their
        usual names in it are text. In parts it would not be the same: many tokenizers put a space
        before what begins a text, and take spaces away beside some special tokens."""
        rules = json.loads(self._data)
        aliases = {i: ALIAS + chr(FIRST_NUMBER + n) for n, i in enumerate(self.specials.values())}
        listed = {token["content"]: token for token in rules.get("added_tokens") or []}
        for name, i in self.specials.items():
            token = listed.setdefault(name, {"id": i, **PLAIN_TOKEN})
            token |= {"content": aliases[i], "special": True}
        rules["added_tokens"] = sorted(listed.values(), key=lambda token: token["id"])
        rules["post_processor"] = None  # it adds nothing here, but may take spaces off the places
        tokenizer = self._library.Tokenizer.from_str(json.dumps(rules))
        _undisturbed(tokenizer)
        own_ids = {
            tokenizer.token_to_id(token["content"]): token["id"] for token in listed.values()
        }
        return tokenizer, aliases, own_ids

    def with_specials(self, ids: Mapping[str, int]) -> bytes:
        """The file with some more special tokens."""
        rules = json.loads(self._data)
        for name, i in ids.items():
            if self._tokenizer.token_to_id(name) is not None:
                raise DataError(
                    f"sft.new_tokens: {name!r} is an ordinary token of this tokenizer already"
                )
            token = {"id": i, "content": name, **PLAIN_TOKEN, "special": True}
            rules["added_tokens"] = [*(rules.get("added_tokens") or []), token]
        return json.dumps(rules, ensure_ascii=False).encode()

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
        """Spells each special token's name, character by character; unknown is what text may well
        be."""
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


def _one_by_one(
    pieces: Sequence[str | int], encode: Callable[[str], Spotted]
) -> tuple[Ids, Spots, Spots]:
    """Encodes text between special tokens by itself, as both libraries have it."""
    found: Spotted = []
    place = 0
    for piece in pieces:
        if isinstance(piece, int):
            found.append((piece, place, place + 1))
            place += 1
        elif piece:
            found += [(i, place + start, place + stop) for i, start, stop in encode(piece)]
            place += len(piece)
    table = np.asarray(found, np.int64).reshape(-1, 3)
    return table[:, 0].astype(np.int32), table[:, 1], table[:, 2]


def _characters(text: str) -> Spots:
    """Which character each byte of a text belongs to."""
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    sizes = 1 + (codes > 0x7F).astype(np.int64) + (codes > 0x7FF) + (codes > 0xFFFF)
    return np.repeat(np.arange(len(codes)), sizes)


def _undisturbed(tokenizer: Any) -> None:
    """Undoes what a file may ask for that is right in front of a model, and wrong for a corpus."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None


class SentencePiece:
    """A tokenizer.model of sentencepiece."""

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

    def encode_pieces(self, pieces: Sequence[str | int]) -> tuple[Ids, Spots, Spots]:
        return _one_by_one(pieces, self._encode_with_spots)

    def _encode_with_spots(self, text: str) -> Spotted:
        found = self._model.encode(text, return_type="proto").pieces
        character = np.append(_characters(text), len(text)).tolist()  # of each byte
        return [(one.id, character[one.begin], character[one.end]) for one in found]

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


class Tiktoken:
    """A tokenizer.model of tiktoken's ranks, as Llama 3 has it."""

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

    def encode_pieces(self, pieces: Sequence[str | int]) -> tuple[Ids, Spots, Spots]:
        return _one_by_one(pieces, self._encode_with_spots)

    def _encode_with_spots(self, text: str) -> Spotted:
        ids = self._encode(text).tolist()
        # How many bytes each token has, and which character each byte belongs to.
        ends = np.cumsum([len(self._encoding.decode_single_token_bytes(i)) for i in ids])
        starts = ends - np.diff(ends, prepend=0)
        of_byte = _characters(text)
        return list(
            zip(ids, of_byte[starts].tolist(), (of_byte[ends - 1] + 1).tolist(), strict=True)
        )

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
