"""Small tokenizers of every kind, made by the libraries that own the formats."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import sentencepiece
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from overland.apps.data.tokenizer_training import train_tokenizer
from overland.data.tokenizer_encoders import SPLIT

CORPUS = [Path(json.__file__).with_name(name).read_text() for name in ("decoder.py", "encoder.py")]

TEXTS = [
    "",
    "the quick brown fox",
    " two  spaces, and\ta tab ",
    "CRLF\r\nand LF\n\n\nand CR\r",
    "a NUL \0 inside",
    "中文没有空格。日本語も、한국어도",
    "emoji 👩‍👩‍👧 and e\u0301, naïve, ß",
    "don't 123456789 {'a': [1.5e-3]}",
    "<s> </s> <unk> <|endoftext|> <|end_of_text|> <|eot_id|> [SEP]",
    *CORPUS,
]


def write_hf(folder: Path) -> None:
    train_tokenizer(CORPUS, 600, folder / "tokenizer.json")
    config = {"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_unigram(folder: Path) -> None:
    write_sentencepiece(folder, "unigram")


def write_bpe(folder: Path) -> None:
    write_sentencepiece(folder, "bpe")


def write_sentencepiece(folder: Path, kind: str) -> None:
    with (folder / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(line for text in CORPUS for line in text.splitlines()),
            model_writer=file,
            model_type=kind,
            vocab_size=600,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            minloglevel=2,
        )


def write_ranks(folder: Path) -> None:
    """tiktoken's file, out of a byte-level BPE trained with Llama 3's split."""
    tokenizer = byte_level_bpe()
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    lines = [f"{base64.b64encode(as_bytes(token)).decode()} {rank}\n" for token, rank in tokens]
    (folder / "tokenizer.model").write_text("".join(lines))


def byte_level_bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def as_bytes(token: str) -> bytes:
    """Byte-level BPE writes printable bytes as themselves, the others as characters from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    codes = {256 + i: byte for i, byte in enumerate(others)} | {byte: byte for byte in printable}
    return bytes(codes[ord(character)] for character in token)


KINDS = {
    "tokenizer.json": write_hf,
    "sentencepiece unigram": write_unigram,
    "sentencepiece bpe": write_bpe,
    "tiktoken": write_ranks,
}


def written_kinds(root: Path) -> Iterator[tuple[str, Path]]:
    for kind, write in KINDS.items():
        folder = root / kind.replace(" ", "-")
        folder.mkdir()
        write(folder)
        yield kind, folder
