import bz2
import gzip
import json
import lzma
import random
from pathlib import Path

import numpy as np
import pytest
import zstandard

from overland.data.sources import open_source
from overland.data.sources.jsonl import JsonLines
from overland.data.sources.text import TextFolder
from overland.errors import DataError
from tests.data.sources.samples import read_all

TEXTS = ["plain", "two\nlines", "naïve 日本 😀", "", "tab\there"]


def lines(texts: list[str], column: str = "text") -> bytes:
    return b"".join(json.dumps({"id": 1, column: text}).encode() + b"\n" for text in texts)


def test_a_text_file_is_a_document_byte_for_byte(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"second\r\n")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.md").write_bytes("ersté".encode())
    (tmp_path / "photo.jpg").write_bytes(b"\xff")
    source = open_source(tmp_path)
    assert source.chunks() == ["a/x.md", "b.txt"]
    assert read_all(source) == ["ersté", "second\r\n"]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_json_lines_come_out_of_any_compression(tmp_path: Path, suffix: str) -> None:
    data = lines(TEXTS)
    compress = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[suffix]
    (tmp_path / f"a.jsonl{suffix}").write_bytes(compress(data) + compress(lines(["more"])))
    source = open_source(tmp_path)
    assert source.format == "jsonl"
    assert source.columns == {"id": "int", "text": "string"}
    assert read_all(source) == [*TEXTS, "more"]


@pytest.mark.parametrize("size", [1, 7, 40, 41, 64, 10_000])
def test_parts_of_a_large_file_hold_every_line_once(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"{i} " + "x" * (i % 50) for i in range(60)]
    (tmp_path / "a.jsonl").write_bytes(lines(texts))
    monkeypatch.setattr("overland.data.sources.jsonl.PART_BYTES", size)
    source = open_source(tmp_path)
    assert read_all(source) == texts
    assert (len(source.chunks()) > 1) == (size < 10_000)
    assert {file for chunk in source.chunks() for file in source.files_of(chunk)} == {"a.jsonl"}


def compressed(path: Path, text: bytes) -> None:
    ways = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress,
            ".zst": zstandard.ZstdCompressor().compress}  # fmt: skip
    path.write_bytes(ways[path.suffix](text))


@pytest.mark.parametrize("order", ["forward", "backward", "by twos"])
@pytest.mark.parametrize("suffix", ["gz", "xz", "bz2", "zst"])
def test_parts_of_a_compressed_file_hold_every_line_once(
    tmp_path: Path, suffix: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any order, as several processes read them; there are some also where text shrinks a lot,
    and where it does not shrink as usual."""
    monkeypatch.setattr("overland.data.sources.jsonl.PART_BYTES", 5000)
    draw = random.Random(0)
    for texts in (
        [f"{i} " + "x" * (i % 500) for i in range(400)],
        [f"{draw.getrandbits(900)}" for _ in range(400)],
    ):
        compressed(tmp_path / f"a.jsonl.{suffix}", lines(texts))
        source = open_source(tmp_path)
        chunks = source.chunks()
        assert 8 <= len(chunks) <= 32
        ranks = {"forward": chunks, "backward": chunks[::-1], "by twos": chunks[::2] + chunks[1::2]}
        found = {chunk: list(source.read(chunk)) for chunk in ranks[order]}
        assert [text for chunk in chunks for text in found[chunk]] == texts
        sizes = [sum(map(len, map(str, found[chunk]))) for chunk in chunks]
        assert max(sizes) < sum(sizes) / 2


def test_a_file_of_62_mb_is_the_work_of_many_processes(tmp_path: Path) -> None:
    with (tmp_path / "a.jsonl").open("wb") as file:
        file.write(b'{"text": "a"}\n')
        file.truncate(62_000_000)  # takes no space on the disk
    assert len(JsonLines(tmp_path, ["a.jsonl"]).chunks()) == 15


def test_a_file_whose_name_looks_like_a_part_is_a_file(tmp_path: Path) -> None:
    for name in ("a.jsonl#3", "a.jsonl#0-10"):
        (tmp_path / name).write_bytes(lines([name]))
    source = JsonLines(tmp_path, ["a.jsonl#3", "a.jsonl#0-10"])
    assert read_all(source) == ["a.jsonl#3", "a.jsonl#0-10"]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_bad_line_in_a_later_part_has_its_number_in_the_file(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = lines(["x"] * 30) + b"{oops\n" + lines(["y"])
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(gzip.compress(text) if suffix else text)
    monkeypatch.setattr("overland.data.sources.jsonl.PART_BYTES", 100)
    with pytest.raises(DataError, match=r"a\.jsonl(\.gz)?:31: not a JSON object"):
        read_all(open_source(tmp_path))


def test_token_ids_in_json_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"input_ids": [1, 2, 3]}\n{"input_ids": []}\n')
    source = open_source(tmp_path)
    assert source.kind == "tokens"
    first, second = read_all(source)
    assert isinstance(first, np.ndarray)
    assert first.dtype == np.int64
    assert first.tolist() == [1, 2, 3]
    assert len(second) == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{oops", r"a\.jsonl:2: not a JSON object: .* at column 2$"),
        (b'{"text": "x\ty"}', r"a\.jsonl:2: not a JSON object: Invalid control .* at column 12$"),
        (b'{"text": "\xe9"}', r"a\.jsonl:2: expected UTF-8 text, got .* at byte 10"),
        (b'{"txet": "x"}', r"a\.jsonl:2: expected an object with a \"text\".*mean 'txet'"),
        (b'{"text": 5}', r"a\.jsonl:2: expected an object with a \"text\""),
        (b"[1]", r"a\.jsonl:2: expected an object"),
        (b'{"text": "\\ud800"}', r"a\.jsonl:2: text has half of a surrogate pair"),
        (b'{"text": 1' + b"0" * 5000 + b"}", r"a\.jsonl:2: not a JSON object"),
        (b"[" * 100_000, r"a\.jsonl:2: not a JSON object"),
    ],
)
def test_bad_content_is_named_or_skipped_and_counted(
    tmp_path: Path, line: bytes, message: str
) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(["x"]) + line + b"\n" + lines(["y"]))
    with pytest.raises(DataError, match=message):
        read_all(open_source(tmp_path))
    source = open_source(tmp_path, skip_bad=True)
    assert read_all(source) == ["x", "y"]
    assert source.num_bad == 1


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_file_cut_short_is_never_skipped(tmp_path: Path, suffix: str) -> None:
    compress = {".gz": gzip.compress, ".zst": zstandard.compress}[suffix]
    texts = [np.random.default_rng(i).bytes(400).hex() for i in range(50)]
    data = compress(lines(texts))
    (tmp_path / f"a.jsonl{suffix}").write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=rf"a\.jsonl{suffix} cannot be read"):
        read_all(open_source(tmp_path, skip_bad=True))


def test_a_missing_column_brings_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(["x"], "body"))
    assert read_all(open_source(tmp_path, column="body")) == ["x"]
    with pytest.raises(DataError, match=r"no column 'bodi'; did you mean 'body'\? Its columns: "):
        open_source(tmp_path, column="bodi")
    with pytest.raises(DataError, match=r"column 'id' contains no text or token ids"):
        open_source(tmp_path, column="id")


@pytest.mark.parametrize("first", [None, 5, ["a"], {"body": "a"}, "missing"])
def test_a_first_record_without_text_changes_no_column(tmp_path: Path, first: object) -> None:
    odd = {"title": "odd"} if first == "missing" else {"title": "odd", "text": first}
    good = [{"title": f"title {i}", "text": f"text {i}"} for i in range(3)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, [odd, *good])))
    with pytest.raises(DataError, match=r'a\.jsonl:1: expected an object with a "text"'):
        read_all(open_source(tmp_path))
    for column in (None, "text"):
        source = open_source(tmp_path, column=column, skip_bad=True)
        assert read_all(source) == ["text 0", "text 1", "text 2"]
        assert (source.column, source.num_bad) == ("text", 1)


def test_a_column_that_is_asked_for_may_be_null_for_long(tmp_path: Path) -> None:
    nulls = [{"title": "t", "body": None, "text": None}] * 2000
    (tmp_path / "a.jsonl").write_text(
        "\n".join(map(json.dumps, [*nulls, {"title": "t", "body": "b", "text": "x"}]))
    )
    assert read_all(open_source(tmp_path, column="body", skip_bad=True)) == ["b"]
    source = open_source(tmp_path, skip_bad=True)
    assert read_all(source) == ["x"]
    assert source.num_bad == 2000


def test_an_unusual_column_is_asked_for_with_an_example_of_each(tmp_path: Path) -> None:
    records = [{"title": None, "n": 1, "body": "long " * 50}, {"title": "A title", "body": "b"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    with pytest.raises(DataError) as error:
        open_source(tmp_path)
    assert str(error.value) == (
        f"{tmp_path / 'a.jsonl'}: set --column to the column that holds the documents; its "
        "columns: title (string, such as 'A title'), n (int, such as 1), body (string, such as "
        "'long long long long long long lo'…)"
    )
    (tmp_path / "a.jsonl").write_text('{"body": "the only column"}\n')
    assert read_all(open_source(tmp_path)) == ["the only column"]


@pytest.mark.parametrize(
    ("record", "what"),
    [
        ({"messages": [{"role": "user", "content": "hi"}]}, "messages"),
        ({"id": "1", "conversations": [{"from": "human", "value": "hi"}]}, "conversations"),
        ({"prompt": "hi", "completion": "ho"}, "prompt and completion"),
    ],
)
def test_chat_data_is_called_what_it_is(tmp_path: Path, record: object, what: str) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    with pytest.raises(DataError, match=rf"like fine-tuning data \({what}\): set sft\.shape"):
        open_source(tmp_path)


def test_nested_text_of_json_lines(tmp_path: Path) -> None:
    records = [
        {"repo_name": "r1", "files": [{"path": "a", "text": "1a"}, {"path": "b", "text": "1b"}]},
        {"repo_name": "r2", "files": []},
        {"repo_name": "r3", "files": None},
        {"repo_name": "r4", "files": [{"path": "a", "text": None}, {"path": "b", "text": "4b"}]},
        {"repo_name": "r5", "files": [{"path": "a", "text": "5a"}], "meta": {"lead": "in"}},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    with pytest.raises(DataError, match=r"set --column .*files\[\]\.text \(string, such as '1a'\)"):
        open_source(tmp_path)
    with pytest.raises(DataError, match=r"no column 'files\.text'; did you mean 'files\[\]\.text'"):
        open_source(tmp_path, column="files.text")
    source = open_source(tmp_path, column="files[].text", skip_bad=True)
    assert read_all(source) == ["1a", "1b", "4b", "5a"]
    assert source.num_bad == 2
    joined = open_source(tmp_path, column="files[+].text", skip_bad=True)
    assert read_all(joined) == ["\n\n1a\n\n1b", "\n\n4b", "\n\n5a"]
    with pytest.raises(DataError, match=r"did you mean 'files\[\+\]\.text'"):
        open_source(tmp_path, column="files[+].tekst")
    assert read_all(open_source(tmp_path, column="meta.lead", skip_bad=True)) == ["in"]


def test_two_lists_are_not_joined_where_only_one_is_meant(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": [{"b": [{"c": "1"}, {"c": "2"}]}, {"b": [{"c": "3"}]}]}\n')
    assert read_all(open_source(path, column="a[+].b[+].c")) == ["\n\n1\n\n2\n\n3"]
    for column in ("a[].b[+].c", "a[+].b[].c"):
        with pytest.raises(DataError, match="joins one list, but not another"):
            open_source(path, column=column)


def test_ids_that_are_none_are_bad_documents(tmp_path: Path) -> None:
    rows = ["[1, 2]", "[3, -4]", f"[{1 << 63}]", f"[{1 << 80}]", "[5]"]
    (tmp_path / "a.jsonl").write_text("".join(f'{{"input_ids": {row}}}\n' for row in rows))
    with pytest.raises(DataError, match=r"a\.jsonl:2: -4 is not a token id"):
        read_all(open_source(tmp_path))
    source = open_source(tmp_path, skip_bad=True)
    assert [ids.tolist() for ids in read_all(source) if not isinstance(ids, str)] == [[1, 2], [5]]
    assert source.num_bad == 3


def test_text_and_json_lines_may_lie_together(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.jsonl").write_bytes(lines(["line 1", "line 2"]))
    source = open_source(tmp_path)
    assert isinstance(source, TextFolder)
    assert read_all(source) == ["text", "line 1", "line 2"]


def test_no_text_is_taken_for_a_description_of_others(tmp_path: Path) -> None:
    for name in ("README.md", "LICENSE.txt", "__init__.py"):
        (tmp_path / name).write_text(name)
    assert read_all(open_source(tmp_path)) == ["LICENSE.txt", "README.md", "__init__.py"]


def test_a_readme_beside_json_lines_is_no_document(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "b.jsonl").write_bytes(lines(["line"]))
    assert isinstance(open_source(tmp_path), JsonLines)


def test_an_empty_folder_and_an_unknown_file_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="contains no data files; supported: MDS"):
        open_source(tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        open_source(tmp_path / "nothing")
    (tmp_path / "photo.jpg").write_bytes(b"x")
    with pytest.raises(DataError, match=r"photo\.jpg has an unknown format"):
        open_source(tmp_path / "photo.jpg")


def test_zstd_without_its_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(lines(["x"])))
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(DataError, match=r"needs zstandard: pip install 'overland\[data\]'"):
        read_all(open_source(tmp_path))


@pytest.mark.parametrize(
    "form",
    [
        '[{"text": "one"}, {"text": "two, ]"}]\n',
        '\ufeff [\n  {\n    "text": "one"\n  },\n  {"text": "two, ]"}\n]',
    ],
)
def test_an_array_is_read_item_by_item(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("overland.data.sources.jsonl.READ_BYTES", 5)
    (tmp_path / "a.json").write_text(form)
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(form.encode()))
    (tmp_path / "c.json").write_text("[]")
    source = open_source(tmp_path)
    assert read_all(source) == ["one", "two, ]"] * 2
    assert source.chunks() == ["a.json", "b.json.gz", "c.json"]


def test_an_array_that_is_damaged_is_told_as_such(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'[{"text": "one"}, {"text": "\xff"}, {"txt": 3}, {"text": "four"}]')
    with pytest.raises(DataError, match=r"a\.json:2: expected UTF-8"):
        read_all(open_source(path))
    assert read_all(open_source(path, skip_bad=True)) == ["one", "four"]
    for cut in ('[{"text": "one"}', '[{"text": "one"},', '[{"text": "one"}, {"te'):
        path.write_text(cut)
        with pytest.raises(DataError, match="is truncated: its JSON array has no end"):
            read_all(open_source(path, skip_bad=True))
    path.write_text('[{"text": "one"}, oh, {"text": "two"}]')
    with pytest.raises(DataError, match=r"a\.json:2: not a JSON object"):
        read_all(open_source(path))


@pytest.mark.parametrize("read_bytes", [5, 1 << 20])
def test_arrays_that_follow_one_another_are_all_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: int
) -> None:
    monkeypatch.setattr("overland.data.sources.jsonl.READ_BYTES", read_bytes)
    (tmp_path / "a.json").write_text(
        '[{"text": "one"}]\n[] \ufeff[{"text": "two"},\n{"text": "three"}]\n'
    )
    assert read_all(open_source(tmp_path)) == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"text": "one"}] oh', "'oh' follows its JSON array"),
        ('[{"text": "one"}]\n{"text": "two"}\n', "follows its JSON array"),
        ('[{"text": "one"}]]', "follows its JSON array"),
        ('[{"text": "one"},]', r"a\.json:2: a comma before the end"),
        ('[{"text": "one"},\n] [{"text": "two"}]', r"a\.json:2: a comma before the end"),
        ('[{"text": "one"} {"text": "two"}]', r"a\.json:1: not a JSON object"),
        ('[{"text": "one"}, oh, {"text": "two"}]', r"a\.json:2: not a JSON object"),
    ],
)
def test_nothing_of_a_file_of_arrays_is_dropped_in_silence(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=message):
        read_all(open_source(tmp_path, skip_bad=True))


def test_a_key_or_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two", "text": "three"}\n{"text": "four"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: the key 'text' appears twice"):
        read_all(open_source(path))
    assert read_all(open_source(path, skip_bad=True)) == ["one", "four"]
    path = tmp_path / "b.csv"
    path.write_text("id,id,text\n1,2,one\n")
    assert read_all(open_source(path, column="text")) == ["one"]
    path.write_text("text,text\none,two\n")
    with pytest.raises(DataError, match="names the column 'text' twice"):
        read_all(open_source(path, column="text"))


def test_an_array_on_a_line_of_jsonl_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('[{"text": "one"}, {"text": "two"}]\n')
    with pytest.raises(DataError, match="expected one object per line, not an array"):
        read_all(open_source(tmp_path / "a.jsonl"))
