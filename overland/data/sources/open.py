"""From a path to its source: the format shows in the files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from overland.data.errors import DataError
from overland.data.sources.arrow import Arrow
from overland.data.sources.compression import bare_suffix
from overland.data.sources.huggingface import choose_split, saved_files, select_files
from overland.data.sources.jsonl import JSON_SUFFIXES, JsonLines
from overland.data.sources.mds import MDS
from overland.data.sources.mds_index import is_mds
from overland.data.sources.megatron import Megatron
from overland.data.sources.numpy_tokens import NumpyTokens
from overland.data.sources.parquet import Parquet
from overland.data.sources.source import FileSource
from overland.data.sources.text import TEXT_SUFFIXES, TextFolder

SUFFIXES = {
    "parquet": {".parquet"},
    "arrow": {".arrow", ".feather"},
    "megatron": {".idx"},
    "numpy": {".npy", ".bin"},
    "jsonl": JSON_SUFFIXES,
    "text": TEXT_SUFFIXES,
}
STAND_ALONE = {"parquet", "arrow", "megatron", "numpy"}
FORMATS = {suffix: name for name, suffixes in SUFFIXES.items() for suffix in suffixes}
# About the data, not data; only where a folder is searched, so naming one still reads it.
DESCRIPTIONS = {
    "readme.md", "license.md", "license.txt", "dataset_info.json", "dataset_infos.json",
    "dataset_dict.json", "state.json", "metadata.json", "config.json", "index.json",
}  # fmt: skip


def open_source(
    path: Path | str,
    *,
    column: str | None = None,
    subset: str | None = None,
    split: str | None = None,
    dtype: str | None = None,
    skip_bad: bool = False,
    held_out: bool = False,
) -> FileSource:
    """The corpus at `path`: a file, a folder, or the prefix of a Megatron pair. Nothing is read but
    what it takes to settle files and column.

    `column` holds the documents; `subset` and `split` choose a part of a dataset; `dtype` is of
    ids whose file does not say it. `skip_bad` passes over bad documents and counts them. `held_out`
    takes the validation or test split of a dataset that has splits, where none is asked for.
    """
    path = Path(path).expanduser()
    path = path if path.name else path.resolve()  # "." and "/" have no name of their own
    index = path.with_name(path.name + ".idx")
    if not path.exists() and index.exists():
        path = index
    if not path.exists():
        raise DataError(f"{path} does not exist")
    if path.name == "index.json" and is_mds(path.parent):
        path = path.parent
    if path.is_file():
        name = _format_of(path)
        if name is None:
            raise DataError(f"{path}: its format is not known; {_known()}")
        if name == "megatron":
            path = path.with_suffix(".idx")
        if subset or split:
            raise DataError(f"{path} is one file: it has no subsets and no splits")
        return _open(name, path.parent, [path.name], column, dtype, skip_bad)
    if (path / "corpus.json").is_file():
        # Late, because what a corpus is made of is itself described by means of sources.
        from overland.data.sources.corpus import BuiltCorpus

        return BuiltCorpus(path, skip_bad)
    mds = _mds_folder(path, subset, split, held_out)
    if mds is not None:
        return MDS(mds, column, dtype, skip_bad)
    saved = saved_files(path, subset, split, held_out)
    if saved is not None:
        folder, files = saved
        return _open("arrow", folder, files, column, dtype, skip_bad)
    files = select_files(path, _data_files(path), subset, split, held_out)
    return _open(_one_format(path, files), path, files, column, dtype, skip_bad)


def _open(
    name: str,
    root: Path,
    files: list[str],
    column: str | None,
    dtype: str | None,
    skip_bad: bool,
) -> FileSource:
    if name in ("megatron", "numpy", "text") and column not in (None, "text"):
        raise DataError(f"{root} is {name}: it has no column {column!r}, nor any other")
    if name == "megatron":
        return Megatron(root, files, skip_bad)
    if name == "numpy":
        return NumpyTokens(root, files, dtype, skip_bad)
    if name == "text":
        return TextFolder(root, files, skip_bad)
    kinds: dict[str, type[Parquet] | type[Arrow] | type[JsonLines]] = {
        "parquet": Parquet, "arrow": Arrow, "jsonl": JsonLines
    }  # fmt: skip
    return kinds[name](root, files, column, skip_bad)


def _data_files(root: Path) -> list[str]:
    """All files that may be data, in order; none that is hidden or describes the others."""
    found: dict[str, str] = {}
    for path in sorted(root.rglob("*")):
        parts, name = path.relative_to(root).parts, _format_of(path)
        # Spark and its kin keep what is not yet data under `_`; text has its __init__.py.
        hidden = "." if name == "text" else (".", "_")
        is_bin_of_pair = name == "megatron" and path.suffix == ".bin"
        if name is None or is_bin_of_pair or any(part.startswith(hidden) for part in parts):
            continue
        if path.is_file():
            found["/".join(parts)] = name
    files = [file for file in found if not _describes(file, set(found.values()))]
    if not files:
        raise DataError(f"{root} is empty: it holds nothing that is read; {_known()}")
    return files


def _describes(file: str, formats: set[str]) -> bool:
    """A note beside data is about it; among texts a README is a text."""
    if formats & STAND_ALONE:
        return file.endswith((*TEXT_SUFFIXES, ".json"))
    is_lines = bare_suffix(Path(file)) in JSON_SUFFIXES
    return (is_lines or "jsonl" in formats) and Path(file).name.lower() in DESCRIPTIONS


def _one_format(root: Path, files: Iterable[str]) -> str:
    """Text may have JSON lines beside it; everything else stands alone."""
    found = {_format_of(root / file) or "" for file in files}
    if found == {"text", "jsonl"}:
        return "text"
    if len(found) > 1:
        names = " and ".join(sorted(found))
        raise DataError(f"{root} holds {names} files: name the file or folder that is meant")
    return found.pop()


def _format_of(path: Path) -> str | None:
    name = FORMATS.get(bare_suffix(path))
    if path.suffix == ".bin" and path.with_suffix(".idx").is_file():
        return "megatron"
    # Only text and JSON lines are read when compressed as a whole.
    return name if name in ("text", "jsonl") or bare_suffix(path) == path.suffix else None


def _mds_folder(path: Path, subset: str | None, split: str | None, held_out: bool) -> Path | None:
    """MDS keeps its splits in folders, each with an index."""
    folder = path / subset if subset and (path / subset).is_dir() else path
    if is_mds(folder):
        if split is not None or (subset and folder is path):
            raise DataError(f"{folder} is MDS in one piece: it has no subset or split to choose")
        return folder
    splits = [one.name for one in sorted(folder.iterdir()) if one.is_dir() and is_mds(one)]
    return folder / choose_split(split, splits, folder, held_out) if splits else None


def _known() -> str:
    names = {name: " ".join(sorted(suffixes)) for name, suffixes in SUFFIXES.items()}
    return "known: MDS folders, " + ", ".join(f"{name} ({which})" for name, which in names.items())
