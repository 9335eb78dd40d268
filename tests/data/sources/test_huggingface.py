"""Folders as `datasets` saves them and as the Hub stores them; laid out here with pyarrow."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from overland.data.sources import open_source
from overland.data.sources.huggingface import split_of
from overland.errors import DataError
from tests.data.sources.samples import read_all


def parquet(path: Path, *texts: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": list(texts)}), path)


def save_to_disk(folder: Path, shards: list[list[str]], split: str | None = None) -> None:
    folder.mkdir(parents=True)
    names = [f"data-{i:05}-of-{len(shards):05}.arrow" for i in range(len(shards))]
    for name, texts in zip(names, shards, strict=True):
        what = pa.table({"text": texts})
        with pa.ipc.new_stream(folder / name, what.schema) as writer:
            writer.write_table(what)
    state = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": "0",
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": split,
    }
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


def test_a_saved_dataset_is_read_in_the_order_of_its_state(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "x", [["a", "b"], ["c"]], "train")
    state = json.loads((tmp_path / "x" / "state.json").read_text())
    state["_data_files"].reverse()
    (tmp_path / "x" / "state.json").write_text(json.dumps(state))
    assert read_all(open_source(tmp_path / "x")) == ["c", "a", "b"]
    assert read_all(open_source(tmp_path / "x", split="train")) == ["c", "a", "b"]
    with pytest.raises(DataError, match="no split 'test'; it has train"):
        open_source(tmp_path / "x", split="test")


def test_a_saved_dict_has_splits(tmp_path: Path) -> None:
    for split in ("train", "test"):
        save_to_disk(tmp_path / "x" / split, [[split]], split)
    (tmp_path / "x" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert read_all(open_source(tmp_path / "x")) == ["train"]
    assert read_all(open_source(tmp_path / "x", split="test")) == ["test"]
    with pytest.raises(DataError, match=r"no split 'tset'; did you mean 'test'\?"):
        open_source(tmp_path / "x", split="tset")


@pytest.mark.parametrize("name", ["../other/data.arrow", "/data.arrow", None])
def test_a_state_that_leads_out_of_its_folder_is_refused(tmp_path: Path, name: str | None) -> None:
    save_to_disk(tmp_path / "x", [["a"]])
    state = {"_data_files": [{"filename": name}]}
    (tmp_path / "x" / "state.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match=r"state\.json names .* outside its folder and is not read"):
        open_source(tmp_path / "x")


def test_splits_of_a_hub_folder_show_in_the_names(tmp_path: Path) -> None:
    parquet(tmp_path / "data" / "train-00000-of-00002.parquet", "a")
    parquet(tmp_path / "data" / "train-00001-of-00002.parquet", "b")
    parquet(tmp_path / "data" / "validation-00000-of-00001.parquet", "c")
    parquet(tmp_path / "data" / "odd_name-00000-of-00001.parquet", "d")
    (tmp_path / "README.md").write_text("# no yaml here")
    assert read_all(open_source(tmp_path)) == ["a", "b"]
    assert read_all(open_source(tmp_path, split="val")) == ["c"]
    assert read_all(open_source(tmp_path, split="odd_name")) == ["d"]


def test_subsets_of_a_hub_folder_are_folders(tmp_path: Path) -> None:
    for subset in ("en", "de"):
        for split in ("train", "test"):
            parquet(tmp_path / subset / f"{split}.parquet", f"{subset} {split}")
    assert read_all(open_source(tmp_path, subset="de", split="test")) == ["de test"]
    with pytest.raises(DataError, match="no subset 'fr'; it has de, en"):
        open_source(tmp_path, subset="fr")
    assert open_source(tmp_path, subset="de").notes == []
    whole = open_source(tmp_path)
    assert read_all(whole) == ["de train", "en train"]
    assert whole.notes == ["2 subsets are read together: de, en; set subset to read one of them"]
    # A README decides itself, whatever folders its files lie in.
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files: '*/train.parquet'\n---\n"
    )
    assert read_all(open_source(tmp_path)) == ["de train", "en train"]
    assert open_source(tmp_path).notes == []


def test_no_file_is_left_out_unless_all_say_their_split(tmp_path: Path) -> None:
    parquet(tmp_path / "train.parquet", "a")
    parquet(tmp_path / "zebra.parquet", "b")
    assert read_all(open_source(tmp_path)) == ["a", "b"]
    assert read_all(open_source(tmp_path, split="train")) == ["a"]


@pytest.mark.parametrize(
    ("file", "split"),
    [
        ("train.jsonl", "train"),
        ("x/dev/part-1.parquet", "validation"),
        ("my_test_2.parquet", "test"),
        ("trainer.parquet", None),
        ("data/test-x/other.parquet", "test"),
        ("squad-train-00000-of-00001.arrow", "train"),
    ],
)
def test_split_words_stand_alone(file: str, split: str | None) -> None:
    assert split_of(file) == split


README = """---
license: mit
configs:
- config_name: small
  default: true
  data_files:
  - split: train
    path: "few/*.parquet"
  - split: odd
    path: ["many/**/b-[0-9].parquet", "few/c.parquet"]
- config_name: large
  data_files: "many/**"
- config_name: folder
  data_dir: many
- config_name: evil
  data_files: "../*.parquet"
---
# About
"""


@pytest.mark.parametrize(
    ("subset", "split", "texts"),
    [
        (None, None, ["a", "c"]),
        ("small", "odd", ["c", "b"]),
        ("large", None, ["b", "d"]),
        ("folder", None, ["b", "d"]),
    ],
)
def test_a_readme_says_which_files_belong_together(
    tmp_path: Path, subset: str | None, split: str | None, texts: list[str]
) -> None:
    parquet(tmp_path / "few" / "a.parquet", "a")
    parquet(tmp_path / "few" / "c.parquet", "c")
    parquet(tmp_path / "many" / "x" / "b-1.parquet", "b")
    parquet(tmp_path / "many" / "x" / "d.parquet", "d")
    (tmp_path / "README.md").write_text(README)
    assert read_all(open_source(tmp_path, subset=subset, split=split)) == texts
    with pytest.raises(DataError, match=r"no subset 'larg'; did you mean 'large'\?"):
        open_source(tmp_path, subset="larg")
    with pytest.raises(DataError, match=r"README\.md names '\.\./\*\.parquet', which is outside"):
        open_source(tmp_path, subset="evil")


def test_links_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    parquet(tmp_path / "blobs" / "0123.parquet", "linked")
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "train.parquet").symlink_to("../../blobs/0123.parquet")
    assert read_all(open_source(snapshot)) == ["linked"]


def test_json_lines_in_a_hub_folder(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"text": split}) + "\n")
    (tmp_path / "dataset_info.json").write_text("{}")
    assert read_all(open_source(tmp_path)) == ["train"]
    assert read_all(open_source(tmp_path, split="test")) == ["test"]


def test_two_formats_in_one_folder_are_a_question(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", "a")
    (tmp_path / "b.jsonl").write_text('{"text": "b"}\n')
    with pytest.raises(DataError, match="contains jsonl and parquet files: specify one file, or"):
        open_source(tmp_path)
    assert read_all(open_source(tmp_path / "a.parquet")) == ["a"]
