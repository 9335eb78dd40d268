"""`overland init`: the recipes in the package, and one of them as a file to edit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from overland.cli.common import user_errors


@user_errors
def init(
    recipe: Annotated[
        str | None, typer.Argument(help="Recipe to copy.", show_default=False)
    ] = None,
    dest: Annotated[
        Path | None,
        typer.Argument(help="File or folder to copy it to; default: here.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite DEST.")] = False,
) -> None:
    """List the recipes, or copy one here as a commented TOML."""
    from overland.config.errors import ConfigError, Problem
    from overland.config.load import recipe_names, recipe_path
    from overland.words import command, nearest_name

    if recipe is None:
        print(list_recipes())
        return
    source = recipe_path(recipe)
    if source is None:
        names = recipe_names()
        message = f"there is no recipe {recipe} (recipes: {', '.join(names)})"
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


def list_recipes() -> str:
    """One line per recipe: its name, and the first comment in its file."""
    from overland.config.load import recipe_names, recipe_path
    from overland.words import command

    names = recipe_names()
    width = max(map(len, names), default=0)
    lines = []
    for name in names:
        path = recipe_path(name)
        assert path is not None
        with path.open(encoding="utf-8") as file:
            lines.append(f"{name:<{width}}  {file.readline().lstrip('# ').strip()}")
    copy, train = (command("overland", verb, "NAME") for verb in ("init", "train"))
    return "\n".join([*lines, "", f"`{copy}` copies one here; `{train}` runs it."])
