"""Checks that files, folders and datasets of a config exist, says how to fetch missing ones, and
refuses a run folder that holds a different run or other files.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from overland.config.changes import rule_of
from overland.config.errors import NO_VALUE, ConfigError, Problem
from overland.config.fields import all_keys
from overland.config.load import Loaded, load_config, recipe_for, recipe_path
from overland.config.schema import Validation, ValidationSet
from overland.data.registry import source_names
from overland.data.wanted import (
    CHOICES,
    WantedSource,
    held_out_sources,
    sources_of,
    validates_on_holdout,
)
from overland.run_folder import CHECKPOINTS, COMMITTED, CONFIG, METRICS, README, WRITTEN_BY
from overland.words import any_of, command, control_character, nearest_name, number_of

PLACES = ("model.config", "model.hf_assets_path", "checkpoint.initial_load_path")
RECIPE = "recipe "  # what the place of a key begins with if a packaged recipe sets it
FETCH = re.compile(r"^\s*#.*\boverland fetch (.+?) --to ([^\s`]+)", flags=re.MULTILINE)
# torchtitan's names for parts of C4, and the files they stand for.
C4 = {"c4": "train", "c4_test": "validation", "c4_validation": "validation"}
NAMES_THERE = {
    "full": " (frontier-torchtitan's name of a mixture, which the recipe llama3_8b_frontier has)",
    **dict.fromkeys(C4, " (torchtitan's name for a public dataset)"),
}


def check_paths(loaded: Loaded) -> Iterator[Problem]:
    config, folder = loaded.config, missing_from(loaded)
    if folder is not None:
        recipe = recipe_for(Path(folder))
        way_out = f"`{command('overland', 'fetch', 'model', 'NAME', '--to', folder)}` fetches one"
        if recipe is not None:
            way_out = f"`{command('overland', 'train', recipe)}` creates it"
        yield _missing(loaded, "model.from", folder, way_out)
    fetch = command("overland", "fetch", "model", "NAME")
    for key in PLACES:
        path = loaded.config.value(key)
        if path is not None and path != folder and not _exists(path):
            yield _missing(loaded, key, path, f"`{fetch}` fetches a model")
    for name, path in config.data.datasets.items():
        if not _exists(path):
            yield _missing(loaded, f"data.datasets.{name}", path, fetch_line(name, path))


def missing_from(loaded: Loaded) -> str | None:
    """Returns the folder of `model.from`, if it is still to be fetched or trained."""
    folder = loaded.config.checkpoint.initial_load_path
    is_missing = folder is not None and not _exists(folder)
    return folder if is_missing and loaded.is_set("model.from") else None


def check_checkpoints(loaded: Loaded) -> Iterator[Problem]:
    checkpoint = loaded.config.checkpoint
    if checkpoint.keep_best and not loaded.config.validation.enable:
        message = "needs validation to find the best checkpoint; set validation.enable = true"
        yield loaded.problem("checkpoint.keep_best", message)
    if checkpoint.resume not in ("auto", "none") and not _exists(checkpoint.resume):
        near = nearest_name(checkpoint.resume, ["auto", "none"])
        message = 'expected "auto", "none" or the path of an existing checkpoint'
        yield loaded.problem("checkpoint.resume", message, nearest=near and f'"{near}"')


def check_allowed_changes(loaded: Loaded) -> Iterator[Problem]:
    """Checks that each key in checkpoint.allow_changes exists, and needs the permission."""
    key = "checkpoint.allow_changes"
    for name in loaded.config.checkpoint.allow_changes:
        found = ".".join(name.split(".")[:2])
        if found not in all_keys():
            near = nearest_name(name, all_keys())
            yield loaded.problem(key, "no such key", name, nearest=near and f'"{near}"')
        elif (rule := rule_of(found)) != "refused":
            message = (
                "decides which data is read, and in which order, so it cannot change in a run"
                if rule == "fixed"
                else "may change without permission; remove it"
            )
            yield loaded.problem(key, message, name)


# Keys that identify a run. Others, such as the learning rate or the number of steps, may change
# when it resumes.
SAME_RUN = (
    *(f"model.{name}" for name in ("name", "flavor", "config", "overrides")),
    *(f"training.{name}" for name in ("dataset", "dataset_path", *CHOICES)),
    "data.sources",
)


def check_place(loaded: Loaded) -> Iterator[Problem]:
    """Refuses a folder with an unrelated README.md, which a run would overwrite."""
    config, key = loaded.config, "job.dump_folder"
    folder = config.job.dump_folder
    if not folder.strip():
        yield loaded.problem(key, "is empty; name a folder for this run")
    elif config.checkpoint.resume != "none" and _has_other_readme(Path(folder)):
        message = "has a README.md of something else, which the run would overwrite; name another"
        yield loaded.problem(key, message)
    folder = config.checkpoint.folder
    if not folder.strip() or ".." in Path(folder).parts:
        message = "expected the name of a folder inside the run folder, or `.` for the run folder"
        yield loaded.problem("checkpoint.folder", message)


def check_saves(loaded: Loaded) -> Iterator[Problem]:
    """Refuses a run that saves nothing in a folder with checkpoints: it would begin again and
    replace the metrics, and the checkpoints would pass for its result. The same goes for a run that
    saves in another folder than before."""
    settings, root = loaded.config.checkpoint, Path(loaded.config.job.dump_folder).expanduser()
    if settings.resume == "none":
        return
    before, now = _checkpoint_folder(root), root / settings.folder
    if not (saved := _committed_in(root / before)):
        return
    found = number_of(len(saved), "checkpoint")
    is_elsewhere = now.resolve() != (root / before).resolve() and not _committed_in(now)
    ways = (
        "`--resume none` starts a new run in a folder of its own, and another job.dump_folder does "
        "too"
    )
    if not settings.enable:
        yield loaded.problem("checkpoint.enable", f"{root} has {found}; true resumes; {ways}")
    elif settings.resume == "auto" and is_elsewhere:
        message = (
            f"{root} has {found} in {before}, which would not be resumed; set it to {before}, or "
            f"move them; {ways}"
        )
        yield loaded.problem("checkpoint.folder", message)


def _committed_in(folder: Path) -> list[Path]:
    return list(folder.glob(f"step_*/{COMMITTED}"))


def _checkpoint_folder(run: Path) -> str:
    """Returns `checkpoint.folder` of the run in this folder."""
    try:
        before = tomllib.loads((run / CONFIG).read_text(encoding="utf-8"))
        return str(before.get("checkpoint", {}).get("folder", CHECKPOINTS))
    except (OSError, ValueError, AttributeError):
        return CHECKPOINTS


def _has_other_readme(folder: Path) -> bool:
    readme = folder / README
    if (folder / METRICS).exists() or not readme.is_file():
        return False
    return WRITTEN_BY not in readme.read_text(encoding="utf-8", errors="replace")


def check_folder(loaded: Loaded) -> Iterator[Problem]:
    """Refuses to resume with another model or other data in a folder that the user did not name:
    two configs may have the same name, or a config may have been edited."""
    config, key = loaded.config, "job.dump_folder"
    before = Path(config.job.dump_folder) / CONFIG
    is_named = loaded.is_set(key) and not loaded.where(key).startswith(RECIPE)
    if is_named or config.checkpoint.resume == "none" or not before.is_file():
        return
    try:
        earlier = load_config(str(before)).config
    except (ConfigError, OSError):
        return  # from another version, for example
    for name in SAME_RUN:
        old, new = earlier.value(name), config.value(name)
        if name == "training.dataset" and config.training.dataset_path is not None:
            continue  # which names the data instead
        if old != new:
            message = (
                f"has a run with another {name} ({old}, now {new}); use `--resume none` to start a "
                f"new run next to it, or set {key} to another folder, or to this one to continue "
                "that run with the change"
            )
            yield loaded.problem(key, message)
            return


def check_training_data(loaded: Loaded) -> Iterator[Problem]:
    sources = loaded.config.data.sources
    yield from _sources(loaded, sources_of(loaded.config))
    if sources and not any(source.weight for source in sources.values()):
        message = "all weights are 0, so nothing would be read"
        yield loaded.problem("data.sources", message, NO_VALUE)


def check_validation_data(loaded: Loaded) -> Iterator[Problem]:
    from overland.data.holdout import foreign_validation

    validation = loaded.config.validation
    if not validation.enable:
        return
    if loaded.config.data.holdout and not loaded.is_set("validation.enable"):
        message = (
            "validation is on, because data.holdout is set (validation.enable = false only holds "
            "out)"
        )
        yield Problem(message, loaded.where("data.holdout"), kind="note")
    if loaded.config.data.holdout and not validates_on_holdout(loaded.config):
        key = "dataset_path" if validation.dataset_path is not None else "dataset"
        message = (
            "documents are held out of training (data.holdout), but nothing measures the loss on "
            f"them, since validation.{key} names other data: remove one of the two"
        )
        yield Problem(message, loaded.where("data.holdout"), kind="note")
    yield from _read_at_all(loaded, "validation", validation)
    yield from _validation_sets(loaded)
    yield from _sources(loaded, held_out_sources(loaded.config))
    if validation.dataset == [] and not validation.sets and validation.dataset_path is None:
        message = "is empty; name a set to validate on, or set validation.enable = false"
        yield loaded.problem("validation.dataset", message)
    if note := foreign_validation(loaded.config):
        yield Problem(note, loaded.where("validation.dataset"), kind="note")


def _read_at_all(loaded: Loaded, table: str, one: Validation | ValidationSet) -> Iterator[Problem]:
    for name, value in (("sequences", one.sequences), ("steps", one.steps)):
        if value == 0:
            message = "expected -1 (the whole set) or a positive whole number"
            yield loaded.problem(f"{table}.{name}", message, value)


def _validation_sets(loaded: Loaded) -> Iterator[Problem]:
    for name, one in loaded.config.validation.sets.items():
        key = f"validation.sets.{name}"
        if not name.strip() or "/" in name or control_character(name):
            message = "expected a name without /, since the metrics of the set are named after it"
            yield loaded.problem(key, message, NO_VALUE)
        yield from _read_at_all(loaded, key, one)
        if one.sequences is not None and one.steps is not None:
            message = f"{key}.steps is set too: remove one of them"
            yield loaded.problem(f"{key}.sequences", message, one.sequences)
        training = loaded.config.training
        if one.freq is not None and training.epochs is None and one.freq > training.steps:
            message = (
                f"is more than the {training.steps:,} steps of training.steps, so the set is "
                "validated on only after the last step"
            )
            yield loaded.problem(f"{key}.freq", message, one.freq, "note")


def _sources(loaded: Loaded, wanted: Mapping[str, WantedSource]) -> Iterator[Problem]:
    """Checks that each source is in one place, which exists."""
    for one in wanted.values():
        asked, is_path = one.asked, one.dataset.startswith(("~", "/"))
        if asked.path is not None and asked.dataset is not None:
            message = "expected either a path or a named dataset, not both"
            yield loaded.problem(f"{one.table}.dataset", message, asked.dataset)
        if asked.path is not None and not one.is_there:
            yield _missing(loaded, one.path_key, asked.path, subset=asked.subset)
        elif asked.path is None and (is_path or not one.is_there):
            yield from _unknown_dataset(loaded, one)


def _unknown_dataset(loaded: Loaded, wanted: WantedSource) -> Iterator[Problem]:
    data, key, name = loaded.config.data, wanted.key, wanted.dataset
    known = [*source_names(), *data.datasets]
    near = nearest_name(name, known, cutoff=0.8)
    if name in data.datasets:
        return  # whose folder `check_paths` reports
    if _exists(name) or _exists(name + ".idx") or name.startswith(("~", "/")):
        message = f"this is a path, not a name; set {wanted.path_key} to it instead"
        yield loaded.problem(key, message, name)
    elif near:
        names = any_of([*known, f"a folder in {data.folder}"])
        yield loaded.problem(key, f"no such dataset; expected {names}", name, nearest=f'"{near}"')
    else:
        where, folder = loaded.where(key), f"{data.folder}/{name}"
        way_out = _way_out(where, folder, fetch_line(name, folder))
        message = (
            f"not on this machine{NAMES_THERE.get(name, '')}; {way_out}, or set "
            f"data.datasets.{name} or {wanted.path_key} to a folder"
        )
        yield Problem(message, where, key, name, kind="missing", can_be_fetched=True)


def fetch_line(name: str, path: str) -> str:
    """Returns how to fetch a dataset of that name."""
    which = ("allenai/c4", "--include", f"en/c4-{C4[name]}.*") if name in C4 else ("OWNER/NAME",)
    return f"`{command('overland', 'fetch', 'dataset', *which, '--to', path)}` fetches it"


def _missing(
    loaded: Loaded, key: str, path: str, way_out: str = "", subset: str | None = None
) -> Problem:
    near = _near_path(Path(path).expanduser())
    where = loaded.where(key)
    way_out = _way_out(where, path, way_out, subset)
    can_be_fetched = bool(way_out) and near is None
    message = "no such file or folder" + (f"; {way_out}" if can_be_fetched else "")
    return Problem(message, where, key, path, near, "missing", can_be_fetched)


def _way_out(where: str, path: str, otherwise: str, subset: str | None = None) -> str:
    """Returns how to get a path: the command in the comments of the file that sets it, or else
    `otherwise`, or else, for a recipe, that its comments describe what no command can fetch."""
    name = where.rpartition(":")[0]
    recipe = recipe_path(name.removeprefix(RECIPE)) if name.startswith(RECIPE) else None
    file = recipe or Path(name).expanduser()
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    for rest, to in FETCH.findall(text):
        with suppress(ValueError):  # unbalanced quotes
            words = shlex.split(rest)
            is_other_subset = subset is not None and "--subset" in words and subset not in words
            if Path(to) == Path(path) and not is_other_subset:
                return f"`{command('overland', 'fetch', *words, '--to', to)}` fetches it"
    if otherwise or recipe is None:
        return otherwise
    copy = command("overland", "init", recipe.stem)
    return f"the recipe's comments say how to get it (`{copy}` copies the recipe here)"


def _near_path(path: Path) -> str | None:
    """Returns a file in the same folder with almost the same name; a typo is likelier than a
    missing download."""
    if not path.parent.is_dir():
        return None
    near = nearest_name(path.name, [other.name for other in path.parent.iterdir()], cutoff=0.85)
    return str(path.parent / near) if near else None


def _exists(path: str) -> bool:
    return Path(path).expanduser().exists()
