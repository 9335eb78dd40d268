"""Datasets and tokenizers from others: their claims are checked before they are trusted."""

from __future__ import annotations

import gzip
import json
import struct
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from overland.apps.data.mds import read_mds_index, read_shard
from overland.apps.data.megatron import HEAD, MAGIC, read_megatron_index
from overland.data.sources import is_mds
from overland.data.sources.huggingface import subset_files
from overland.data.tokenizer_files import Beside
from overland.errors import DataError
from tests.limited import limited

RAW = {"basename": "a.mds", "bytes": 10, "hashes": {}}
SHARD: dict[str, Any] = {
    "format": "mds", "version": 2, "column_names": ["text"], "column_encodings": ["str"],
    "column_sizes": [None], "compression": "gz", "samples": 1, "size_limit": 1,
    "raw_data": RAW,
    "zip_data": {"basename": "a.mds.gz", "bytes": 0, "hashes": {}},
}  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000, "[]", '{"shards": 7}', '{"shards": [7]}', '{"shards": ["abc"]}',
        '{"shards": [{}]}', json.dumps({"shards": [SHARD | {"samples": "many"}]}),
        json.dumps({"shards": [SHARD | {"column_names": [["a"]]}]}),
        json.dumps({"shards": [SHARD | {"raw_data": {"basename": "../a", "bytes": 1}}]}),
        json.dumps({"shards": [SHARD | {"raw_data": {"basename": 7, "bytes": 1, "hashes": {}}}]}),
        json.dumps({"shards": [SHARD | {"raw_data": [1, 2]}]}),
        json.dumps({"shards": [SHARD | {"samples": 2**60}]}),
        json.dumps({"shards": [SHARD | {"column_sizes": [-4]}]}),
        json.dumps({"shards": [SHARD | {"raw_data": RAW | {"bytes": 2**62}}]}),
        json.dumps({"shards": [SHARD | {"raw_data": RAW | {"bytes": -1}}]}),
    ],
)  # fmt: skip
def test_an_mds_index_of_another_structure_is_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text(text)
    is_mds(tmp_path)
    with pytest.raises(DataError, match=r"index\.json"):
        read_mds_index(tmp_path)


@pytest.mark.parametrize("method", ["gz", "zstd"])
def test_a_shard_decompresses_to_the_size_it_claims(method: str, tmp_path: Path) -> None:
    size = 2**31
    if method == "gz":
        piece = gzip.compress(bytes(2**24))
        data = piece * (size // 2**24)
    else:
        zstandard = pytest.importorskip("zstandard")
        data = zstandard.ZstdCompressor().compress(bytes(2**28)) * 8
    entry = SHARD | {"compression": method}
    entry["zip_data"] = {"basename": "a.zip", "bytes": len(data), "hashes": {}}
    (tmp_path / "a.zip").write_bytes(data)
    (tmp_path / "index.json").write_text(json.dumps({"shards": [entry]}))
    (shard,) = read_mds_index(tmp_path).values()
    ended = limited(partial(read_shard, tmp_path, shard), megabytes=600)
    assert ended.startswith("DataError: ") and "is too long" in ended, ended  # noqa: PT018


def test_a_small_shard_does_not_unfold_to_a_huge_one(tmp_path: Path) -> None:
    data = gzip.compress(bytes(2**24)) * 128
    entry = SHARD | {"raw_data": RAW | {"bytes": 2**31}}
    entry["zip_data"] = {"basename": "a.mds.gz", "bytes": len(data), "hashes": {}}
    (tmp_path / "a.mds.gz").write_bytes(data)
    (tmp_path / "index.json").write_text(json.dumps({"shards": [entry]}))
    (shard,) = read_mds_index(tmp_path).values()
    ended = limited(partial(read_shard, tmp_path, shard))
    assert "a.mds.gz would decompress to 2,147,483,648 bytes" in ended, ended


def test_a_shard_of_another_size_is_not_read(tmp_path: Path) -> None:
    entry = SHARD | {"zip_data": None}
    with (tmp_path / "a.mds").open("wb") as file:
        file.truncate(2**33)  # takes no space on the disk
    (tmp_path / "index.json").write_text(json.dumps({"shards": [entry]}))
    (shard,) = read_mds_index(tmp_path).values()
    ended = limited(partial(read_shard, tmp_path, shard))
    assert "a.mds is too long" in ended, ended


@pytest.mark.parametrize(
    ("counts", "arrays"),
    [
        ((2**63, 2**63), b""),
        ((2**62, 2), b""),
        ((1, 2), struct.pack("<iqqq", 4, 2**63 - 4, 0, 1)),
        ((1, 2), struct.pack("<iqqq", 2**31 - 1, 2**62, 0, 1)),
        ((1, 2), struct.pack("<iqqq", 1, 0, 0, 2**60)),
    ],
)
def test_a_megatron_index_cannot_point_beyond_its_file(
    counts: tuple[int, int], arrays: bytes, tmp_path: Path
) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(16))
    (tmp_path / "a.idx").write_bytes(HEAD.pack(MAGIC, 1, 5, *counts) + arrays)
    ended = limited(partial(read_megatron_index, tmp_path / "a.idx"))
    assert ended.startswith(f"DataError: {tmp_path}"), ended


BOMB = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60))


@pytest.mark.parametrize(
    "front",
    [
        "configs: " + "[" * 5000, f"{BOMB}configs: *a59", "configs: &a [*a]",
        "configs:\n- config_name: en\n  data_files: '[z-a]'",
        "configs:\n- config_name: en\n  data_files: '" + "*a" * 40 + "b'",
    ],
)  # fmt: skip
def test_a_readme_of_others_ends_in_a_sentence(front: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"---\n{front}\n---\n")
    files = ["a" * 200 + ".jsonl", "README.md"]
    ended = limited(partial(subset_files, tmp_path, files, "en", "me/texts"))
    assert ended.startswith("DataError: "), ended


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer_config.json", "[" * 100_000),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": "a"}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}'),
        ("added_tokens.json", '{"a": "b"}'),
        ("added_tokens.json", '{"a": [1]}'),
        ("special_tokens_map.json", "7"),
    ],
)
def test_what_lies_beside_a_tokenizer_is_one_sentence(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError):
        Beside.of(tmp_path / "tokenizer.model")
