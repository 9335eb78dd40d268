"""Which sources a config asks for: the keys that choose a part of a dataset, and what may not be
both trained and validated on."""

import json
from pathlib import Path
from typing import Any

import pytest

from overland.config.schema import JobConfig
from overland.data.holdout import check_held_out
from overland.data.layout import lay_out
from overland.data.sources.source import Document
from overland.data.wanted import held_out_sources, sources_of
from overland.errors import DataError
from tests.data.making import lines_of, tokenizer_in, write_lines
from tests.data.sources.test_huggingface import parquet, save_to_disk
from tests.data.sources.test_mds import write_mds

README = """---
configs:
- config_name: default
  data_files:
{}
---
"""


def config_of(**sections: dict[str, Any]) -> JobConfig:
    validation = {"enable": True, **sections.pop("validation", {})}
    return JobConfig.model_validate({**sections, "validation": validation})


def held_out(config: JobConfig) -> list[Document]:
    """The documents of all sets that a run would validate on."""
    sources = [one.open() for one in held_out_sources(config).values()]
    return [text for one in sources for chunk in one.chunks() for text in one.read(chunk)]


def trained_on(config: JobConfig) -> list[Document]:
    sources = [one.open() for one in sources_of(config).values()]
    return [text for one in sources for chunk in one.chunks() for text in one.read(chunk)]


def dataset(folder: Path, form: str, splits: list[str]) -> Path:
    """One document per split, which is its name."""
    for split in splits:
        if form == "names":
            parquet(folder / "data" / f"{split}-00000-of-00001.parquet", split)
        elif form == "readme":
            parquet(folder / "data" / f"x{splits.index(split)}.parquet", split)
        elif form == "saved":
            save_to_disk(folder / split, [[split]], split)
        else:
            write_mds(folder / split, {"text": "str"}, [{"text": split.encode()}])
    if form == "saved":
        (folder / "dataset_dict.json").write_text(json.dumps({"splits": splits}))
    if form == "readme":
        lines = [
            f"  - split: {split}\n    path: data/x{number}.parquet"
            for number, split in enumerate(splits)
        ]
        (folder / "README.md").write_text(README.format("\n".join(lines)))
    return folder


@pytest.mark.parametrize("form", ["names", "readme", "saved", "mds"])
def test_validation_reads_the_validation_split_or_else_test(tmp_path: Path, form: str) -> None:
    for splits, expected in (
        (["train", "test", "validation"], "validation"),
        (["train", "val"], "val"),
        (["train", "test"], "test"),
    ):
        path = str(dataset(tmp_path / expected, form, splits))
        both = {"dataset_path": path}
        config = config_of(training=both, validation=both)
        assert held_out(config) == [expected]
        assert trained_on(config) == ["train"]
        check_held_out(config)
    path = str(dataset(tmp_path / "none", form, ["train", "other"]))
    message = r"no validation or test split: set validation\.split to .*or .*set data\.holdout ="
    with pytest.raises(DataError, match=message):
        held_out(config_of(validation={"dataset_path": path}))
    assert held_out(config_of(validation={"dataset_path": path, "split": "other"})) == ["other"]


def test_a_folder_without_splits_is_validated_on_whole(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(name)
    assert held_out(config_of(validation={"dataset_path": str(tmp_path)})) == ["a", "b"]


def test_what_is_trained_on_is_not_validated_on(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(name)
    one, all_ = {"dataset_path": str(tmp_path / "a.txt")}, {"dataset_path": str(tmp_path)}
    message = r"a\.txt, which is also training data: .*validation\.allow_training_data = true"
    for training, validation in ((one, one), (all_, one), (one, all_)):
        with pytest.raises(DataError, match=message):
            check_held_out(config_of(training=training, validation=validation))
        allowed = {**validation, "allow_training_data": True}
        check_held_out(config_of(training=training, validation=allowed))
    sources = {"x": {"path": str(tmp_path / "b.txt")}, "y": {"path": str(tmp_path / "a.txt")}}
    with pytest.raises(DataError, match=message):
        check_held_out(config_of(data={"sources": sources}, validation=one))
    check_held_out(config_of(training={"dataset_path": str(tmp_path / "b.txt")}, validation=one))
    with pytest.raises(DataError, match="which is also training data"):
        check_held_out(config_of(validation={"dataset": ["stdlib_heldout", "stdlib:2/6"]}))
    check_held_out(config_of(training={"dataset": "random"}, validation={"dataset": "random"}))
    with pytest.raises(DataError, match="random tokens have no documents"):
        check_held_out(config_of(training={"dataset": "random"}, data={"holdout": 0.1}))
    with pytest.raises(DataError, match=r"validation\.split = 'test': what data\.holdout holds"):
        check_held_out(config_of(validation={"split": "test"}, data={"holdout": 0.1}))


def test_a_link_to_the_held_out_data_is_found(tmp_path: Path) -> None:
    for name in ("mine", "held"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").write_text(name)
    config = config_of(
        training={"dataset_path": str(tmp_path / "mine")},
        validation={"dataset_path": str(tmp_path / "held"), "split": None},
    )
    check_held_out(config)
    (tmp_path / "mine" / "more").symlink_to(tmp_path / "held")
    with pytest.raises(DataError, match=r"held\.txt, which is also training data"):
        check_held_out(config)


def test_hard_links_to_what_is_trained_on_are_found(tmp_path: Path) -> None:
    for name in ("mine", "held"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").write_text(name)
    (tmp_path / "held" / "more.txt").hardlink_to(tmp_path / "mine" / "mine.txt")
    both = {"dataset_path": str(tmp_path / "mine")}
    for path in (tmp_path / "held", tmp_path / "held" / "more.txt"):
        with pytest.raises(DataError, match=r"more\.txt, which is also training data"):
            check_held_out(config_of(training=both, validation={"dataset_path": str(path)}))
    held = {"dataset_path": str(tmp_path / "held" / "held.txt")}
    check_held_out(config_of(training=both, validation=held))


def test_copies_of_what_is_trained_on_are_found(tmp_path: Path) -> None:
    terms, text = "Copying is allowed.", "".join(f"line {i}\n" for i in range(1000))
    for name in ("mine", "held"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "license.txt").write_text(terms)
        (tmp_path / name / f"{name}.txt").write_text(text.replace("line", name))
    both = {
        "training": {"dataset_path": str(tmp_path / "mine")},
        "validation": {"dataset_path": str(tmp_path / "held")},
    }
    check_held_out(config_of(**both))  # of the same size, and a license that both have
    (tmp_path / "held" / "copy.txt").write_text(text.replace("line", "mine"))
    with pytest.raises(DataError, match=r"copy\.txt, which is also training data"):
        check_held_out(config_of(**both))


def test_a_corpus_is_known_by_the_files_that_it_was_built_from(tmp_path: Path) -> None:
    tokenizer = tokenizer_in(tmp_path / "words")
    places = {}
    for name, num_files in (("mine", 2), ("held", 3)):
        places[name] = write_lines(tmp_path / name, num_files)
        corpus = lay_out(name, lines_of(places[name]), tokenizer, tmp_path / "built")
        places[f"{name} built"] = corpus
    # A license that both have is not what a model learns by heart.
    for name in ("mine", "held"):
        (places[name] / "license.jsonl").write_text('{"text": "a"}\n')

    def check(trained: str, held: str) -> None:
        training, validation = ({"dataset_path": str(places[one])} for one in (trained, held))
        check_held_out(config_of(training=training, validation=validation))

    for trained, held in (("mine", "mine built"), ("mine built", "mine"), ("mine built",) * 2):
        with pytest.raises(DataError, match="which is also training data"):
            check(trained, held)
    for name in ("mine", "held"):
        again = lay_out("again", lines_of(places[name]), tokenizer, tmp_path / "built")
        places[f"{name} again"] = again
    with pytest.raises(DataError, match=r"000\.jsonl \(in .*again.*, which is also training data"):
        check("mine built", "mine again")
    for trained, held in (
        ("mine", "held again"),
        ("mine again", "held"),
        ("mine again", "held again"),
    ):
        check(trained, held)


def test_a_set_to_validate_on_is_named_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    datasets = {name: str(tmp_path / "a.txt") for name in "ab"}
    for names, message in (
        (["a", "a"], r"validation\.dataset lists a twice: remove"),
        (["a", "b"], "twice, as a and as b"),
    ):
        with pytest.raises(DataError, match=message):
            check_held_out(config_of(data={"datasets": datasets}, validation={"dataset": names}))


def test_the_same_keys_choose_everywhere_and_messages_name_them(tmp_path: Path) -> None:
    for split in ("train", "validation"):
        record = {"title": f"title of {split}", "body": f"body of {split}"}
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(record))
    path = {"dataset_path": str(tmp_path)}
    with pytest.raises(DataError, match=r": set training\.column to the column.*title of train"):
        trained_on(config_of(training=path))
    with pytest.raises(DataError, match=r": set validation\.column to .*title of validation"):
        held_out(config_of(validation=path))
    mixture = config_of(data={"sources": {"mine": {"path": str(tmp_path)}}})
    with pytest.raises(DataError, match=r": set data\.sources\.mine\.column to the column"):
        sources_of(mixture)["mine"].open()
    chosen = {**path, "column": "body", "split": "validation"}
    assert trained_on(config_of(training=chosen)) == ["body of validation"]
    assert held_out(config_of(validation={**path, "column": "body"})) == ["body of validation"]
    both = {"training": {**path, "column": "body", "split": "train"}, "validation": path}
    assert held_out(config_of(**both)) == ["body of validation"]
    (tmp_path / "other.jsonl").write_text(json.dumps({"text": "x", "title": "y"}))
    both["validation"] = {"dataset_path": str(tmp_path / "other.jsonl")}
    with pytest.raises(DataError, match=r"'body'.* that of training.column; set validation.column"):
        held_out(config_of(**both))
    both["validation"] = {"dataset": "stdlib_heldout"}  # which has no columns
    assert held_out_sources(config_of(**both))["stdlib_heldout"].asked.column is None
    with pytest.raises(DataError, match=r"training\.split = 'train': stdlib has no splits"):
        trained_on(config_of(training={"split": "train"}))


def test_the_type_of_bare_ids_is_asked_for_where_it_can_be_set(tmp_path: Path) -> None:
    write_mds(tmp_path, {"tokens": "bytes"}, [{"tokens": bytes(6)}])
    path = {"dataset_path": str(tmp_path)}
    with pytest.raises(DataError, match=r"dtype \(and its path there, not in training\.dataset_p"):
        trained_on(config_of(training=path))
    with pytest.raises(DataError, match=r"set --dtype \(of `overland data build`, and valid"):
        held_out(config_of(validation=path))
    mixture = config_of(data={"sources": {"ids": {"path": str(tmp_path), "dtype": "uint16"}}})
    sources_of(mixture)["ids"].open()
