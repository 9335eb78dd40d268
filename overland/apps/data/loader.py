"""The training loader on its own, for a user's own scripts and models.

loader = build_train_loader(mds_root="fineweb-edu", strategy="pack", tokenizer_name="llama",
                            seq_len=2048, micro_blocks=64, local_cache="/tmp/mds_cache")
for batch in loader:                       # never ends
    model(**batch).loss.backward()         # a Hugging Face model; others: shifted=True
torch.save(loader.state_dict(), …)         # a number, and the plan it counts in
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

from overland.config.schema import Data, Debug, JobConfig, Model, Training
from overland.data.batch import Array, read_ahead
from overland.data.corpora import Preparer
from overland.data.lanes import RowFields, Rows, tokens_and_labels, with_borders
from overland.data.pack import Packing
from overland.data.prepare import Dataset, training_data
from overland.data.sources import open_source
from overland.errors import ChoiceRequired, DataError
from overland.words import command
from overland.world.launchers import srun_step


def build_train_loader(
    mds_root: str | Path,
    strategy: Literal["pack", "overflow", "trunc", "best_fit"] = "pack",
    tokenizer_name: str | None = None,
    seq_len: int = 2048,
    micro_blocks: int = 64,
    local_cache: str | Path | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    seed: int = 0,
    document_mask: bool = False,
    skip_bad: bool = True,
    shifted: bool = False,
    add_bos: bool | None = None,
    column: str | None = None,
) -> TrainLoader:
    """Returns batches of `micro_blocks` sequences for this rank, from a corpus of any format.

    A batch is what a Hugging Face model takes, `model(**batch).loss`: `labels` are the `input_ids`
    themselves (-100 for no loss), and the model shifts them by one. The last token of a row
    therefore predicts nothing: a row of `seq_len` tokens gives `seq_len - 1` predictions, and the
    prediction across the end of a full row is lost. With `shifted=True`, none is lost.

    Args:
        mds_root: A folder of MDS shards, or any other corpus that `overland data inspect` reads.
        strategy: How documents become sequences; see `data.packing`.
        tokenizer_name: A folder with a tokenizer, or a name whose files are in the Hugging Face
            cache; not needed for token ids.
        seq_len: Tokens per sequence.
        micro_blocks: Sequences per batch and rank.
        local_cache: Folder for token shards, shared by all ranks that see it; default: `./data`.
        rank: The number of this process among `world_size`; default: from torchrun or Slurm.
        world_size: Number of ranks that share the data; default: from torchrun or Slurm.
        seed: Seed of the shuffled order.
        document_mask: Take no loss across documents, and restart positions at each document.
            The batch then has `position_ids` and no `attention_mask`, from which a Hugging Face
            model infers the boundaries; set `model.config.use_cache = False`, or it ignores them.
        skip_bad: Skip documents that are not UTF-8 text, and count them (`num_skipped`). Empty ones
            are always skipped and counted.
        shifted: For a loss of your own, `cross_entropy(logits, labels)`: each label is the token
            after its input, also at the end of a row. The batch has `input_ids`, `labels`,
            `position_ids` and `document_ids`. Do not pass these labels to a Hugging Face model: it
            would shift them again and learn to predict two tokens ahead.
        add_bos: Begin each document with BOS; default: as the tokenizer itself does. A loaded state
            and an existing corpus keep the setting that they began with.
        column: Column that holds the documents; default: text, tokens, input_ids or content.
    """
    if micro_blocks < 1 or seq_len < 1:
        raise DataError("micro_blocks and seq_len must be 1 or more")
    if strategy not in get_args(Packing):
        raise DataError(f"strategy is {strategy!r}; use one of {', '.join(get_args(Packing))}")
    rank = _from_environment("RANK", "SLURM_PROCID", 0) if rank is None else rank
    if world_size is None:
        world_size = _from_environment("WORLD_SIZE", "SLURM_NTASKS", 1)
    try:
        source = open_source(mds_root, column=column)
    except ChoiceRequired as error:
        raise error.by(f"the argument {error.option}") from None
    if source.kind == "arrays":
        raise DataError(f"{mds_root} contains arrays, but this loader reads tokens")
    if tokenizer_name is None and source.kind == "text":
        raise DataError(f"{mds_root} is text: specify the tokenizer for it with tokenizer_name")
    cache = Path(local_cache or "data").expanduser()
    tokenizer = None if tokenizer_name is None else str(_find_tokenizer(tokenizer_name))
    config = JobConfig(
        model=Model(hf_assets_path=tokenizer),
        training=Training(dataset_path=str(mds_root), seq_len=seq_len, column=column),
        data=Data(
            folder=str(cache),
            packing=strategy,
            document_mask=document_mask,
            bad_documents="skip" if skip_bad else "error",
            add_bos=add_bos,
        ),
        debug=Debug(seed=seed),
    )
    local_rank = _from_environment("LOCAL_RANK", "SLURM_LOCALID", 0)
    place = Preparer(tokenizes=local_rank == 0)
    dataset = training_data(config, micro_blocks * world_size, None, place)
    return TrainLoader(dataset, rank, world_size, shifted)


class TrainLoader:
    """Endless batches, epoch after epoch. After `load_state_dict`, they continue after the last row
    that any rank consumed, on any number of ranks."""

    def __init__(self, dataset: Dataset, rank: int, world_size: int, shifted: bool) -> None:
        self.dataset, self.rank, self.world_size = dataset, rank, world_size
        self.shifted = shifted
        self.step = 0
        self._length: int | None = None

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        ahead = read_ahead(self._batches(self.step), depth=2)
        try:
            for batch in ahead:
                self.step += 1
                yield batch
        finally:
            ahead.close()

    def __len__(self) -> int:
        """Returns the number of batches in one pass over the data, if that is known already."""
        corpora = self.dataset.rows.corpora.values()
        if self._length is None and not all(one.is_complete for one in corpora):
            raise TypeError(
                "the text is tokenized while it is read, so the number of batches is not known "
                "yet: num_batches() tokenizes all of it and counts them"
            )
        return self.num_batches()

    def __bool__(self) -> bool:
        return True

    def num_batches(self) -> int:
        """Counts the batches in one pass over the data. Text is tokenized first."""
        if self._length is None:
            self._length = self.dataset.rows.num_batches()
        return self._length

    @property
    def num_skipped(self) -> int:
        return self.dataset.num_skipped

    def state_dict(self) -> dict[str, Any]:
        plan = self.dataset.plan
        return {"step": self.step, "fingerprint": plan.fingerprint, "plan": plan.to_json()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from a state. A different or changed corpus is an error; a different number of
        ranks is not."""
        if not {"plan", "step"} <= set(state):
            raise DataError("this is not the state of a loader: it has no plan or no step")
        before = set(state["plan"]["sources"])
        if before != set(self.dataset.plan.sources):
            raise DataError(f"the state belongs to {', '.join(sorted(before))}, not to this corpus")
        self.dataset = self.dataset.continued(state["plan"], state["step"])
        self._length = None
        self.step = state["step"]

    def close(self) -> None:
        self.dataset.close()

    def _batches(self, step: int) -> Iterator[dict[str, torch.Tensor]]:
        form = _shifted if self.shifted else _aligned
        while True:
            rows = self.dataset.rows.read(step, self.rank, self.world_size)
            assert isinstance(rows, Rows)
            fields = form(rows, self.dataset.plan.segment(step).document_mask)
            yield {name: torch.from_numpy(np.array(field)) for name, field in fields.items()}
            step += 1


def _shifted(rows: Rows, mask: bool) -> dict[str, Array]:
    fields = with_borders(rows)
    if not mask:
        tokens, labels = tokens_and_labels(rows)
        places = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
        fields = RowFields(tokens, labels, places, fields.documents)
    names = ("input_ids", "labels", "position_ids", "document_ids")
    return dict(zip(names, fields, strict=True))


def _aligned(rows: Rows, mask: bool) -> dict[str, Array]:
    """Places each label at its own token, as Hugging Face does: the model shifts them."""
    if mask:
        tokens, labels, positions, _ = with_borders(rows)
        more = {"position_ids": positions}
    else:
        tokens, labels = tokens_and_labels(rows)
        real = np.arange(tokens.shape[1]) < rows.num_tokens[:, None]
        more = {"attention_mask": real.astype(np.int64)}
    # The first label of a row is never used: nothing comes before it.
    labels = np.concatenate([tokens[:, :1], labels[:, :-1]], axis=1)
    return {"input_ids": tokens, "labels": labels, **more}


def _from_environment(name: str, slurm: str, default: int) -> int:
    """Returns torchrun's variable, or else Slurm's. In a batch script and the shell of `salloc`
    Slurm's describe what the allocation could run."""
    there = None if srun_step(os.environ) is None else os.environ.get(slurm)
    return int(os.environ.get(name) or there or default)


def _find_tokenizer(name: str) -> Path:
    """Finds a folder, or the snapshot of a model in the Hugging Face cache; downloads nothing."""
    path = Path(name).expanduser()
    if path.exists():
        return path
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser()
    repository = hub / f"models--{name.replace('/', '--')}"
    reference = repository / "refs" / "main"
    if reference.is_file():
        snapshot = repository / "snapshots" / reference.read_text().strip()
        if snapshot.is_dir():
            return snapshot
    raise DataError(
        f"there is no tokenizer {name!r}, neither as a folder nor in {hub}: download it with "
        f"`{command('overland', 'fetch', 'tokenizer', name)}`, and give the folder here"
    )
