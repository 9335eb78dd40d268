"""`overland init`: lists the recipes in the package, copies one to edit, or copies the scripts that
stand in for another trainer's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from overland.cli.common import complete_recipe, user_errors
from overland.words import command, in_columns, nearest_name


@user_errors
def init(
    recipe: Annotated[
        str | None,
        typer.Argument(help="Recipe to copy.", show_default=False, autocompletion=complete_recipe),
    ] = None,
    dest: Annotated[
        Path | None,
        typer.Argument(help="File or folder to copy it to; default: here.", show_default=False),
    ] = None,
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="NAME",
            help="Copy the scripts of another trainer instead: overland init --from NAME [FOLDER]",
            show_default=False,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite DEST.")] = False,
) -> None:
    """List the recipes, or copy one here as a commented TOML file."""
    if from_ is not None:
        if dest is not None:
            raise typer.BadParameter(f"--from {from_} takes one folder", param_hint=str(dest))
        init_scripts(from_, Path(recipe or "."), force)
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


def init_scripts(name: str, folder: Path, force: bool) -> None:
    from overland.apps.scripts import about, copy_scripts

    for path, done in copy_scripts(name, folder, force).items():
        print(f"{done} {path}")
    _, usage = about(name)
    print(f"\n{usage}")


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
    from overland.apps.scripts import about, script_names

    titles = {name: about(name)[0] for name in script_names()}
    copy = command("overland", "init", "--from", "NAME")
    return f"Scripts of other trainers, copied here by `{copy}`:\n\n{in_columns(titles)}"
