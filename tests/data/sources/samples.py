"""Fixtures and small corpora for the tests of sources.

The fixtures were written by MosaicML's streaming library and by Megatron; each README.json says
what must come out. Where they are not beside this folder, they are looked for in OVERLAND_FIXTURES,
or in a folder `shared/fixtures` beside the repository.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from overland.apps.data.summary import document_hash
from overland.data.sources.source import Document, FileSource
from tests.cli.processes import ROOT

HERE = Path(__file__).parents[1] / "fixtures"
ELSEWHERE = Path(os.environ.get("OVERLAND_FIXTURES", ROOT.parent / "shared" / "fixtures"))

MDS_FIXTURES = ["mds_plain", "mds_zstd", "mds_tokens_bytes", "mds_tokens_ndarray"]
MEGATRON_FIXTURES = ["megatron_int32", "megatron_uint16"]


def fixture(name: str) -> tuple[Path, dict[str, Any]]:
    """The corpus of a fixture, and what its README expects."""
    for place in (HERE / name, ELSEWHERE / name):
        if (place / "README.json").is_file():
            expected = json.loads((place / "README.json").read_text())["expected"]
            return next(
                place / one for one in ("saved", "data") if (place / one).is_dir()
            ), expected
    pytest.skip(f"fixture {name} is not here; set OVERLAND_FIXTURES to the folder that has it")


def copied(name: str, tmp_path: Path) -> Path:
    """A copy of a fixture's corpus, to be damaged."""
    target = tmp_path / name
    shutil.copytree(fixture(name)[0], target)
    for path in (target, *target.iterdir()):
        path.chmod(0o755)
    return target


def expected_hashes(expected: dict[str, Any]) -> list[str]:
    rows = expected.get("samples") or expected["documents"]
    return [row.get("sha256") or row["sha256_le_int64"] for row in rows]


def read_all(source: FileSource) -> list[Document]:
    return [document for chunk in source.chunks() for document in source.read(chunk)]


def hashes(source: FileSource) -> list[str]:
    return [document_hash(document) for document in read_all(source)]
