"""The three kinds of tokenizers behind one protocol, each read with its own library: Hugging Face's
tokenizer.json, sentencepiece models, and tiktoken's ranks as in Llama 3; and the token with which
each of them begins a text.

A `tokenizer.json` is read with Hugging Face's tokenizers. A `tokenizer.model` is a sentencepiece
model, as in Llama 2, Mistral and Gemma, or a list of tiktoken ranks, as in Llama 3's `original/`
folder. Ranks contain only the tokens: how text is split beforehand, and which special tokens follow
them, is Meta's convention.
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

from overland.data.tokenizer_files import Beside, check_rules, library_errors
from overland.errors import DataError
from overland.plugins import need

Ids = npt.NDArray[np.int32]
Spots = npt.NDArray[np.int64]
"""Offsets in a text, in characters."""
Spotted = list[tuple[int, int, int]]
"""Tokens: the id, where it begins, and where it ends."""
# Names to look for if no other file says which tokens these are.
KNOWN_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
KNOWN_BEGINNINGS = ("<|begin_of_text|>", "<s>", "<bos>")
LARGEST_VOCABULARY = 2**26
ALIAS, FIRST_NUMBER = "\ufdd3", 0xF0000  # a noncharacter, and a number: never found in text
PLAIN_TOKEN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}

SPACE = "\u2581"  # what sentencepiece writes for a space
BYTE = re.compile("<0x([0-9A-F]{2})>")

# Contractions; words with a leading symbol; up to three digits; symbols; line ends; spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NUM_SPECIALS = 256
BEGIN, END = 0, 1
# By their place after the ranks; the others are reserved and numbered. In Llama 3 itself, 4, 8 and
# 10 were still reserved; Llama 3.1 uses them.
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
# Other families split text in other ways, and nothing in their ranks would show it.
OTHERS = {200_000: "Llama 4", 163_584: "Kimi", 151_643: "Qwen"}
# The library (0.14) crashes on 999,122 consecutive blanks; 4,000,000 of other repeated characters
# take less than a second. Runs that fill a stretch of this length are therefore cut, and the
# longest run that remains is twice as long. Text without such runs is never cut.
LONG_BLANK = 250_000


class TextEncoder(Protocol):
    """The protocol of all three kinds of tokenizers."""

    vocab_size: int
    specials: dict[str, int]
    bos_id: int | None
    eos_id: int | None
    begins: bool
    """Whether a text begins with BOS by the convention of its kind."""
    convention: str
    """The reason, for messages."""

    def encode_batch(self, texts: list[str]) -> list[Ids]:
        """Encodes texts as ordinary tokens only. Raises TypeError or UnicodeEncodeError for text
        that is not valid Unicode."""

    def encode_pieces(self, pieces: Sequence[str | int]) -> tuple[Ids, Spots, Spots]:
        """Encodes text with special tokens in between; also returns where each token begins and
        ends, in characters (a special token counts as one)."""

    def decode(self, ids: list[int]) -> str:
        """Returns the text of ordinary tokens."""

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Returns the text of each id, for any ids below vocab_size."""


def need_for_text(package: str) -> Any:
    """Imports a tokenizer's library."""
    return need(package, "text", "text", note=" (random tokens and token shards do not need it)")


def num_threads() -> int:
    """Returns the number of cores of this process, or 1 if TOKENIZERS_PARALLELISM is off, which
    Hugging Face's library obeys, too."""
    wish = os.environ.get("TOKENIZERS_PARALLELISM", "").lower()
    if wish in ("off", "false", "f", "no", "n", "0"):
        return 1
    return num_cores()


def num_cores() -> int:
    """Returns how many cores this process may use: Slurm may grant a task only some of a node's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class HuggingFace:
    """A tokenizer.json, read with Hugging Face's tokenizers."""

    def __init__(self, path: Path, data: bytes, beside: Beside) -> None:
        library = need_for_text("tokenizers")
        self._path = path
        try:
            check_rules(json.loads(data), path)
            with library_errors(path):
                self._tokenizer = library.Tokenizer.from_str(data.decode())
        except DataError:
            raise
        except Exception as error:  # the library raises nothing more specific
            raise DataError(f"{path} is not a tokenizer: {error}") from None
        _undisturbed(self._tokenizer)
        self._tokenizer.encode_special_tokens = True  # their names in a text are ordinary text

        token_id = self._tokenizer.token_to_id
        self.eos_id = beside.find("eos_token", token_id, self._first(KNOWN_ENDS))
        self.bos_id = beside.find("bos_token", token_id, self._first(KNOWN_BEGINNINGS))
        with library_errors(path):
            first = self._tokenizer.encode("a").ids[:1]  # with what its post-processor adds
        self.begins, self.convention = first == [self.bos_id], "by its post-processor"
        for special in {self.bos_id, self.eos_id} - {None}:
            # Some files list them as ordinary tokens, so that text would give them.
            self._tokenizer.add_special_tokens([self._tokenizer.id_to_token(special)])

        self.vocab_size = 1 + max(self._tokenizer.get_vocab().values(), default=0)
        if self.vocab_size > LARGEST_VOCABULARY:
            raise DataError(
                f"{path} has a token with id {self.vocab_size - 1:,}, which is too large for any "
                "model"
            )
        added = self._tokenizer.get_added_tokens_decoder()
        self.specials = {token.content: i for i, token in added.items() if token.special}
        self._spellings = self._spell_specials(json.loads(data)["model"])
        self._leaks = np.zeros(self.vocab_size, dtype=bool)
        self._leaks[list(self._spellings)] = True
        self._library, self._data = library, data

    def encode_batch(self, texts: list[str]) -> list[Ids]:
        with library_errors(self._path):
            encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [self._without_leaks(np.fromiter(one.ids, dtype=np.int32)) for one in encoded]

    def encode_pieces(self, pieces: Sequence[str | int]) -> tuple[Ids, Spots, Spots]:
        tokenizer, aliases, real_ids = self._aliased
        text = "".join(piece if isinstance(piece, str) else aliases[piece] for piece in pieces)
        with library_errors(self._path):
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
        """The tokenizer with aliases for its special tokens that never occur in text, the aliases
        by id, and the real ids by its own. This way, text with special tokens is encoded in one
        piece, and their usual names are ordinary text. Encoding the parts separately would differ:
        many tokenizers add a space at the start of a text, and remove spaces next to some special
        tokens."""
        rules = json.loads(self._data)
        aliases = {i: ALIAS + chr(FIRST_NUMBER + n) for n, i in enumerate(self.specials.values())}
        listed = {token["content"]: token for token in rules.get("added_tokens") or []}
        for name, i in self.specials.items():
            token = listed.setdefault(name, {"id": i, **PLAIN_TOKEN})
            token |= {"content": aliases[i], "special": True}
        rules["added_tokens"] = sorted(listed.values(), key=lambda token: token["id"])
        rules["post_processor"] = None  # it adds nothing here, but may trim spaces from offsets
        tokenizer = self._library.Tokenizer.from_str(json.dumps(rules))
        _undisturbed(tokenizer)
        own_ids = {
            tokenizer.token_to_id(token["content"]): token["id"] for token in listed.values()
        }
        return tokenizer, aliases, own_ids

    def with_specials(self, ids: Mapping[str, int]) -> bytes:
        """Returns the file with additional special tokens."""
        rules = json.loads(self._data)
        for name, i in ids.items():
            if self._tokenizer.token_to_id(name) is not None:
                raise DataError(
                    f"sft.new_tokens: {name!r} is already an ordinary token of this tokenizer"
                )
            token = {"id": i, "content": name, **PLAIN_TOKEN, "special": True}
            rules["added_tokens"] = [*(rules.get("added_tokens") or []), token]
        return json.dumps(rules, ensure_ascii=False).encode()

    def decode(self, ids: list[int]) -> str:
        with library_errors(self._path):
            return str(self._tokenizer.decode(ids))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        # Decoders drop the space at the start of a text, so each piece is decoded after a token.
        first = self._tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        start = self._tokenizer.decode(first)
        texts = self._tokenizer.decode_batch([[*first, i] for i in ids], skip_special_tokens=False)
        return [text.removeprefix(start) for text in texts]

    def _without_leaks(self, ids: Ids) -> Ids:
        """Spells out special tokens that were found in text. Models that list them as ordinary
        pieces (Unigram: T5, XLM-R) find them nevertheless."""
        if not self._leaks.take(ids).any():
            return ids
        words = (self._spellings.get(i, [i]) for i in ids.tolist())
        return np.fromiter(itertools.chain.from_iterable(words), dtype=np.int32)

    def _spell_specials(self, model: dict[str, Any]) -> dict[int, list[int]]:
        """Spells each special token's name, character by character, but not the unknown token,
        which text may give."""
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
    """Encodes the text between special tokens separately, as both libraries do."""
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
    """Returns the character that each byte of a text belongs to."""
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    sizes = 1 + (codes > 0x7F).astype(np.int64) + (codes > 0x7FF) + (codes > 0xFFFF)
    return np.repeat(np.arange(len(codes)), sizes)


def _undisturbed(tokenizer: Any) -> None:
    """Turns off settings of a file that suit a model's input but not a corpus: truncation, padding
    and dropout."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None


class SentencePiece:
    """A tokenizer.model that is a sentencepiece model."""

    def __init__(self, path: Path, data: bytes, beside: Beside) -> None:
        library = need_for_text("sentencepiece")
        self._model = library.SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(data)
        except RuntimeError:
            raise DataError(
                f"{path} is neither a sentencepiece model nor tiktoken ranks: download it again"
            ) from None
        size = self._model.vocab_size()
        # Added tokens come after the model's own, and are never found in text.
        self._added = {i: name for name, i in beside.added.items() if i >= size}
        self.vocab_size = max([size - 1, *self._added]) + 1
        controls = {self._model.id_to_piece(i): i for i in range(size) if self._model.is_control(i)}
        self.specials = controls | {name: i for i, name in self._added.items()}
        self.bos_id = beside.find("bos_token", self._id, _or_none(self._model.bos_id()))
        self.eos_id = beside.find("eos_token", self._id, _or_none(self._model.eos_id()))
        # Meta's code for Llama 2 and Hugging Face's for this family begin every text with BOS.
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
        if i >= self._model.vocab_size():  # a gap between added tokens
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
    """A tokenizer.model with tiktoken ranks, as in Llama 3."""

    def __init__(self, path: Path, data: bytes, beside: Beside) -> None:
        library = need_for_text("tiktoken")
        ranks = _read_ranks(path, data)
        if len(ranks) in OTHERS:
            raise DataError(
                f"{path} has the {len(ranks):,} ranks of {OTHERS[len(ranks)]}, but only those of "
                "Llama 3 are supported: use the model's tokenizer.json"
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
        # Several parts per thread, because texts differ in length; a task per text would cost more
        # than encoding the text.
        size = -(-len(texts) // (8 * threads))
        parts = [texts[i : i + size] for i in range(0, len(texts), size)]
        with ThreadPoolExecutor(threads) as pool:
            return list(itertools.chain.from_iterable(pool.map(self._encode_some, parts)))

    def encode_pieces(self, pieces: Sequence[str | int]) -> tuple[Ids, Spots, Spots]:
        return _one_by_one(pieces, self._encode_with_spots)

    def _encode_with_spots(self, text: str) -> Spotted:
        ids = self._encode(text).tolist()
        # From the bytes of each token to the characters that they belong to.
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
        # No special token is allowed or disallowed: their names in a text are ordinary text.
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
                f"{path}:{number}: expected a token in base64 and its rank; download it again"
            ) from None
    whole = sorted(ranks.values()) == list(range(len(ranks)))
    if not whole or any(bytes([byte]) not in ranks for byte in range(256)):
        raise DataError(f"{path} is damaged, because some ranks are missing: download it again")
    return ranks
