"""The single entry point: a file or recipe, the environment and the command line become one
`JobConfig`; expands `model.from`, and fills in the defaults that `[sft]` needs.

1. The file is read into entries (key path, value, place); dialects are translated to current keys.
2. COMM_BACKEND overrides the file, and the command line overrides both.
3. The result is validated, and variables and `~` in its paths are resolved. All problems are
   reported at once, one line each.
4. Defaults that `[sft]` needs are filled in and reported.
5. `model.from = FOLDER` is replaced by the three keys it stands for (architecture, tokenizer and
   weights of a model), so that a run folder's config.toml records exactly what was loaded from
   where. `lora.adapter = FOLDER` likewise sets the keys of [lora].
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from overland.config.arguments import COMMAND_LINE, Arguments, environment_entries, parse_arguments
from overland.config.errors import ConfigError, Problem, ProblemKind, show_value
from overland.config.fields import is_current
from overland.config.paths import from_own_folder, resolve_paths
from overland.config.schema import OLDER_WORDS, PAIR_DEFAULTS, SFT_DEFAULTS, Job, JobConfig
from overland.config.source import SUFFIXES, Entries, KeyPath, Translated, overlay, read_file
from overland.config.validate import check_expressions, check_switches, validate_entries
from overland.files import read_json
from overland.plugins import plugin
from overland.run_folder import COMMITTED, CONFIG, MODEL_CONFIG, TOKENIZER
from overland.words import any_of, command, nearest_name, number_of

FEWEST_ROUTINE = 3  # notes that one line may stand for


@dataclass(frozen=True)
class Loaded:
    """A validated config, notes made while loading it, and where each key was set."""

    config: JobConfig
    notes: list[str]
    source: str
    places: dict[KeyPath, str] = field(default_factory=dict)
    dropped: frozenset[KeyPath] = frozenset()
    written: dict[str, str] = field(default_factory=dict)
    """The original text of paths with variables or `~`, by key."""
    variables: dict[str, str] = field(default_factory=dict)
    """The values of those variables."""
    routine: frozenset[str] = frozenset()
    """The notes that only say what became of a key of another trainer."""
    about: str = ""
    """Names that trainer."""

    def notes_at_start(self) -> list[str]:
        """Returns the notes to print at every start: a single one in place of many routine ones,
        which `overland check` prints."""
        if len(self.routine) < FEWEST_ROUTINE:
            return self.notes
        check = command("overland", "check", self.source)
        number = number_of(len(self.routine), "note")
        line = f"{self.about}; `{check}` says what became of its keys ({number})"
        return [line, *(note for note in self.notes if note not in self.routine)]

    def where(self, key: str) -> str:
        """Returns where `section.key` was set (`run.toml:12`); the file alone if it has its
        default."""
        return next(iter(self.places_of(key)), self.source)

    def is_set(self, key: str) -> bool:
        return bool(self.places_of(key))

    def places_of(self, key: str) -> list[str]:
        """Returns where a key, or what is below it, was set."""
        path = tuple(key.split("."))
        return [place for other, place in self.places.items() if other[: len(path)] == path]

    def problem(
        self,
        key: str,
        message: str,
        value: Any = None,
        kind: ProblemKind = "invalid",
        nearest: str | None = None,
    ) -> Problem:
        """Returns a problem with a key, at the place where it was set. `value`: what to show, by
        default the key's value."""
        value = self.config.value(key) if value is None else value
        return Problem(message, self.where(key), key, value, nearest, kind)


def load_config(
    source: str | None,
    arguments: Sequence[str] = (),
    env: Mapping[str, str] = os.environ,
    resolve: bool = True,
) -> Loaded:
    """Loads the config of a run.

    Args:
        source: Path of a .toml, .yaml or .yml file, the name of a recipe in the package, or a run
            folder, which stands for its config.toml; None: taken from `--job.config_file` or the
            variable CONFIG_FILE.
        arguments: Overrides, as in `training.steps=20` or `--training.steps 20`.
        env: The environment.
        resolve: Whether to resolve variables and `~` in paths.

    Raises:
        ConfigError: With all problems; its `partial` is a `Loaded` of everything that was valid.
    """
    given = parse_arguments(arguments)
    path, shown = find_source(source, given, env)
    file = translate(read_file(path, shown), shown, above=given.entries)
    entries, notes, refused = file.entries, file.notes, file.problems
    over, over_notes, over_refused, *_ = translate(given.entries, COMMAND_LINE, below=entries)
    entries = overlay(overlay(entries, environment_entries(env)), over)
    config, problems, dropped = validate_entries(entries)
    if not refused:  # what was refused may be what enables them
        problems += check_switches(config, entries, dropped)
    places = {key: entry.where for key, entry in entries.items() if key not in dropped}
    # Keys with these problems are not in the config.
    config, left_out = check_expressions(config, places)
    config, sft_notes = with_sft_defaults(config, places)
    written: dict[str, str] = {}
    variables: dict[str, str] = {}
    if resolve:
        where = lambda key: places.get(tuple(key.split(".")), shown)
        config, written, variables, unresolved = resolve_paths(config, env, where)
        config, folder_notes = from_own_folder(config, path, shown, places)
        notes += folder_notes
        left_out += unresolved
        if not unresolved:
            config, found = expand_from(config, where("model.from"))
            problems += found
            if config.lora.adapter is not None:
                expand = plugin("adapters").expand_adapter
                config, found = expand(config, places, where("lora.adapter"))
                left_out += found
        if ("job", "dump_folder") not in places:
            # Configs do not share a folder. The same file always means the same one, which is how a
            # run resumes.
            config = config.having({"job.dump_folder": f"{Job().dump_folder}/{path.stem}"})
    problems += [*refused, *over_refused, *given.problems, *left_out]
    loaded = Loaded(
        config=config,
        notes=notes + over_notes + sft_notes,
        source=shown,
        places=places,
        dropped=frozenset({*dropped, *(tuple(one.key.split(".")) for one in left_out)}),
        written=written,
        variables=variables,
        routine=file.routine,
        about=file.about,
    )
    if problems:
        raise ConfigError(in_order(problems), partial=loaded)
    return loaded


def translate(
    entries: Entries, shown: str, below: Entries | None = None, above: Entries | None = None
) -> Translated:
    """Returns the entries in current keys; see `overland/apps/dialects`, which is only asked about
    a file that has other keys or values."""
    entries, notes = in_todays_words(entries)
    if all(is_current(path, entry.value) for path, entry in entries.items()):
        return Translated(entries, notes, [])
    translated: Translated = plugin("dialects").translate(entries, shown, below or {}, above or {})
    return translated._replace(notes=notes + translated.notes)


def in_todays_words(entries: Entries) -> tuple[Entries, list[str]]:
    """Returns the entries with the values that had another name replaced, and a note for each."""
    found, notes = dict(entries), []
    for key, words in OLDER_WORDS.items():
        path = tuple(key.split("."))
        entry = entries.get(path)
        if entry is not None and isinstance(entry.value, str) and entry.value in words:
            today = words[entry.value]
            found[path] = replace(entry, value=today)
            notes.append(f'{entry.where}: {key} = "{entry.value}" is now "{today}"')
    return found, notes


def with_sft_defaults(
    config: JobConfig, places: Mapping[KeyPath, str]
) -> tuple[JobConfig, list[str]]:
    """Returns the config with the defaults that conversations need, and a note about them. Pairs of
    answers are not packed: each is a row."""
    if config.sft.shape == "off":
        return config, []
    defaults = SFT_DEFAULTS if config.preference.loss == "off" else PAIR_DEFAULTS
    chosen = {key: value for key, value in defaults.items() if tuple(key.split(".")) not in places}
    if "data.packing" not in chosen and config.data.packing in ("trunc", "overflow"):
        chosen.pop("data.document_mask", None)  # no row has two conversations
    if not chosen:
        return config, []
    said = any_of([f"{key} = {show_value(value)}" for key, value in chosen.items()], "and")
    return config.having(chosen), [f"with sft.shape, the default is {said}"]


def find_source(source: str | None, given: Arguments, env: Mapping[str, str]) -> tuple[Path, str]:
    """Returns the file to read and its name in messages."""
    named = [*([source] if source else []), *given.config_files]
    if len(set(named)) > 1:
        message = f"is a second config file, after {named[0]}; give only one"
        raise ConfigError([Problem(message, COMMAND_LINE, "job.config_file", named[-1])])
    name = named[0] if named else env.get("CONFIG_FILE", "")
    where = COMMAND_LINE if named else "environment CONFIG_FILE"
    if not name:
        train, init = command("overland", "train", "quickstart"), command("overland", "init")
        message = (
            f"no config given; name a file or a recipe, as in `{train}` (`{init}` lists the "
            "recipes), or set CONFIG_FILE"
        )
        raise ConfigError([Problem(message)])
    path = Path(name).expanduser()
    if path.is_file():
        return path, name
    recipe = recipe_path(name)
    if recipe is not None:
        return recipe, f"recipe {recipe.name}"
    if (path / CONFIG).is_file():  # a run folder
        return path / CONFIG, f"{name.rstrip('/')}/{CONFIG}"
    if path.is_dir():
        message = f"is a folder without a {CONFIG}; expected a config file or a run folder"
        raise ConfigError([Problem(message, where, value=name)])
    raise ConfigError([Problem(_no_such_config(path), where, value=name, nearest=_near(path))])


def in_order(problems: list[Problem]) -> list[Problem]:
    """Sorts problems: the file by line, then the environment, then the command line."""

    def rank(problem: Problem) -> tuple[int, int]:
        if problem.where == COMMAND_LINE:
            return (2, 0)
        if problem.where.startswith("environment"):
            return (1, 0)
        line = problem.where.rpartition(":")[2]
        return (0, int(line) if line.isdecimal() else 0)

    return sorted(problems, key=rank)


def recipe_for(folder: Path) -> str | None:
    """Returns the recipe that has this run folder by default, if any."""
    for name in recipe_names():
        job = tomllib.loads((recipes_folder() / f"{name}.toml").read_text(encoding="utf-8"))["job"]
        if Path(job["dump_folder"]) == folder:
            return name
    return None


def recipe_names() -> list[str]:
    return sorted(path.stem for path in recipes_folder().glob("*.toml"))


def recipe_path(name: str) -> Path | None:
    """Returns the file of a packaged recipe, if there is one of that name."""
    plain = name.removesuffix(".toml")
    return recipes_folder() / f"{plain}.toml" if plain in recipe_names() else None


def recipes_folder() -> Path:
    return Path(__file__).resolve().parent.parent / "recipes"


def _no_such_config(path: Path) -> str:
    if path.suffix in SUFFIXES or path.parent != Path("."):
        return "no such file"
    return f"no such file, and no recipe of that name (recipes: {', '.join(recipe_names())})"


def _near(path: Path) -> str | None:
    folder = path.parent
    files: dict[str, Path] = {}
    if folder.is_dir():
        files = {p.stem: p for p in folder.iterdir() if p.suffix in SUFFIXES}
    near = nearest_name(path.stem, files)
    if near:
        return str(files[near])
    return nearest_name(path.stem, recipe_names()) if path.parent == Path(".") else None


WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "model_state_dict.pt")
TOKENIZERS = ("tokenizer.json", "tokenizer.model")
FROM = ("model.config", "model.hf_assets_path", "checkpoint.initial_load_path")
"""The keys that `model.from` stands for."""


def expand_from(config: JobConfig, where: str) -> tuple[JobConfig, list[Problem]]:
    """Returns the config with `model.from` replaced by the keys it stands for, and problems. A
    tokenizer may be set as well; another architecture or other weights contradict it. A folder that
    is still to be fetched stands for all three: `checks` reports it."""
    if config.model.from_ is None:
        return config, []
    folder = Path(config.model.from_)
    parts, problem = parts_of(folder)
    if problem:
        return config, [Problem(problem, where, "model.from", config.model.from_)]
    given = {key: path for key in FROM if (path := config.value(key)) is not None}
    for key, path in given.items():
        if key != "model.hf_assets_path" and Path(path) != Path(parts[key]):
            message = f"conflicts with model.from = {config.model.from_}; remove one of them"
            return config, [Problem(message, where, key, path)]
    taken = parts | given
    if "model.hf_assets_path" not in taken and takes_tokens(Path(parts["model.config"])):
        message = "has no tokenizer; set model.hf_assets_path to the one that fits the weights"
        return config, [Problem(message, where, "model.from", config.model.from_)]
    return config.having({"model.from_": None, **taken}), []


def parts_of(folder: Path) -> tuple[dict[str, str], str]:
    """Returns the parts that a folder provides, by key, or what it lacks."""
    if not folder.exists():
        return dict.fromkeys(FROM, str(folder)), ""
    if not folder.is_dir():
        fetch = command("overland", "fetch", "model", "NAME")
        return {}, f"is a file; expected a folder, such as one that `{fetch}` downloads"
    if (folder / MODEL_CONFIG).is_file() and (folder / CONFIG).is_file():  # a run
        architecture, tokenizer = folder / MODEL_CONFIG, folder / TOKENIZER
    elif (folder / COMMITTED).is_file():
        message = (
            "is a single checkpoint of a run; name the run folder, whose newest checkpoint is used"
        )
        return {}, message
    elif not (folder / "config.json").is_file():
        return {}, "has no config.json, which describes the architecture"
    elif not has_weights(folder):
        return {}, "has no weights (*.safetensors); set model.config to use only its architecture"
    else:
        architecture, tokenizer = folder, folder
    parts = {"model.config": str(architecture), "checkpoint.initial_load_path": str(folder)}
    if any((tokenizer / name).is_file() for name in TOKENIZERS):
        parts["model.hf_assets_path"] = str(tokenizer)
    return parts, ""


def takes_tokens(architecture: Path) -> bool:
    """Returns whether the model has a vocabulary; image models have none. A file that cannot be
    read is reported where the model is built."""
    path = architecture / "config.json" if architecture.is_dir() else architecture
    try:
        keys = read_json(path)
        return "vocab_size" in keys or "image_size" not in keys
    except (OSError, ValueError, TypeError):
        return True


def has_weights(folder: Path) -> bool:
    return any(True for pattern in WEIGHTS for _ in folder.glob(pattern))
