"""Questions and answers from Python's own docstrings."""

from __future__ import annotations

import pytest

from overland.apps.data.docstrings import Docstrings, questions
from overland.config.schema import Data, DataSource
from overland.data.sources.columns import WHOLE
from overland.data.wanted import open_by_name
from overland.errors import DataError

SOURCE = '''
def copy(source):
    """Copies a file to
    another place.

    More about it.
    """

class Copier:
    """Copies a file, and keeps count."""
    def run(self):
        "Copies what it was given."
    def _hidden(self):
        """Nobody is asked about this one."""

def short():
    """Short."""
def old(a):
    """old(a) -> b, which is a signature."""
'''


def test_what_is_public_and_documented_is_asked_about() -> None:
    assert list(questions(SOURCE, "tools/files.py")) == [
        ("What does tools.files.copy do?", "Copies a file to another place."),
        ("What is tools.files.Copier?", "Copies a file, and keeps count."),
        ("What does tools.files.Copier.run do?", "Copies what it was given."),
    ]
    assert not list(questions("no python at all", "a.py"))


def test_records_come_from_the_library_the_same_each_time() -> None:
    source = Docstrings()
    assert "json/__init__.py" in source.chunks()
    assert not any(chunk.startswith("_") for chunk in source.chunks())
    records = list(source.read("shutil.py"))
    assert records == list(Docstrings().read("shutil.py"))
    asked = {record["question"]: record for record in records}
    one = asked["What does shutil.copyfile do?"]
    assert one["answer"] == "Copy data from src to dst in the most efficient way possible."
    assert one["chosen"] == [{"role": "assistant", "content": one["answer"]}]
    assert one["rejected"] != one["chosen"]


def test_it_is_read_as_records_only_and_in_parts() -> None:
    whole = DataSource(column=WHOLE)
    parts = [open_by_name(f"docstrings:{k}/3", whole, Data()) for k in range(3)]
    chunks = [chunk for part in parts for chunk in part.chunks()]
    assert sorted(chunks) == sorted(Docstrings().chunks())
    with pytest.raises(DataError, match=r"docstrings contains questions and answers: set sft"):
        open_by_name("docstrings", DataSource(), Data())
    with pytest.raises(DataError, match=r"docstrings:3/3: parts are numbered from 0 to 2"):
        open_by_name("docstrings:3/3", whole, Data())
