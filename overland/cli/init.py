"""`overland init`: lists the recipes in the package, copies one to edit, or copies the scripts that
stand in for another trainer's, with their own names and flags.

`overland/scripts/NAME` contains these as they will be in a user's folder; `NAME.txt` next to it
says what they are (its first line) and how to run them (the rest). They are copied, never imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from overland.cli.common import complete_recipe, verb
from overland.errors import OverlandError
from overland.words import any_of, command, did_you_mean, in_columns, nearest_name

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
EXECUTABLE = 0o111


@verb
def init(
    recipe: Annotated[
        str | None, typer.Argument(show_default=False, autocompletion=complete_recipe)
    ] = None,
    dest: Annotated[Path | None, typer.Argument(show_default=False)] = None,
    from_: Annotated[str | None, typer.Option("--from", metavar="NAME", show_default=False)] = None,
    force: bool = False,
) -> None:
    """List the recipes, or copy one here as a commented TOML file.

    Args:
        recipe: Recipe to copy.
        dest: File or folder to copy it to; default: here.
        from_: Copy the scripts of another trainer instead: overland init --from NAME [FOLDER]
        force: Overwrite DEST.
    """
    if from_ is not None:
        if dest is not None:
            raise typer.BadParameter(f"--from {from_} takes one folder", param_hint=str(dest))
        for path, done in copy_scripts(from_, Path(recipe or "."), force).items():
            print(f"{done} {path}")
        print(f"\n{about(from_)[1]}")
    elif recipe is None:
        print(list_recipes() + "\n\n" + list_scripts())
    else:
        init_recipe(recipe, dest, force)


def init_recipe(recipe: str, dest: Path | None, force: bool) -> None:
    from overland.config.errors import ConfigError, Problem
    from overland.config.load import recipe_names, recipe_path

    source = recipe_path(recipe)
    if source is None:
        names = recipe_names()
        message = f"there is no recipe {recipe}; recipes are {', '.join(names)}"
        raise ConfigError([Problem(message, nearest=nearest_name(recipe, names))])
    target = dest or Path(source.name)
    target = target / source.name if target.is_dir() else target
    if target.exists() and not force:
        raise ConfigError([Problem(f"{target} exists already; --force overwrites it")])
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    print(
        f"Wrote {target}. Next: edit it, then `{command('overland', 'check', target)}` and "
        f"`{command('overland', 'train', target)}`."
    )


def script_names() -> list[str]:
    return sorted(path.stem for path in SCRIPTS.glob("*.txt"))


def about(name: str) -> tuple[str, str]:
    """Returns a one-line description of the scripts of this name, and how to run them."""
    first, _, rest = (SCRIPTS / f"{name}.txt").read_text(encoding="utf-8").partition("\n")
    return first, rest.strip("\n")


def files_of(name: str) -> list[Path]:
    """Returns the files to copy, relative to the folder they are copied to."""
    files = (path.relative_to(SCRIPTS / name) for path in (SCRIPTS / name).rglob("*")
             if path.is_file())  # fmt: skip
    return sorted(file for file in files if "__pycache__" not in file.parts)


def copy_scripts(name: str, folder: Path, force: bool = False) -> dict[Path, str]:
    """Copies all scripts of this name, or none; returns what became of each file that was not there
    as it is. Configs that are already there are kept, unless `force`: they are there to be
    edited."""
    if name not in script_names():
        hint = did_you_mean(name, script_names())
        raise OverlandError(f"there are no scripts from {name}{hint}")
    sources = {folder / file: SCRIPTS / name / file for file in files_of(name)}
    new = {to: source for to, source in sources.items()
           if not (to.is_file() and to.read_bytes() == source.read_bytes())}  # fmt: skip
    kept = [to for to in new if to.suffix in (".toml", ".yaml") and to.is_file() and not force]
    new = {to: source for to, source in new.items() if to not in kept}
    there = [str(path) for path in new if path.exists() or path.is_symlink()]
    if there and not force:
        verb, them = ("exists", "it") if len(there) == 1 else ("exist", "them")
        raise OverlandError(
            f"{any_of(there, 'and')} already {verb}; use --force to overwrite {them}"
        )
    for path in new:  # fails before anything is written if a file is in the way
        path.parent.mkdir(parents=True, exist_ok=True)
    for path, source in new.items():
        if path.is_symlink():
            path.unlink()
        path.write_bytes(source.read_bytes())
        if path.read_bytes().startswith(b"#!"):  # an installed package may lose file modes
            path.chmod(path.stat().st_mode | EXECUTABLE)
    words = "kept as it is, though it differs; --force overwrites it:"
    return {**dict.fromkeys(new, "wrote"), **dict.fromkeys(kept, words)}


def list_recipes() -> str:
    """Returns one line per recipe: its name, and the first comment in its file."""
    from overland.config.load import recipe_names, recipe_path

    titles = {}
    for name in recipe_names():
        path = recipe_path(name)
        assert path is not None
        with path.open(encoding="utf-8") as file:
            titles[name] = file.readline().lstrip("# ").strip()
    copy, train = (command("overland", verb, "NAME") for verb in ("init", "train"))
    return f"{in_columns(titles)}\n\n`{copy}` copies one here; `{train}` trains it."


def list_scripts() -> str:
    """Returns one line per trainer whose scripts can be copied."""
    titles = {name: about(name)[0] for name in script_names()}
    copy = command("overland", "init", "--from", "NAME")
    return f"Scripts of other trainers, copied here by `{copy}`:\n\n{in_columns(titles)}"
