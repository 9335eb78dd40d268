"""Data that was renamed between two sessions of a run continues where it was, or is refused, but is
never read again."""

from pathlib import Path

import numpy as np
import pytest

from overland.config.schema import JobConfig
from overland.data.corpora import Preparer
from overland.data.prepare import Dataset, training_data
from overland.errors import DataError
from tests.data.making import tokenizer_in, write_lines


def opened(folder: Path, data: Path) -> Dataset:
    sections = {
        "model": {"hf_assets_path": str(folder / "words")},
        "training": {"dataset_path": str(data), "seq_len": 16},
        "data": {"folder": str(folder / "data"), "tokenise_processes": 0},
    }
    return training_data(JobConfig.model_validate(sections), 2, None, Preparer())


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    tokenizer_in(tmp_path / "words")
    return write_lines(tmp_path / "lines", 3)


def test_a_renamed_folder_is_read_on_where_it_was(tmp_path: Path, lines: Path) -> None:
    before = opened(tmp_path, lines)
    expected = before.rows.read(5).tokens
    before.close()
    again = opened(tmp_path, lines.rename(tmp_path / "renamed")).continued(before.plan.to_json(), 5)
    assert again.plan == before.plan
    assert np.array_equal(again.rows.read(5).tokens, expected)
    again.close()


def test_renamed_files_are_not_read_again(tmp_path: Path, lines: Path) -> None:
    before = opened(tmp_path, lines / "000.jsonl")
    before.close()
    renamed = opened(tmp_path, (lines / "000.jsonl").rename(lines / "a.jsonl"))
    with pytest.raises(DataError, match=r"a\.jsonl has the same content as 000\.jsonl, which"):
        renamed.continued(before.plan.to_json(), 5)
    other = opened(tmp_path, lines / "001.jsonl").continued(before.plan.to_json(), 5)
    assert list(other.plan.sources) == ["000.jsonl", "001.jsonl"]
    other.close()
