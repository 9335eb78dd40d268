"""The commands that the docs show: lines of blocks, and `overland …` in the text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.cli.processes import ROOT
from tests.docs.pages import FENCE

PROGRAMS = (
    "overland", "make", "python", "pip", "uv", "torchrun", "srun", "sbatch", "mpirun", "bash", "sh",
    "export", "source", "git", "ln", "tensorboard", "vllm", "apptainer", "trl", "tail", "rm",
)  # fmt: skip
SHELLS = ("", "bash", "sh", "console")
# Their commands are run by tests of their own: tests/docs/test_tutorials.py and
# tests/documents/test_pages.py, which fail on a command that they do not run.
TUTORIALS = "docs/tutorials/"
DOCUMENTS = tuple(
    f"docs/coming-from/{name}.md"
    for name in ("stub", "torchtitan", "frontier", "fsdp-playground", "frontier-sft")
)
# Written by programs, from what they ran.
EVIDENCE = "docs/evidence/"


def pages() -> list[str]:
    """README, the other pages at the top, and docs, by their paths."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    names = sorted(str(path.relative_to(ROOT)) for path in found)
    return [name for name in names if not name.startswith(EVIDENCE)]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def block_commands(text: str) -> list[str]:
    """Lines of shell blocks that begin with a program, as one types them: lines that end in a
    backslash are joined, comments and prompts left out."""
    found = []
    for block in FENCE.finditer(text):
        if block["language"] not in SHELLS or (block["mark"] or "").startswith("exit"):
            continue  # marked: a mistake, on purpose
        whole = re.sub(r"\\\n *", "", block["text"])
        whole = re.sub(r"<<'(\w+)'\n.*?^\1$", "", whole, flags=re.M | re.S)
        for line in whole.splitlines():
            command = bare(line)
            if is_command(command):
                found.append(command)
    found += [bare(line) for line in _indented(text) if is_command(bare(line))]
    return found


def _indented(text: str) -> Iterator[str]:
    yield from re.findall(r"^    (\S.*)$", re.sub(FENCE, "", text), flags=re.M)


def bare(line: str) -> str:
    return re.split(r"\s+#\s", line.strip().removeprefix("$ "))[0].strip()


def is_command(line: str) -> bool:
    words = [word for word in line.split() if not re.match(r"[A-Z_]+=", word)]
    if not words:
        return False
    if re.search(r"\S {3,}\S", line):  # a table that a command has printed
        return False
    return (len(words) > 1 and words[0] in PROGRAMS) or words[0].startswith("./")


def inline_commands(text: str) -> list[str]:
    """`overland …` in the text, up to an ellipsis."""
    spans = re.findall(r"`([^`\n]+)`", re.sub(FENCE, "", text))
    found = []
    for span in spans:
        command = re.sub(r"^(?:[A-Z_]+=\S+ )+", "", span.replace("\\|", "|"))
        if command.startswith("overland "):
            found.append(command)
    return found


def listed_commands() -> dict[str, str]:
    """tests/docs/commands.txt: command → what runs it, or why nothing does."""
    found, how = {}, ""
    for line in Path(__file__).with_name("commands.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("    "):
            found[line.strip()] = how
        elif line and not line.startswith("#"):
            how = line
    return found
