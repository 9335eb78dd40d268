"""The run folder and what lies where in it."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from overland.config.schema import JobConfig


@dataclass(frozen=True)
class RunFolder:
    root: Path
    tb: Path
    checkpoints: Path
    traces: Path
    memory_snapshots: Path
    fallback: Path | None
    """For a last save that the run folder's disk refuses."""

    @classmethod
    def of(cls, config: JobConfig) -> RunFolder:
        root = Path(config.job.dump_folder).expanduser()
        return cls(
            root,
            tb=below(root, config.metrics.save_tb_folder),
            checkpoints=root / config.checkpoint.folder,
            traces=below(root, config.profiling.save_traces_folder),
            memory_snapshots=below(root, config.profiling.save_memory_snapshot_folder),
            fallback=Path(config.checkpoint.fallback_folder) / root.absolute().name
            if config.checkpoint.fallback_folder
            else None,
        )

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def undone_metrics(self) -> Path:
        """What was logged of steps that were undone: taken again, after a resume from before."""
        return self.root / "metrics.undone.jsonl"

    @property
    def plot(self) -> Path:
        return self.root / "loss.svg"

    @property
    def config(self) -> Path:
        return self.root / "config.toml"

    @property
    def readme(self) -> Path:
        return self.root / "README.md"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def tokenizer(self) -> Path:
        return self.root / "tokenizer"

    @property
    def data(self) -> Path:
        """The plan of the data, counts of what its windows hold, and the ledger."""
        return self.root / "data"

    @property
    def fallback_ledger(self) -> Path | None:
        """What of the ledger belongs to a checkpoint in the fallback folder."""
        return self.fallback / "ledger.bin" if self.fallback is not None else None

    @property
    def ledger(self) -> Path:
        return self.data / "ledger.bin"

    @property
    def hf(self) -> Path:
        return self.root / "hf"

    @property
    def done(self) -> Path:
        """There once the last step is taken and saved; holds its number. Job scripts read it."""
        return self.root / "done"

    def steps_done(self) -> int:
        try:
            return int(self.done.read_text())
        except (FileNotFoundError, ValueError):
            return 0

    def kept_epochs(self) -> float:
        """`training.epochs` of the run as its config.toml has it; 0 without."""
        try:
            kept = tomllib.loads(self.config.read_text())
            return float(kept.get("training", {}).get("epochs", 0))
        except (OSError, ValueError, TypeError, AttributeError):
            return 0.0

    def mark_done(self, steps: int) -> None:
        beside = self.root / ".done"
        beside.write_text(f"{steps}\n")
        beside.rename(self.done)


def below(root: Path, folder: str) -> Path:
    """A folder of the run. One that lies elsewhere may be shared by runs, and each has its own
    part of it, by name."""
    path = Path(folder).expanduser()
    return path / root.absolute().name if path.is_absolute() else root / path


def fresh_folder(wanted: str) -> str:
    """`wanted`, or the first of `wanted-2`, `wanted-3`, … that no run has used."""
    number, candidate = 1, Path(wanted).expanduser()
    while candidate.exists() and any(candidate.iterdir()):
        number += 1
        candidate = Path(f"{wanted.rstrip('/')}-{number}").expanduser()
    return str(candidate)
