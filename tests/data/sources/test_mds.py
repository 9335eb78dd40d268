"""MDS shards that are damaged or hostile, and columns that the fixtures lack."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from overland.apps.data.mds import MDS
from overland.data.sources import open_source
from overland.errors import DataError
from tests.data.sources.samples import copied, read_all


def write_mds(folder: Path, columns: dict[str, str], rows: list[dict[str, bytes]]) -> None:
    """One shard, laid out as facts about the format say; sizes are variable but for int."""
    sizes = [8 if code == "int" else None for code in columns.values()]
    samples = []
    for row in rows:
        variable = [len(row[name]) for name, size in zip(columns, sizes, strict=True) if not size]
        samples.append(
            struct.pack(f"<{len(variable)}I", *variable) + b"".join(row[name] for name in columns)
        )
    head = b"{}"
    start = 4 * (len(rows) + 2) + len(head)
    offsets = np.cumsum([start, *map(len, samples)]).astype("<u4").tobytes()
    data = struct.pack("<I", len(rows)) + offsets + head + b"".join(samples)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "shard.00000.mds").write_bytes(data)
    shard = {
        "column_names": list(columns),
        "column_encodings": list(columns.values()),
        "column_sizes": sizes,
        "compression": None,
        "format": "mds",
        "hashes": [],
        "raw_data": {"basename": "shard.00000.mds", "bytes": len(data), "hashes": {}},
        "zip_data": None,
        "samples": len(rows),
        "size_limit": 1 << 26,
        "version": 2,
    }
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))


def change_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((folder / "index.json").read_text())
    change(index["shards"][0])
    (folder / "index.json").write_text(json.dumps(index))


def ndarray(head: bytes, dtype: str) -> bytes:
    return head + np.array([5, 6, 7, 8], dtype).tobytes()


@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        ("ndarray:uint16:4", ndarray(b"", "<u2")),
        ("ndarray:int64:2,2", ndarray(b"", "<i8")),
        ("ndarray:uint32", ndarray(bytes([1 << 2, 4]), "<u4")),
        ("ndarray:uint32", ndarray(bytes([2 << 2 | 1, 2, 0, 2, 0]), "<u4")),
        ("ndarray", ndarray(bytes([33, 1 << 2 | 2, 4, 0, 0, 0]), "<i4")),
        ("bytes", ndarray(b"", "<i8")),
        ("json", b"[5, 6, 7, 8]"),
    ],
)
def test_token_ids_in_every_encoding(tmp_path: Path, encoding: str, data: bytes) -> None:
    write_mds(tmp_path, {"n": "int", "tokens": encoding}, [{"n": b"\0" * 8, "tokens": data}])
    source = open_source(tmp_path)
    assert source.kind == "tokens"
    (ids,) = read_all(source)
    assert isinstance(ids, np.ndarray)
    assert ids.dtype == np.int64
    assert ids.tolist() == [5, 6, 7, 8]


def test_bytes_may_be_ids_of_another_type_and_json_may_be_text(tmp_path: Path) -> None:
    write_mds(tmp_path / "a", {"tokens": "bytes"}, [{"tokens": ndarray(b"", "<u2")}])
    assert [list(ids) for ids in read_all(open_source(tmp_path / "a", dtype="uint16"))] == [
        [5, 6, 7, 8]
    ]
    write_mds(tmp_path / "b", {"text": "json"}, [{"text": b'"words"'}])
    assert read_all(open_source(tmp_path / "b")) == ["words"]


def test_bytes_of_another_type_ask_for_it(tmp_path: Path) -> None:
    for ids in (np.arange(3), np.arange(1, 9)):  # no whole number of int64, and absurd ids
        write_mds(tmp_path, {"tokens": "bytes"}, [{"tokens": ids.astype("<u2").tobytes()}])
        with pytest.raises(DataError, match=r"column .* are not int64 ids: set --dtype to their"):
            open_source(tmp_path)
        (found,) = read_all(open_source(tmp_path, dtype="uint16"))
        assert list(found) == list(ids)


def test_a_json_column_that_begins_with_null_is_still_text(tmp_path: Path) -> None:
    rows = [b"null", b'"text"']
    write_mds(
        tmp_path, {"title": "str", "text": "json"}, [{"title": b"t", "text": r} for r in rows]
    )
    source = open_source(tmp_path, skip_bad=True)
    assert read_all(source) == ["text"]
    assert source.num_bad == 1


def test_pickles_are_not_loaded(tmp_path: Path) -> None:
    write_mds(tmp_path, {"text": "pkl"}, [{"text": b"\x80\x04."}])
    with pytest.raises(DataError, match="set --column to the column that holds the documents"):
        open_source(tmp_path)


def test_json_that_is_no_text_is_bad_content(tmp_path: Path) -> None:
    rows = [b'"fine"', b"{oops", b'"\\ud800"', b"5", b"[" * 100_000]
    write_mds(tmp_path, {"text": "json"}, [{"text": row} for row in rows])
    with pytest.raises(DataError, match=r"sample 1: column 'text': Expecting property name"):
        read_all(open_source(tmp_path))
    source = open_source(tmp_path, skip_bad=True)
    assert read_all(source) == ["fine"]
    assert source.num_bad == 4


def test_splits_are_folders(tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_mds(tmp_path / split, {"text": "str"}, [{"text": split.encode()}])
    assert read_all(open_source(tmp_path)) == ["train"]
    assert read_all(open_source(tmp_path, split="val")) == ["val"]
    with pytest.raises(DataError, match=r"no split 'vall'; did you mean 'val'\?"):
        open_source(tmp_path, split="vall")


def test_bad_utf8_is_named_or_skipped(tmp_path: Path) -> None:
    write_mds(tmp_path, {"text": "str"}, [{"text": b"fine"}, {"text": b"caf\xe9"}])
    with pytest.raises(
        DataError, match=r"shard\.00000\.mds: sample 1: column 'text': expected UTF-8 text"
    ):
        read_all(open_source(tmp_path))
    source = open_source(tmp_path, skip_bad=True)
    assert read_all(source) == ["fine"]
    assert source.num_bad == 1


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_is_found_by_its_hash_and_never_skipped(tmp_path: Path) -> None:
    folder = copied("mds_zstd", tmp_path)
    flip(folder / "shard.00001.mds.zstd", 5000)
    source = open_source(folder, skip_bad=True)
    assert len(list(source.read("shard.00000.mds"))) == 15
    with pytest.raises(DataError, match=r"shard\.00001\.mds\.zstd is damaged: its sha1 is"):
        list(source.read("shard.00001.mds"))


@pytest.mark.parametrize("name", ["mds_plain", "mds_zstd"])
def test_a_truncated_shard_is_named(tmp_path: Path, name: str) -> None:
    folder = copied(name, tmp_path)
    path = next(folder.glob("shard.00002*"))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=rf"{path.name} is truncated: .* bytes, but the index"):
        read_all(open_source(folder))


def test_a_missing_shard_is_an_error(tmp_path: Path) -> None:
    folder = copied("mds_plain", tmp_path)
    (folder / "shard.00001.mds").unlink()
    with pytest.raises(DataError, match=r"shard\.00001\.mds cannot be read: No such file"):
        read_all(open_source(folder, skip_bad=True))


def test_a_damaged_table_of_samples_is_named(tmp_path: Path) -> None:
    folder = copied("mds_plain", tmp_path)
    flip(folder / "shard.00000.mds", 7)
    with pytest.raises(DataError, match=r"shard\.00000\.mds is damaged: its table of samples"):
        read_all(open_source(folder))


def test_a_damaged_size_of_a_column_is_named(tmp_path: Path) -> None:
    write_mds(tmp_path, {"text": "str"}, [{"text": b"fine"}, {"text": b"also"}])
    path = tmp_path / "shard.00000.mds"
    flip(path, len(path.read_bytes()) - 8)
    with pytest.raises(DataError, match=r"sample 1 has 8 bytes, but its columns take 9"):
        read_all(open_source(tmp_path, skip_bad=True))


@pytest.mark.parametrize("name", ["../secret.mds", "/etc/passwd", "", 7])
@pytest.mark.parametrize("part", ["raw_data", "zip_data"])
def test_an_index_that_leads_out_of_its_folder_is_refused(
    tmp_path: Path, name: object, part: str
) -> None:
    folder = copied("mds_zstd", tmp_path)
    change_index(folder, lambda shard: shard[part].update(basename=name))
    with pytest.raises(DataError, match=r"index\.json names .* outside its folder and is not read"):
        open_source(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda shard: shard.pop("samples"), "not an index of MDS shards: 'samples' is missing"),
        (lambda shard: shard["column_sizes"].pop(), "lists of columns differ in length"),
        (lambda shard: shard.update(format="csv"), "shards of format csv"),
        (lambda shard: shard.update(samples=3), "has 15 samples, but the index says 3"),
        (lambda shard: shard.update(compression="br"), "compressed with br"),
    ],
)
def test_an_index_that_is_wrong_is_one_sentence(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    folder = copied("mds_zstd", tmp_path)
    change_index(folder, change)
    with pytest.raises(DataError, match=message):
        read_all(open_source(folder))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "it does not have the expected structure"),
        ('{"shards": 5}', "it does not have the expected structure"),
        ('{"shards": [{}]}', "'format' is missing"),
        ("[" * 100_000, "its values are nested too deeply"),
        ("", "Expecting value"),
    ],
)
def test_shards_with_a_file_that_is_no_index_are_not_called_empty(
    tmp_path: Path, text: str, message: str
) -> None:
    folder = copied("mds_plain", tmp_path)
    (folder / "index.json").write_text(text)
    with pytest.raises(DataError, match=rf"index\.json is not an index of MDS shards: {message}"):
        open_source(folder)


def test_a_shard_that_is_decompressed_already_is_taken(tmp_path: Path) -> None:
    folder = copied("mds_zstd", tmp_path)
    before = read_all(open_source(folder))
    import zstandard

    zipped = folder / "shard.00000.mds.zstd"
    raw = zstandard.ZstdDecompressor().decompressobj().decompress(zipped.read_bytes())
    (folder / "shard.00000.mds").write_bytes(raw)
    zipped.unlink()
    assert read_all(open_source(folder)) == before


def test_a_column_that_is_missing_brings_the_nearest_name(tmp_path: Path) -> None:
    folder = copied("mds_plain", tmp_path)
    with pytest.raises(DataError, match=r"no column 'txt'; did you mean 'text'\?.*doc_id \(int\)"):
        MDS(folder, "txt")
