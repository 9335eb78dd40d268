"""What holds for tokenizers of every kind."""

import json
import multiprocessing
import os
import pickle
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from overland.apps.evaluation.prompts import encode_prompt
from overland.config.schema import JobConfig
from overland.data.corpora import Preparer
from overland.data.prepare import tokenizer_for
from overland.data.tokenizer import Tokenizer
from overland.data.wanted import sources_of
from overland.errors import DataError
from tests.data.tokenizer_folders import CORPUS, KINDS, TEXTS, written_kinds


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return dict(written_kinds(tmp_path_factory.mktemp("tokenizers")))


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    return folders[request.param]


def test_text_survives_the_round_trip(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_document_is_its_text_and_the_end_unless_told_otherwise(folder: Path) -> None:
    tokenizer = Tokenizer(folder, add_bos=False)
    documents = tokenizer.encode_documents(TEXTS)
    assert [ids.tolist() for ids in documents] == [
        [*tokenizer.encode(text), tokenizer.eos_id] for text in TEXTS
    ]
    assert {ids.dtype for ids in documents} == {np.dtype(np.int32)}
    assert tokenizer.encode_documents([]) == []


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("add_eos", [False, True])
def test_bos_and_eos_are_added_as_the_policy_says(
    folders: dict[str, Path], add_bos: bool, add_eos: bool
) -> None:
    for kind in ("sentencepiece bpe", "tiktoken"):
        tokenizer = Tokenizer(folders[kind], add_bos=add_bos, add_eos=add_eos)
        expected = tokenizer.encode("some text")
        if add_bos:
            assert tokenizer.bos_id is not None
            expected = [tokenizer.bos_id, *expected]
        if add_eos:
            expected = [*expected, tokenizer.eos_id]
        assert tokenizer.encode_documents(["some text"])[0].tolist() == expected
        assert tokenizer.decode(expected) == "some text"


def test_a_bos_that_does_not_exist_is_one_sentence(folders: dict[str, Path]) -> None:
    with pytest.raises(DataError, match="no beginning-of-document token: turn add_bos off"):
        Tokenizer(folders["tokenizer.json"], add_bos=True)


def test_bos_comes_as_the_tokenizer_itself_has_it(folders: dict[str, Path], tmp_path: Path) -> None:
    """By the convention of its kind, unless tokenizer_config.json says another."""
    for kind in ("sentencepiece bpe", "tiktoken"):
        tokenizer = Tokenizer(folders[kind])
        assert tokenizer.add_bos
        assert "convention" in tokenizer.bos_because
        assert tokenizer.encode_documents(["a"])[0][0] == tokenizer.bos_id
        assert encode_prompt(tokenizer, "a") == [tokenizer.bos_id, *tokenizer.encode("a")]
        assert tokenizer.fingerprint == Tokenizer(folders[kind], add_bos=True).fingerprint
        told = shutil.copytree(folders[kind], tmp_path / kind)
        (told / "tokenizer_config.json").write_text('{"add_bos_token": false}')
        assert not Tokenizer(told).add_bos
        assert "add_bos_token" in Tokenizer(told).bos_because
        assert not tokenizer.with_bos(False).add_bos
        assert pickle.loads(pickle.dumps(tokenizer)).add_bos
    without = Tokenizer(folders["tokenizer.json"])
    assert not without.add_bos
    assert encode_prompt(without, "") == [without.eos_id]


def test_no_text_becomes_a_special_token(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    special = set(tokenizer.specials.values())
    assert tokenizer.eos_id in special
    names = list(tokenizer.specials)
    texts = [*names, " ".join(names), "".join(names), *(f"a{name}b" for name in names)]
    for text in texts:
        ids = tokenizer.encode(text)
        assert not special & set(ids), text
        assert tokenizer.decode(ids) == text


def test_every_id_lies_below_the_vocabulary_size(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    assert max(max(ids) for ids in tokenizer.encode_documents(CORPUS)) < tokenizer.vocab_size
    assert max(tokenizer.specials.values()) < tokenizer.vocab_size
    assert len(tokenizer.pieces(range(tokenizer.vocab_size))) == tokenizer.vocab_size


def test_decoding_leaves_out_special_tokens_and_rows_that_pad_an_embedding(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode("some text")
    padding = [tokenizer.vocab_size, tokenizer.vocab_size + 63]
    assert tokenizer.decode([*tokenizer.specials.values(), *ids, *padding]) == "some text"


def test_a_continuation_keeps_the_space_before_it(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode("return None if value is None")
    for cut in range(1, len(ids)):
        first, second = ids[:cut], ids[cut:]
        assert tokenizer.decode(first) + tokenizer.decode(second, after=first) == tokenizer.decode(
            ids
        )


def test_pieces_are_the_text_token_by_token(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    text = "def scan_once(string, idx):  # plain ASCII"
    assert "".join(tokenizer.pieces(tokenizer.encode(text))).lstrip() == text
    assert tokenizer.pieces([tokenizer.eos_id]) == [
        name for name, i in tokenizer.specials.items() if i == tokenizer.eos_id
    ]


def test_parts_of_a_character_are_pieces_too(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    pieces = tokenizer.pieces([*tokenizer.encode("👩"), tokenizer.vocab_size + 5])
    assert pieces[-5:] == ["\ufffd"] * 5


def test_half_a_surrogate_pair_becomes_the_replacement_character(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    assert tokenizer.encode("a\ud83dz") == tokenizer.encode("a\ufffdz")
    assert tokenizer.encode("a\ud83d\ude00z") == tokenizer.encode("a😀z")


def test_long_runs_are_encoded(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    for character in " a^":
        text = character * 1_200_000
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_copy_of_its_files_opens_identically(folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(folder)
    for name, data in tokenizer.files().items():
        (tmp_path / name).write_bytes(data)
    copy = Tokenizer(tmp_path)
    assert copy.fingerprint == tokenizer.fingerprint
    assert copy.specials == tokenizer.specials
    assert copy.files() == tokenizer.files()


def test_the_fingerprint_follows_content_and_policy(
    folders: dict[str, Path], folder: Path, tmp_path: Path
) -> None:
    tokenizer = Tokenizer(folder)
    prints = {Tokenizer(other).fingerprint for other in folders.values()}
    assert len(prints) == len(folders)
    assert Tokenizer(tokenizer.path).fingerprint == tokenizer.fingerprint
    assert Tokenizer(folder, add_eos=False).fingerprint != tokenizer.fingerprint


def test_it_can_be_sent_to_another_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(folder.parent)
    tokenizer = Tokenizer(Path(folder.name), add_eos=False)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    with multiprocessing.get_context("spawn").Pool(1, os.chdir, (tmp_path,)) as pool:
        there = pool.apply(tokenizer.encode_documents, (TEXTS,))
    here = tokenizer.encode_documents(TEXTS)
    assert [ids.tolist() for ids in there] == [ids.tolist() for ids in here]


def test_a_file_that_changed_on_the_way_is_named(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    sent = pickle.dumps(Tokenizer(tmp_path / "copy"))
    (tmp_path / "copy" / "tokenizer_config.json").write_text('{"eos_token": "a"}')
    with pytest.raises(DataError, match=r"was changed while|names 'a' as eos_token"):
        pickle.loads(sent)


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_package_names_the_extra(
    folders: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = {"tokenizer.json": "tokenizers"}.get(kind, kind.split()[0])
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=rf"text needs {package}: pip install 'overland\[text\]'"):
        Tokenizer(folders[kind])


def test_tokenizer_json_wins_and_original_is_found(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    ranks, fast = folders["tiktoken"], folders["tokenizer.json"]
    (tmp_path / "original").mkdir()
    shutil.copy(ranks / "tokenizer.model", tmp_path / "original")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|eot_id|>"}')
    meta = Tokenizer(tmp_path)
    assert meta.path == tmp_path / "original" / "tokenizer.model"
    assert meta.eos_id == meta.specials["<|eot_id|>"]
    assert list(meta.files()) == ["tokenizer.model", "tokenizer_config.json"]

    shutil.copy(folders["sentencepiece bpe"] / "tokenizer.model", tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert Tokenizer(tmp_path).vocab_size == 600
    shutil.copy(fast / "tokenizer.json", tmp_path)
    assert Tokenizer(tmp_path).path == tmp_path / "tokenizer.json"


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({}, "has no tokenizer.json or tokenizer.model, there or in original/"),
        ({"tokenizer.model": b""}, "is neither a sentencepiece model nor tiktoken ranks"),
        ({"tokenizer.model": b"hello there"}, "is neither a sentencepiece model nor"),
        ({"tokenizer.model": b"YQ== 0\nYg\n"}, "tokenizer.model:2: expected a token in base64"),
        ({"tokenizer.model": b"YQ== 0\nYg== 1\n"}, "is damaged, because some ranks are missing"),
        (
            {"tokenizer.model": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"},
            "only a pointer to the file, because it was cloned without Git LFS",
        ),
        ({"tokenizer.json": b"[]"}, "tokenizer.json is not a tokenizer"),
        ({"tokenizer.json": b"\xff"}, "tokenizer.json is not a tokenizer"),
        ({"tokenizer.json": b"{}", "tokenizer_config.json": b"{"}, "config.json is not valid JSON"),
        (
            {"tokenizer.json": b"{}", "tokenizer_config.json": b"[]"},
            "config.json holds a list, expected an object",
        ),
    ],
)
def test_what_is_no_tokenizer_is_said_in_one_sentence(
    tmp_path: Path, files: dict[str, bytes], sentence: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as error:
        Tokenizer(tmp_path)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["bad.jsonl", "bad.parquet"])
def test_training_on_text_skips_bad_documents_if_asked(tmp_path: Path, name: str) -> None:
    texts = ["some words", None, "more words"]
    if name.endswith(".parquet"):
        pq.write_table(pa.table({"text": texts}), tmp_path / name)
    else:
        (tmp_path / name).write_text("".join(f"{json.dumps({'text': one})}\n" for one in texts))

    def trained(bad_documents: str) -> Tokenizer | None:
        data = {"folder": str(tmp_path / "data"), "bad_documents": bad_documents}
        training = {"dataset_path": str(tmp_path / name)}
        config = JobConfig.model_validate({"training": training, "data": data})
        return tokenizer_for(config, sources_of(config), 300, Preparer())

    with pytest.raises(DataError, match=r'bad.*; data\.bad_documents = "skip" skips it$'):
        trained("error")
    assert trained("skip") is not None
