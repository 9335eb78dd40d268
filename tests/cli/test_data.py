import json
from pathlib import Path

import pytest

from overland.apps.data.tokenizer_training import train_tokenizer
from overland.data.tokenizer import Tokenizer
from tests.cli.processes import overland
from tests.data.sources.samples import expected_hashes, fixture


@pytest.mark.parametrize("name", ["mds_plain", "megatron_uint16"])
def test_inspect_prints_one_hash_per_document_and_nothing_else(tmp_path: Path, name: str) -> None:
    folder, expected = fixture(name)
    done = overland("data", "inspect", str(folder), "--hashes", cwd=tmp_path)
    assert done.stdout.splitlines() == expected_hashes(expected)
    assert done.stderr == ""


def test_inspect_as_json_says_all_it_found(tmp_path: Path) -> None:
    folder, expected = fixture("mds_tokens_ndarray")
    words = ["--json", "--hashes", "--samples", "1"]
    found = json.loads(overland("data", "inspect", str(folder), *words, cwd=tmp_path).stdout)
    assert found["format"] == "mds"
    assert found["kind"] == "tokens"
    assert found["column"] == "tokens"
    assert found["columns"]["tokens"] == "ndarray:uint32"
    assert (found["chunks"], found["documents"]) == (5, 48)
    assert found["tokens"] == expected["total_tokens"]
    assert found["hashes"] == expected_hashes(expected)
    assert found["samples"][0][:8] == expected["samples"][0]["first8"]
    assert sum(bar["documents"] for bar in found["histogram"]) == 48


def test_inspect_shows_counts_a_histogram_and_samples(tmp_path: Path) -> None:
    lengths = [0, 1, 5, 6, 7, 200]
    lines = [json.dumps({"words": "x" * length, "id": 1}) for length in lengths]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    page = overland(
        "data", "inspect", "a.jsonl", "--column", "words", "--samples", "6", cwd=tmp_path
    ).stdout
    assert "kind        text, column words" in page
    assert "columns     words (string), id (int)" in page
    assert "documents   6, 1 of them empty and skipped in training\n" in page
    assert "characters  219 (shortest 0, mean 36, longest 200)" in page
    rows = [line.split() for line in page.splitlines() if " to " in line]
    counts = {(first, last): int(count) for first, _, last, count, *_ in rows}
    assert counts[("0", "0")] == 1
    assert counts[("4", "7")] == 3
    assert counts[("128", "255")] == 1
    assert sum(counts.values()) == 6
    assert "and 40 more" in page


def test_inspect_names_what_is_wrong_and_can_skip_it(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\noops\n{"text": "b"}\n')
    done = overland("data", "inspect", "a.jsonl", cwd=tmp_path, code=2)
    assert done.stderr.startswith("a.jsonl:2: not a JSON object")
    assert done.stderr.endswith("; --skip-bad skips it\n")
    page = overland("data", "inspect", "a.jsonl", "--skip-bad", cwd=tmp_path).stdout
    assert "documents   2 (1 bad one skipped)" in page
    (tmp_path / "empty.jsonl").write_text("\n")
    done = overland("data", "inspect", "empty.jsonl", cwd=tmp_path, code=2)
    assert done.stderr.startswith("empty.jsonl is empty: it holds no documents")


def test_inspect_knows_the_built_in_corpus(tmp_path: Path) -> None:
    done = overland("data", "inspect", "stdlib", "--json", "--samples", "0", cwd=tmp_path)
    found = json.loads(done.stdout)
    assert found["format"] == "stdlib"
    assert found["documents"] == found["chunks"] > 500


def test_inspect_counts_tokens_where_it_is_given_a_tokenizer(tmp_path: Path) -> None:
    texts = ["the quick brown fox", "jumps", ""] * 100
    train_tokenizer(texts, 300, tmp_path / "tokenizer.json")
    lines = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    words = ["a.jsonl", "--tokenizer", "tokenizer.json", "--json", "--hashes"]
    found = json.loads(overland("data", "inspect", *words, cwd=tmp_path).stdout)
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    assert found["tokens"] == sum(len(tokenizer.encode(text)) + 1 for text in texts)
    assert len(found["hashes"]) == 300
