"""Files that the formats' own libraries wrote come out as these libraries read them."""

import pickle

import pytest

from overland.apps.data.mds import MDS
from overland.data.sources import open_source
from tests.data.sources.samples import (
    MDS_FIXTURES,
    MEGATRON_FIXTURES,
    expected_hashes,
    fixture,
    hashes,
)


@pytest.mark.parametrize("name", MDS_FIXTURES + MEGATRON_FIXTURES)
def test_every_document_has_the_expected_hash(name: str) -> None:
    folder, expected = fixture(name)
    source = open_source(folder)
    assert hashes(source) == expected_hashes(expected)
    assert source.kind == ("text" if name in ("mds_plain", "mds_zstd") else "tokens")


@pytest.mark.parametrize("name", MDS_FIXTURES)
def test_mds_shards_are_chunks_of_known_size(name: str) -> None:
    folder, expected = fixture(name)
    source = open_source(folder)
    assert [source.num_documents(chunk) for chunk in source.chunks()] == (
        expected["samples_per_shard"]
    )
    columns = dict(zip(expected["column_names"], expected["column_encodings"], strict=True))
    assert source.columns == columns


@pytest.mark.parametrize(
    ("name", "columns"), [("mds_plain", ["doc_id"]), ("mds_tokens_ndarray", ["source", "n"])]
)
def test_the_other_columns_of_mds_are_read_too(name: str, columns: list[str]) -> None:
    folder, expected = fixture(name)
    source = open_source(folder)
    assert isinstance(source, MDS)
    records = [record for chunk in source.chunks() for record in source.records(chunk)]
    for column in columns:
        assert [record[column] for record in records] == [
            sample[column] for sample in expected["samples"]
        ]


@pytest.mark.parametrize("name", MEGATRON_FIXTURES)
def test_a_megatron_pair_is_found_by_folder_prefix_or_file(name: str) -> None:
    folder, expected = fixture(name)
    index = next(folder.glob("*.idx"))
    for path in (index, index.with_suffix(".bin"), index.with_suffix("")):
        source = open_source(path)
        assert source.format == "megatron"
        assert (
            sum(source.num_documents(chunk) or 0 for chunk in source.chunks())
            == (expected["num_documents"])
        )


def test_megatron_chunks_are_ranges_of_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    folder, expected = fixture("megatron_uint16")
    monkeypatch.setattr("overland.apps.data.megatron.DOCUMENTS_PER_CHUNK", 7)
    source = open_source(folder)
    assert [source.num_documents(chunk) for chunk in source.chunks()] == [7] * 8 + [4]
    assert hashes(source) == expected_hashes(expected)


@pytest.mark.parametrize("name", MDS_FIXTURES + MEGATRON_FIXTURES)
def test_a_source_goes_to_another_process(name: str) -> None:
    source = open_source(fixture(name)[0])
    assert hashes(pickle.loads(pickle.dumps(source))) == hashes(source)
