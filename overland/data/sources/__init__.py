"""Sources of documents: one class per format, each of which lists chunks and reads them;
`open_source(path)` detects the format.

A document is a text, or the token ids of one that is already tokenized. A chunk is a name, such as
`part-3.parquet#7`: a part of a file that is read front to back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from overland.data.sources.arrow_parquet import Arrow, Parquet
from overland.data.sources.compression import bare_suffix
from overland.data.sources.huggingface import choose_split, read_together, saved_files, select_files
from overland.data.sources.jsonl import JSON_SUFFIXES, JsonLines
from overland.data.sources.numpy_tokens import NumpyTokens
from overland.data.sources.source import FileSource, LeftOut, walk
from overland.data.sources.text import CSV_SUFFIXES, TEXT_SUFFIXES, CsvRows, TextFolder, header
from overland.errors import DataError
from overland.files import read_json
from overland.plugins import plugin

INDEX = "index.json"  # of MDS shards
SUFFIXES = {
    "parquet": {".parquet"},
    "arrow": {".arrow", ".feather"},
    "megatron": {".idx"},
    "numpy": {".npy", ".bin"},
    "jsonl": JSON_SUFFIXES,
    "csv": CSV_SUFFIXES,
    "text": TEXT_SUFFIXES,
}
STAND_ALONE = {"parquet", "arrow", "megatron", "numpy"}
LINES = {"text", "jsonl", "csv"}  # formats whose files may also be compressed
KINDS: dict[str, Callable[..., FileSource]] = {
    "parquet": Parquet, "arrow": Arrow, "jsonl": JsonLines, "csv": CsvRows, "text": TextFolder
}  # fmt: skip
FORMATS = {suffix: name for name, suffixes in SUFFIXES.items() for suffix in suffixes}
# Descriptions, not data. Skipped only when a folder is searched: a file that is named is read.
DESCRIPTIONS = {
    "readme.md", "license.md", "license.txt", "dataset_info.json", "dataset_infos.json",
    "dataset_dict.json", "state.json", "metadata.json", "config.json", "index.json",
}  # fmt: skip
ABOUT = {"readme", "license", "licence", "notice", "copying", "citation", "changelog"}


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
    """Opens the corpus at `path`: a file, a folder, or the prefix of a Megatron pair. Reads only
    what it takes to choose the files and the column.

    `column` holds the documents; `subset` and `split` choose a part of a dataset; `dtype` is the
    data type of the token ids, if the file does not specify one. `skip_bad` skips bad documents and
    counts them. `held_out` takes the validation or test split of a dataset that has splits, unless
    `split` is given.
    """
    path = Path(path).expanduser()
    path = path if path.name else path.resolve()  # "." and "/" have no name of their own
    index = path.with_name(path.name + ".idx")
    if not path.exists() and index.exists():
        path = index
    if not path.exists():
        raise DataError(f"{path} does not exist")
    if path.name == INDEX and is_mds(path.parent):
        path = path.parent
    if path.is_file():
        name = _format_of(path)
        if name is None:
            raise DataError(f"{path} has an unknown format; {_known()}")
        if name == "megatron":
            path = path.with_suffix(".idx")
        if subset or split:
            raise DataError(f"{path} is a single file, which has no subsets or splits")
        return _open(name, path.parent, [path.name], column, dtype, skip_bad)
    if (path / "corpus.json").is_file():
        built: FileSource = plugin("built_corpus").BuiltCorpus(path, skip_bad)
        return built
    mds = _mds_folder(path, subset, split, held_out)
    if mds is not None:
        shards: FileSource = plugin("mds").MDS(mds, column, dtype, skip_bad)
        return shards
    saved = saved_files(path, subset, split, held_out)
    if saved is not None:
        folder, files = saved
        return _open("arrow", folder, files, column, dtype, skip_bad)
    left_out = LeftOut()
    files = select_files(path, _data_files(path, left_out, column), subset, split, held_out)
    source = _open(_one_format(path, files), path, files, column, dtype, skip_bad)
    source.is_walked, source.not_read = True, str(left_out)
    if subset is None and source.format != "text":  # folders of texts are a tree of files
        source.together = read_together(path, files)
    return source


def _open(
    name: str,
    root: Path,
    files: list[str],
    column: str | None,
    dtype: str | None,
    skip_bad: bool,
) -> FileSource:
    if name not in KINDS and column not in (None, "text"):
        raise DataError(f"{root} is in {name} format: it has no columns, so there is no {column!r}")
    if name == "megatron":
        pairs: FileSource = plugin("megatron").Megatron(root, files, skip_bad)
        return pairs
    if name == "numpy":
        return NumpyTokens(root, files, dtype, skip_bad)
    return KINDS[name](root, files, column, skip_bad)


def _data_files(root: Path, left_out: LeftOut, column: str | None) -> list[str]:
    """Returns all files that may be data, in order, without hidden files and descriptions."""
    found: dict[str, str] = {}
    for file in walk(root, left_out):
        name = _format_of(root / file)
        if name == "megatron" and file.endswith(".bin"):  # read with its .idx
            continue
        # Spark and similar tools mark unfinished output with `_`; text may include __init__.py.
        is_put_aside = any(part.startswith("_") for part in file.split("/"))
        if name is not None and (name == "text" or not is_put_aside):
            found[file] = name
        elif name is not None:
            left_out.add(file, "its name begins with _")
        elif not is_put_aside and not _is_about(file):
            left_out.add(file, "unknown format")
    formats = {name for file, name in found.items() if not _is_about(file)}
    formats = formats or set(found.values())
    files = []
    for file, name in found.items():
        reason = _why_left_out(root / file, name, formats, column or "text")
        if reason is None:
            files.append(file)
        elif not _is_about(file):
            left_out.add(file, reason)
    if not files:
        rest = f"; {left_out}" if left_out.count else ""
        raise DataError(f"{root} contains no data files; {_known()}{rest}")
    return files


def _why_left_out(path: Path, name: str, formats: set[str], column: str) -> str | None:
    """Returns why a file is skipped, or None: a README next to data describes it, but among texts
    it is a text."""
    alone = formats & STAND_ALONE
    if alone:
        is_note = name in ("text", "csv") or bare_suffix(path) == ".json"
        return f"next to {min(alone)} files" if is_note else None
    if name == "csv" and formats != {"csv"}:
        return None if column in header(path) else f"it has no column {column!r}"
    is_beside = name == "jsonl" or "jsonl" in formats or formats == {"csv"}
    return "about the data" if is_beside and path.name.lower() in DESCRIPTIONS else None


def _is_about(file: str) -> bool:
    """Whether a file only describes the data, so that skipping it need not be reported."""
    path = Path(file)
    return path.name.lower() in DESCRIPTIONS or path.stem.lower() in ABOUT


def _one_format(root: Path, files: Iterable[str]) -> str:
    """Returns the format of the files. Text may be mixed with JSON lines and CSV, but nothing
    else."""
    found = {_format_of(root / file) or "" for file in files}
    if len(found) > 1 and found <= LINES:
        return "text"
    if len(found) > 1:
        names = " and ".join(sorted(found))
        raise DataError(
            f"{root} contains {names} files: specify one file, or a folder with one format"
        )
    return found.pop()


def _format_of(path: Path) -> str | None:
    name = FORMATS.get(bare_suffix(path))
    if path.suffix == ".bin" and path.with_suffix(".idx").is_file():
        return "megatron"
    return name if name in LINES or bare_suffix(path) == path.suffix.lower() else None


def is_mds(folder: Path) -> bool:
    """Whether a folder has an index of shards, or a broken index next to shards."""
    try:
        index = read_json(folder / INDEX)
    except OSError:
        return False
    except ValueError:
        index = None
    is_right = isinstance(index, dict) and isinstance(index.get("shards"), list)
    return is_right or any(folder.glob("*.mds*"))


def _mds_folder(path: Path, subset: str | None, split: str | None, held_out: bool) -> Path | None:
    """Returns the MDS folder of the subset and split, if any: each split is a folder with an
    index."""
    folder = path / subset if subset and (path / subset).is_dir() else path
    if is_mds(folder):
        if split is not None or (subset and folder is path):
            raise DataError(f"{folder} is a single MDS dataset: it has no subsets or splits")
        return folder
    splits = [one.name for one in sorted(folder.iterdir()) if one.is_dir() and is_mds(one)]
    return folder / choose_split(split, splits, folder, held_out) if splits else None


def _known() -> str:
    names = {name: " ".join(sorted(suffixes)) for name, suffixes in SUFFIXES.items()}
    return "supported: MDS folders, " + ", ".join(
        f"{name} ({which})" for name, which in names.items()
    )
