"""Questions and answers from the docstrings of Python's standard library: fine-tuning data that
every machine has, without a download.

The answer to "What does shutil.copyfile do?" is the first paragraph of its docstring. In pairs for
preference tuning, the rejected answer is about something else in the same module.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from overland.apps.data.standard_library import library_modules, part_of_files
from overland.data.sources.source import FileSource, Kind

# One or two whole sentences: no signatures, and nothing too long for a short sequence.
ANSWER = re.compile(r"[A-Z].{15,158}\.")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Docstrings(FileSource):
    """A chunk is a module; its records have `question` and `answer`, and `chosen` and `rejected`
    turns. `part` (k, n) takes every n-th module, starting with the k-th."""

    format = "docstrings"
    kind: Kind = "records"

    def __init__(self, part: tuple[int, int] = (0, 1)) -> None:
        root, files = library_modules()
        public = [file for file in files if not module_name(file).startswith("_")]
        super().__init__(root, part_of_files(public, self.format, part))

    def read(self, chunk: str) -> Iterator[dict[str, Any]]:
        asked = list(questions((self.root / chunk).read_text("utf-8", "replace"), chunk))
        others = [answer for _, answer in asked]
        for (question, answer), other in zip(asked, others[1:] + others[:1], strict=True):
            if other != answer:  # equal if the module has only one, or two that say the same
                turns = [[{"role": "assistant", "content": text}] for text in (answer, other)]
                yield {"question": question, "answer": answer,
                       "chosen": turns[0], "rejected": turns[1]}  # fmt: skip


def questions(source: str, file: str) -> Iterator[tuple[str, str]]:
    """Yields a question and its answer for each public class and function with a docstring."""
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError):  # a test fixture, or written for another Python version
        return
    yield from _below(module, module_name(file))


def _below(node: ast.Module | ast.ClassDef, name: str) -> Iterator[tuple[str, str]]:
    for one in node.body:
        if not isinstance(one, (*FUNCTIONS, ast.ClassDef)) or one.name.startswith("_"):
            continue
        full = f"{name}.{one.name}"
        paragraph = (ast.get_docstring(one) or "").partition("\n\n")[0]
        answer = " ".join(paragraph.split())
        if ANSWER.fullmatch(answer):
            is_function = isinstance(one, FUNCTIONS)
            yield (f"What does {full} do?" if is_function else f"What is {full}?"), answer
        if isinstance(one, ast.ClassDef):
            yield from _below(one, full)


def module_name(file: str) -> str:
    """Returns the name that a module is imported by, without the `__init__` of a package."""
    parts = PurePosixPath(Path(file).with_suffix("").as_posix()).parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
