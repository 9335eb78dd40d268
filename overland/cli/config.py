"""`overland config`: prints all keys or their JSON Schema, converts another trainer's config or an
older one, and shows what a config resolves to.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from overland.cli.common import TAKES_SETTINGS, Settings, print_notes, split_settings, verb

app = typer.Typer(help="Show, convert and explain configs.", no_args_is_help=True)


@app.command()
@verb
def reference(
    word: Annotated[
        str, typer.Argument(help="Only keys with this word in their name or description.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print every key with its type, default and meaning."""
    from overland.apps.reference import reference_rows, reference_tables, reference_text

    if not reference_rows(word):
        from overland.config.errors import ConfigError, Problem

        raise ConfigError([Problem(f"no key has {word!r} in its name or description")])
    if as_json:
        print(json.dumps(reference_rows(word), indent=2))
    elif sys.stdout.isatty():
        from overland.apps.streams import SafeConsole

        console = SafeConsole()
        for table in reference_tables(word):
            console.print(table)
    else:
        print(reference_text(word), end="")


@app.command()
@verb
def schema() -> None:
    """Print the JSON Schema of a config, for completion in editors."""
    from overland.apps.reference import json_schema

    print(json.dumps(json_schema(), indent=2))


@app.command(context_settings=TAKES_SETTINGS)
@verb
def convert(
    old: Annotated[
        str, typer.Argument(help="TOML or YAML file of torchtitan, axolotl or the training stub.")
    ],
    new: Annotated[Path, typer.Argument(help="TOML file to write.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[section.key=value ...]", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite NEW.")] = False,
) -> None:
    """Convert a config of another trainer to Overland's keys. Also updates an older config."""
    from overland.checks.effect import without_hidden
    from overland.config.errors import ConfigError, Problem
    from overland.config.load import load_config
    from overland.config.write import write_config

    if new.exists() and not force:
        raise ConfigError([Problem(f"{new} exists already; --force overwrites it")])
    loaded = without_hidden(load_config(old, settings or [], env={}, resolve=False))
    heading = "\n".join([f"{loaded.config.job.description} (converted from {old})", *loaded.notes])
    write_config(loaded.config, new, heading=heading, resolved=False)
    print_notes(*loaded.notes)
    print(f"Wrote {new}.")


@app.command(context_settings=TAKES_SETTINGS)
@verb
def show(
    settings: Settings = None,
    full: Annotated[
        bool, typer.Option("--full", help="Also print keys that have their default value.")
    ] = False,
) -> None:
    """Print the resolved config. File, environment and overrides are combined, and a path with
    variables is shown both as written and as resolved on this machine."""
    from overland.checks.effect import without_hidden
    from overland.config.load import load_config
    from overland.config.write import to_toml

    source, arguments = split_settings(settings)
    loaded = without_hidden(load_config(source, arguments))
    print_notes(*loaded.notes)
    text = to_toml(loaded.config, full=full, comments=full, written=loaded.written)
    print(text, end="")
