"""The reference of the command line: a page per verb, from what its `--help` says."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import typer
from words import as_code, as_markdown, table

from overland.cli.main import EXAMPLES, app

FOLDER = "reference/command"


def pages() -> dict[str, str]:
    made = {f"{FOLDER}/index.md": _overview()}
    for verb, command in _verbs().items():
        made[f"{FOLDER}/{verb}.md"] = _page(verb, command)
    return made


def place_of(code: str) -> str | None:
    """Returns where a command such as `overland data build …` is explained."""
    words = code.split()
    if len(words) < 2 or words[0] != "overland" or words[1] not in _verbs():
        return None
    page = f"{FOLDER}/{words[1]}.md"
    inside = getattr(_verbs()[words[1]], "commands", {})
    return f"{page}#{words[1]}-{words[2]}" if len(words) > 2 and words[2] in inside else page


@cache
def _verbs() -> dict[str, Any]:
    commands: Any = typer.main.get_command(app)
    return {verb: one for verb, one in commands.commands.items() if not one.hidden}


def _overview() -> str:
    command: Any = typer.main.get_command(app)
    rows = [
        (f"[`overland {verb}`]({verb}.md)", as_markdown(one.get_short_help_str(limit=100)))
        for verb, one in _verbs().items()
    ]
    return "\n\n".join([
        "# Command line",
        table(("command", "what it does"), rows),
        "## Options of `overland` itself",
        _options(command, command.context_class(command, info_name="overland")),
    ])  # fmt: skip


def _page(verb: str, command: Any) -> str:
    parts = [f"# overland {verb}", *_body(f"overland {verb}", command)]
    for name, inner in getattr(command, "commands", {}).items():
        parts += [f"## overland {verb} {name} {{ #{verb}-{name} }}"]
        parts += _body(f"overland {verb} {name}", inner)
    return "\n\n".join(parts) + "\n"


def _body(words: str, command: Any) -> list[str]:
    context = command.context_class(command, info_name=words)
    usage = " ".join([words, *command.collect_usage_pieces(context)])
    examples = EXAMPLES.get(words.removeprefix("overland "), ())
    parts = [_text(command.help), f"```\n{usage}\n```", _options(command, context)]
    if examples:
        parts += ["Examples:", "```\n" + "\n".join(examples) + "\n```"]
    return [part for part in parts if part]


def _text(text: str | None) -> str:
    """Returns a help text with its paragraphs; where its lines are to be kept, as a block."""
    parts = re.split(r"\n\s*\n", text or "")
    return "\n\n".join(
        "```\n" + part.strip().removeprefix("\b\n") + "\n```" if "\b" in part else as_markdown(part)
        for part in parts
    )


def _options(command: Any, context: Any) -> str:
    rows = []
    for one in command.get_params(context):
        record = one.get_help_record(context)
        if record and "--help" not in one.opts:
            about, _, limits = record[1].partition("  [")
            if about.startswith("["):
                about, limits = "", about[1:]
            rows.append((as_code(record[0]), as_markdown(about), as_markdown(limits[:-1])))
    return table(("option", "meaning", "default and bounds"), rows) if rows else ""
