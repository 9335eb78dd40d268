"""A tokenizer of one's own, where no model brings one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from overland.data.tokenizer_encoder import need_for_text

END_OF_TEXT = "<|endoftext|>"
SMALLEST = 257  # every byte, and the end of a document


def train_tokenizer(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Trains a byte-level BPE tokenizer on the texts and writes it as tokenizer.json."""
    need_for_text("tokenizers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
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
