"""From names in a config to blocks: finds or trains the tokenizer, finds or builds shards."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from overland.config.schema import JobConfig
from overland.data import registry
from overland.data.errors import DataError
from overland.data.loader import Blocks, RandomTokens, ShardBlocks
from overland.data.shards import TokenShards, build_shards, fingerprint, wait_for_shards
from overland.data.sources import Source
from overland.data.tokenizer import Tokenizer, train_tokenizer

# Text that a tokenizer is trained on at most; more changes little at these vocabulary sizes.
TOKENIZER_DOCUMENTS = 20_000

Report = Callable[[str], None]


@dataclass(frozen=True)
class Dataset:
    """Blocks to train on, and the tokenizer that made them (none for random tokens)."""

    name: str
    blocks: Blocks
    tokenizer: Tokenizer | None
    num_tokens: int | None = None
    fingerprint: str = ""
    """Of everything that decides which row comes when; a checkpoint keeps it."""


def training_data(config: JobConfig, vocab_size: int, builds: bool, report: Report) -> Dataset:
    """The training set. `builds`: this rank does the work that one rank per node does."""
    training = config.training
    return _dataset(
        config, training.dataset, training.dataset_path, training.seq_len, vocab_size, True,
        builds, report,
    )  # fmt: skip


def validation_data(
    config: JobConfig, vocab_size: int, builds: bool, report: Report
) -> list[Dataset]:
    """The held-out sets, in the order of their names; read in order, never shuffled."""
    validation = config.validation
    if not validation.enable:
        return []
    names = [validation.dataset] if isinstance(validation.dataset, str) else validation.dataset
    seq_len = validation.seq_len or config.training.seq_len
    return [
        _dataset(config, name, validation.dataset_path, seq_len, vocab_size, False, builds, report)
        for name in names
    ]


def find_tokenizer(config: JobConfig, builds: bool = True, report: Report = print) -> Tokenizer:
    """The model's own tokenizer, or one trained on the training text and kept in `data.folder`."""
    if config.model.hf_assets_path is not None:
        return Tokenizer(Path(config.model.hf_assets_path).expanduser())
    source = registry.open_source(
        config.training.dataset, config.training.dataset_path, config.data
    )
    label = _label(config.training.dataset, config.training.dataset_path)
    size = config.data.vocab_size
    path = Path(config.data.folder).expanduser() / f"tokenizer-{label}-{size}" / "tokenizer.json"
    if not path.exists():
        if builds:
            report(f"training a tokenizer of {size:,} tokens on {label}")
            _train(source, size, path)
        else:
            _wait_for(path)
    return Tokenizer(path)


def _dataset(
    config: JobConfig,
    name: str,
    path: str | None,
    seq_len: int,
    vocab_size: int,
    shuffle: bool,
    builds: bool,
    report: Report,
) -> Dataset:
    seed = config.debug.seed
    if path is None and name == registry.RANDOM:
        mask = config.data.document_mask
        tokens = RandomTokens(vocab_size, seq_len, seed, document_mask=mask)
        return Dataset(name, tokens, None, fingerprint=f"random-{vocab_size}-{seq_len}-{seed}")
    folder = Path(path).expanduser() if path else registry.find_folder(name, config.data)
    if folder is not None and (folder / "shards.json").exists():
        shards, tokenizer = TokenShards(folder), None
    else:
        source = registry.open_source(name, path, config.data)
        tokenizer = find_tokenizer(config, builds, report)
        shards = _find_or_build(config, source, tokenizer, _label(name, path), builds, report)
    if shards.info.vocab_size > vocab_size:
        raise DataError(
            f"{name} has a vocabulary of {shards.info.vocab_size:,} tokens, the model only "
            f"{vocab_size:,}: set model.overrides.vocab_size or use the model's own tokenizer"
        )
    blocks = ShardBlocks(
        shards, seq_len, seed, shuffle=shuffle, document_mask=config.data.document_mask
    )
    mark = f"{shards.info.fingerprint}-{seq_len}-{seed}"
    return Dataset(name, blocks, tokenizer, shards.info.num_tokens, mark)


def _find_or_build(
    config: JobConfig,
    source: Source,
    tokenizer: Tokenizer,
    label: str,
    builds: bool,
    report: Report,
) -> TokenShards:
    root = Path(config.data.folder).expanduser()
    folder = root / f"{label}-{fingerprint(source, tokenizer)}"
    if not (folder / "shards.json").exists():
        if builds:
            report(f"tokenising {label} into {folder}")
            build_shards(source, tokenizer, folder)
        else:
            wait_for_shards(folder)
    return TokenShards(folder)


def _train(source: Source, vocab_size: int, path: Path) -> None:
    texts = (text for chunk in source.chunks() for text in source.read(chunk))
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    train_tokenizer(itertools.islice(texts, TOKENIZER_DOCUMENTS), vocab_size, beside)
    beside.rename(path)


def _wait_for(path: Path) -> None:
    import time

    while not path.exists():
        time.sleep(0.2)


def _label(name: str, path: str | None) -> str:
    """What is made from a dataset is called after it; two folders of one name stay apart."""
    if path is None:
        return name
    place = Path(path).expanduser().resolve()
    return f"{place.name}-{hashlib.blake2b(bytes(place), digest_size=4).hexdigest()}"
