"""Pages of the docs as tests read them: fenced blocks, the marks above them, and their commands.

A comment on the line above a block says how a test treats it:

    <!-- exit 2 -->                     the block ends with this exit code
    <!-- not run: needs a GPU -->       no test runs it, for this reason
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.cli.processes import ROOT
from tests.docs.shell import Shell

FENCE = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*?) -->\n)?(?P<indent> *)```(?P<language>\w*)[^\n]*\n"
    r"(?P<text>.*?)^(?P=indent)```$",
    flags=re.MULTILINE | re.DOTALL,
)
COMMAND = Path(sys.executable).with_name("overland")  # as commands call themselves
REASONS = ("needs a GPU", "needs the network", "needs a cluster")


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    code: int = 0  # that its last command ends with
    reason: str = ""  # why no test runs it


def blocks(text: str) -> list[Block]:
    return [_block(found) for found in FENCE.finditer(text)]


def _block(found: re.Match[str]) -> Block:
    mark = found["mark"] or ""
    code = re.fullmatch(r"exit (\d+)", mark)
    reason = re.fullmatch(r"not run: (.+)", mark)
    assert code or reason or not mark or found["language"] != "bash", mark
    if reason:
        assert reason[1].startswith(REASONS), f"{mark}: a reason begins with one of {REASONS}"
    return Block(
        found["language"], found["text"], int(code[1]) if code else 0, reason[1] if reason else ""
    )


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@dataclass(frozen=True)
class Step:
    """A block that was run: what it said, and the lines of the page that it did not say."""

    script: str
    said: str
    code: int
    comparable: int  # lines of the output that the page shows and that can be compared
    missing: list[str]  # those of them that were not said


def run_page(
    name: str, folder: Path, changes: dict[str, str], until: str = "", **env: str
) -> Iterator[Step]:
    """Runs the bash blocks of a page in order, in one folder, as they are written but for
    `changes`: what the page shows → what is run, such as a name on the Hub → a local folder. With
    `until`, only those before the first block that holds it."""
    text = page(name)
    for large in (*changes, until):
        assert large in text, f"{name} does not say {large!r}"
    shell = Shell(folder, **env)
    try:
        found = blocks(text)
        for block, after in zip(found, [*found[1:], Block("", "")], strict=True):
            if until and until in block.text:
                return
            if block.language != "bash" or block.reason:
                continue
            script = _changed(block.text, changes)
            code, said = shell.run(script)
            said = said.replace(f"{folder}/", "").replace(str(COMMAND), "overland")
            assert code == block.code, f"exit {code} of\n{script}\n{said}"
            shown = _changed(after.text, changes) if after.language == "text" else ""
            lines = _comparable(shown)
            words = _without_numbers(" ".join(said.split()))
            missing = [line for line in lines if line not in words]
            yield Step(script, said, code, len(lines), missing)
    finally:
        shell.close()


def _changed(text: str, changes: dict[str, str]) -> str:
    for large, small in changes.items():
        text = text.replace(large, small)
    return text


def _comparable(shown: str) -> list[str]:
    """Lines of a shown output, without the spaces that align it. Numbers depend on sizes and
    machines, so only the words around them count; texts of a model (behind │) depend on its
    weights, and are left out, as is what an ellipsis stands for."""
    lines = [_without_numbers(" ".join(line.split())) for line in shown.splitlines()]
    lines = [line.removesuffix("…").strip() for line in lines]
    return [line for line in lines if line and not re.search(r"[│█]|^…", line)]


def _without_numbers(text: str) -> str:
    """Puts 0 in place of numbers, of sizes with their units, and of the digests in names of jobs
    and folders."""
    return re.sub(r"-[0-9a-f]{6}\b|-?[0-9][0-9.,:e+-]*( [KMGT]iB)?", "0", text)
