"""Selects the data files of a subset and a split in folders written by `datasets` or downloaded
from the Hugging Face Hub.

A `save_to_disk` folder lists its files. The README.md of a Hub folder may say which files belong to
which subset (config) and split; otherwise the names of folders and files decide.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from overland.data.sources.columns import nearest_hint
from overland.data.sources.source import SHOWN, inside_folder
from overland.errors import ChoiceRequired, DataError
from overland.files import LARGEST_CONFIG, parse_yaml, read_object
from overland.words import first_few

MOST_STARS = 4  # in a README's pattern
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
ALIASES = {word: split for split, words in SPLITS.items() for word in words}
SPLIT_IN_NAME = re.compile(rf"(?:^|[-._ /\d])({'|'.join(ALIASES)})(?=[-._ /\d])")
SPLIT_OF_SHARD = re.compile(r"(?:^|/)data/([\w.]+)-\d{5}-of-\d{5}")


def choose_name(
    what: str, wanted: str | None, names: Collection[str], usual: str, where: object
) -> str:
    """Returns the wanted name, the usual one, or the only one."""
    if wanted is not None:
        if wanted in names:
            return wanted
        has = f"it has {', '.join(names)}" if names else "it has none"
        raise DataError(f"{where} has no {what} {wanted!r}{nearest_hint(wanted, names)}; {has}")
    if usual in names:
        return usual
    if len(names) == 1:
        return next(iter(names))
    raise ChoiceRequired(
        f"{where} has several {what}s: set ", what, f" to one of {', '.join(names)}"
    )


def choose_split(
    wanted: str | None, names: Collection[str], where: object, held_out: bool = False
) -> str:
    """Returns the wanted split; otherwise the training split or, if `held_out`, one to validate
    on."""
    if wanted is not None or not held_out:
        return choose_name("split", wanted, names, "train", where)
    for usual in ("validation", "test"):
        for name in names:
            if ALIASES.get(name, name) == usual:
                return name
    has = ", ".join(names)
    raise ChoiceRequired(
        f"{where} has no validation or test split: set ",
        "split",
        f" to one of its splits ({has}) that is not used for training, or remove the dataset from "
        "[validation] and set data.holdout = 0.01",
    )


def saved_files(
    folder: Path, subset: str | None, split: str | None, held_out: bool
) -> tuple[Path, list[str]] | None:
    """Returns the Arrow files of a `save_to_disk` folder and the folder they are in, or None if
    this is no such folder."""
    if subset is not None and (folder / subset).is_dir():
        folder, subset = folder / subset, None
    is_dict = (folder / "dataset_dict.json").is_file()
    if not is_dict and not (folder / "state.json").is_file():
        return None
    if subset is not None:
        raise DataError(f"{folder} has no subset {subset!r}: it was saved from a single dataset")
    if is_dict:
        splits = read_object(folder / "dataset_dict.json", DataError).get("splits", [])
        chosen = choose_split(split, splits, folder, held_out)
        folder = inside_folder(folder, chosen, folder / "dataset_dict.json")
    state_path = folder / "state.json"
    state = read_object(state_path, DataError)
    if not is_dict and split is not None:
        choose_split(split, [state["_split"]] if state.get("_split") else [], folder)
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise DataError(
            f"{folder} was saved with an indices mapping: call flatten_indices() and save it again"
        )
    entries = state.get("_data_files")
    if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
        raise DataError(f"{state_path} lists no data files: `save_to_disk` did not write it")
    files = [entry.get("filename") for entry in entries]
    for file in files:
        inside_folder(folder, file, state_path)
    return folder, files


def select_files(
    root: Path, files: Sequence[str], subset: str | None, split: str | None, held_out: bool
) -> list[str]:
    """Returns the `files` (relative to `root`) that belong to the subset and the split."""
    name, files, patterns = _subset(root, files, subset, root)
    if not patterns:
        return _by_split(root, files, split, held_out)
    chosen = choose_split(split, patterns, f"{root}, subset {name},", held_out)
    found = _matching(root, files, patterns[chosen])
    if not found:
        page = root / "README.md"
        raise DataError(f"{page}: no file here matches {', '.join(patterns[chosen])}")
    return found


def subset_files(root: Path, files: Sequence[str], subset: str | None, where: str) -> list[str]:
    """Returns the `files` that belong to the subset, or to the default one, in any split; only the
    README.md needs to be in `root`. Errors name `where`."""
    _, files, patterns = _subset(root, files, subset, where)
    every = [pattern for some in patterns.values() for pattern in some]
    return _matching(root, files, every) if every else list(files)


def _subset(
    root: Path, files: Sequence[str], subset: str | None, where: object
) -> tuple[str | None, Sequence[str], dict[str, list[str]]]:
    """Returns the name of the subset, its files, and the patterns of each split, if the README.md
    has any."""
    configs = {str(one.get("config_name", "default")): one for one in _configs(root / "README.md")}
    if configs:
        usual = [name for name, config in configs.items() if config.get("default")]
        name = choose_name("subset", subset, configs, usual[0] if usual else "default", where)
        folder, patterns = configs[name].get("data_dir"), _patterns(configs[name])
        if folder:
            folder = inside_folder(root, folder, root / "README.md").relative_to(root).as_posix()
    elif subset is not None:
        folders = sorted({file.partition("/")[0] for file in files if "/" in file})
        folder, patterns = choose_name("subset", subset, folders, "default", where), {}
        name = folder
    else:
        return None, files, {}
    start = f"{folder}/" if folder not in (None, "", ".") else ""
    patterns = {
        split: [start + pattern.removeprefix("./") for pattern in some]
        for split, some in patterns.items()
    }
    return name, [file for file in files if file.startswith(start)], patterns


def read_together(root: Path, files: Sequence[str]) -> str:
    """Returns a note if these files are from several subsets; if the README defines subsets, only
    one of them is read."""
    folders = sorted({file.partition("/")[0] for file in files if "/" in file})
    if len(folders) < 2 or _configs(root / "README.md"):
        return ""
    names = first_few(folders, SHOWN)
    return f"{len(folders):,} subsets are read together: {names}; set subset to read one of them"


def split_of(file: str) -> str | None:
    """Returns the split that a file's path names, if any; the file name comes before folders."""
    shard = SPLIT_OF_SHARD.search(file)
    if shard:
        return shard[1]
    for part in reversed(file.split("/")):
        word = SPLIT_IN_NAME.search(part.lower() + "/")
        if word:
            return ALIASES[word[1]]
    return None


def _by_split(root: Path, files: Sequence[str], split: str | None, held_out: bool) -> list[str]:
    splits = {file: split_of(file) for file in files}
    names = sorted({name for name in splits.values() if name is not None})
    # Unless a split is requested, files are selected only if every file names its split, so that no
    # data is left out by accident.
    if split is None and (not names or (None in splits.values() and not held_out)):
        return list(files)
    wanted = split if split is None or split in names else ALIASES.get(split, split)
    chosen = choose_split(wanted, names, root, held_out)
    return [file for file in files if splits[file] == chosen]


def _matching(root: Path, files: Sequence[str], patterns: Sequence[str]) -> list[str]:
    for pattern in patterns:
        inside_folder(root, pattern, root / "README.md")
    matchers = list(map(_glob, patterns))
    return [file for file in files if any(one.fullmatch(file) for one in matchers)]


def _configs(page: Path) -> list[dict[str, Any]]:
    """Returns `configs` from the YAML front matter of a dataset's README.md."""
    if not page.is_file():
        return []
    with page.open(encoding="utf-8", errors="replace") as file:
        head = re.match(r"---\s*\n(.*?)\n---", file.read(LARGEST_CONFIG), re.S)
    try:
        front = parse_yaml(head[1]) if head else None
    except ValueError:
        return []
    configs = front.get("configs") if isinstance(front, dict) else None
    return [one for one in configs if isinstance(one, dict)] if isinstance(configs, list) else []


def _patterns(config: dict[str, Any]) -> dict[str, list[str]]:
    """Returns the patterns of each split, from any of the forms that a README may use."""
    data_files = config.get("data_files")
    if isinstance(data_files, dict):
        data_files = [{"split": split, "path": path} for split, path in data_files.items()]
    entries = data_files if isinstance(data_files, list) else [data_files] if data_files else []
    found: dict[str, list[str]] = {}
    for entry in entries:
        is_pair = isinstance(entry, dict)
        paths = (entry.get("path") or []) if is_pair else entry
        split = str(entry.get("split", "train")) if is_pair else "train"
        found.setdefault(split, []).extend([paths] if isinstance(paths, str) else map(str, paths))
    return found


def _glob(pattern: str) -> re.Pattern[str]:
    pieces = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    found = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", pattern)
    is_set = re.compile(r"\[[^\]]+\]").fullmatch
    text = "".join(one if is_set(one) else pieces.get(one, re.escape(one)) for one in found)
    try:
        if sum(one.startswith("*") for one in found) > MOST_STARS:  # each one multiplies the time
            raise re.error("too many *")
        return re.compile(text)
    except re.error as error:
        raise DataError(f"the pattern {pattern!r:.200} is not valid: {error}") from None
