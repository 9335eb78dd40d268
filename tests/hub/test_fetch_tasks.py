"""Datasets of tasks: found in the definitions, fetched, and read without a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from overland.apps.evaluation import task_data
from overland.apps.evaluation.task_data import TaskData, data_of, fetched, task_names
from overland.apps.evaluation.task_run import (
    kept_index,
    load_tasks,
    matching,
    needs_of,
    open_manager,
)
from overland.cli.main import app
from overland.errors import DataError
from tests.hub.server import Hub

pytest.importorskip("lm_eval")
ROOT = Path("data/tasks")


def rows(*questions: str) -> bytes:
    records = [{"question": one, "choices": ["a", "b"], "answer": 1} for one in questions]
    return "".join(json.dumps(record) + "\n" for record in records).encode()


README = b"""---
configs:
- config_name: easy
  data_files:
  - split: test
    path: easy/test.jsonl
- config_name: hard
  data_files: hard/*.jsonl
- config_name: unwanted
  data_files: unwanted/*.jsonl
---
"""
REPOSITORIES = {
    "team/quiz": {
        "README.md": README,
        "easy/test.jsonl": rows("easy?"),
        "hard/test.jsonl": rows("hard?"),
        "unwanted/test.jsonl": rows("no?"),
    },
    "team/plain": {"test.jsonl": rows("plain?")},
    "team/files": {"some/a.jsonl": rows("a?"), "some/b.jsonl": rows("b?"), "c.bin": b"large"},
    "team/pinned": {"test.jsonl": rows("old?")},
    "team/script": {"script.py": b"import os\n", "test.jsonl": rows("never?")},
}
TASKS: dict[str, dict[str, Any]] = {
    "quiz_easy": {"dataset_path": "team/quiz", "dataset_name": "easy"},
    "quiz_hard": {"dataset_path": "team/quiz", "dataset_name": "hard", "test_split": "train"},
    "plain": {"dataset_path": "team/plain"},
    "files": {
        "dataset_path": "team/files",
        "dataset_kwargs": {"data_files": {"test": "some/a.jsonl"}},
    },
    "address": {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": "hf://datasets/team/files/some/b.jsonl"}},
    },
    "pinned": {"dataset_path": "team/pinned", "dataset_kwargs": {"revision": "old"}},
}


@pytest.fixture
def tasks(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("HF_DATASETS_CACHE", raising=False)
    for name, files in REPOSITORIES.items():
        hub.add(name, files, "dataset")
    pinned = hub.repos["dataset", "team/pinned"]
    pinned.refs["old"] = pinned.refs["main"]
    pinned.commit({"test.jsonl": rows("new?")})
    folder = tmp_path / "definitions"
    folder.mkdir()
    for name, changes in TASKS.items():
        write_task(folder, name, **changes)
    (folder / "group.yaml").write_text(
        yaml.safe_dump({"group": "all_quiz", "task": ["quiz_tag", {"task": "plain"}]})
    )
    open_manager.cache_clear()
    return folder


def write_task(folder: Path, name: str, **changes: Any) -> None:
    definition = {
        "task": name,
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        **({"tag": "quiz_tag"} if name.startswith("quiz") else {}),
        **changes,
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(definition))


def overland(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def fetch(tasks: Path, *names: str, code: int = 0) -> Result:
    done = overland("fetch", "tasks", *names, "--include-path", tasks)
    assert done.exit_code == code, done.output
    return done


def questions(tasks: Path, name: str) -> list[str]:
    """What a task reads."""
    loaded = load_tasks(open_manager((name,), tasks), [name], ROOT)["tasks"]
    return [doc["question"] for doc in loaded[name].test_docs()]


def test_every_form_of_definition_is_fetched_once_and_read_offline(tasks: Path, hub: Hub) -> None:
    fetch(tasks, "all_quiz", "files", "address", "pinned")
    asked = len(hub.requests)
    assert {name: questions(tasks, name) for name in TASKS} == {
        "quiz_easy": ["easy?"],
        "quiz_hard": ["hard?"],
        "plain": ["plain?"],
        "files": ["a?"],
        "address": ["b?"],
        "pinned": ["old?"],
    }
    assert len(hub.requests) == asked
    assert not hub.gets("c.bin")
    assert not hub.gets("unwanted/test.jsonl")
    listed = overland("fetch", "tasks", "all_quiz", "--include-path", tasks, "--dry-run")
    assert listed.stdout.splitlines() == [
        "here: team/quiz, 2 subsets, for 2 tasks",
        "here: team/plain, for task plain",
    ]
    fetch(tasks, "all_quiz", "files", "address", "pinned")  # all is here, and nobody is asked
    assert len(hub.requests) == asked


def test_a_list_needs_no_network(tasks: Path, hub: Hub) -> None:
    done = overland(
        "fetch", "tasks", "quiz_*,plain", "--include-path", tasks, "--dry-run", "--json"
    )
    found = json.loads(done.stdout)["datasets"]
    assert [(one["dataset"], one["subset"], one["is_here"]) for one in found] == [
        ("team/quiz", "easy", False),
        ("team/quiz", "hard", False),
        ("team/plain", None, False),
    ]
    assert hub.requests == []


def test_what_is_missing_is_told_with_the_line_that_fetches_it(tasks: Path, hub: Hub) -> None:
    fetch(tasks, "quiz_easy")
    for name in ("plain", "quiz_hard"):
        with pytest.raises(DataError, match=f"is not on this machine.*fetch tasks {name}"):
            questions(tasks, name)


def test_a_dataset_with_a_script_is_refused_by_name(tasks: Path, hub: Hub) -> None:
    write_task(tasks, "scripted", dataset_path="team/script")
    done = fetch(tasks, "scripted", "plain", code=2)
    assert "team/script is loaded by its own script, script.py" in done.stderr
    assert "1 of 2 datasets could not be fetched" in done.stderr
    assert questions(tasks, "plain") == ["plain?"]  # the others came


def test_what_the_hub_lacks_is_told(tasks: Path, hub: Hub) -> None:
    write_task(tasks, "lost", dataset_path="team/lost")
    write_task(tasks, "no_subset", dataset_path="team/quiz", dataset_name="easi")
    done = fetch(tasks, "lost", "no_subset", code=2)
    assert "there is no dataset team/lost" in done.stderr
    assert "no subset 'easi'; did you mean 'easy'?" in done.stderr


def test_names_and_options_that_do_not_fit(tasks: Path) -> None:
    with pytest.raises(DataError, match=r"no task 'quiz_esy'; did you mean 'quiz_easy'\?"):
        matching(open_manager(("quiz_easy",), tasks), ["quiz_esy"])
    assert overland("fetch", "tasks", "plain", "--subset", "x").exit_code == 2
    assert overland("fetch", "dataset", "team/plain", "--dry-run").exit_code == 2
    assert overland("fetch", "dataset", "team/plain", "team/quiz").exit_code == 2


def test_definitions_that_name_no_dataset_say_so() -> None:
    assert data_of({"custom_dataset": "/x/utils.load"}) == (
        "its data is read by a custom function (utils.load)"
    )
    assert "names no dataset" in str(data_of({}))
    far = {"dataset_path": "csv", "dataset_kwargs": {"data_files": "https://example.org/a.csv"}}
    assert "which is not on the Hub" in str(data_of(far))
    address = "https://huggingface.co/datasets/team/files/resolve/main/some/b.jsonl"
    near = {"dataset_path": "json", "dataset_kwargs": {"data_files": [address]}}
    assert data_of(near) == [TaskData("team/files", None, None, ("some/b.jsonl",))]
    assert data_of({"dataset_path": "json", "dataset_kwargs": {"data_files": "/here.jsonl"}}) == []


def test_lists_of_tasks(tmp_path: Path) -> None:
    own = tmp_path / "mine.txt"
    own.write_text("a, b  # both\n\n# nothing\nc\n")
    assert task_names([f"@{own}", "b,d"]) == ("a", "b", "c", "d")
    assert "hellaswag" in task_names(["@frontier"])
    with pytest.raises(DataError, match="did you mean 'frontier'"):
        task_names(["@fronteer"])
    with pytest.raises(DataError, match="is empty: give tasks"):
        task_names([" , "])


def test_outside_of_an_evaluation_the_library_is_as_it_was(tmp_path: Path) -> None:
    import datasets

    original = datasets.load_dataset
    with fetched(tmp_path):
        assert datasets.load_dataset is not original
    assert datasets.load_dataset is original


def test_the_place_is_below_the_scratch_root() -> None:
    assert task_data.tasks_root({"SCRATCH_ROOT": "/s"}) == Path("/s/tasks_cache")
    assert task_data.tasks_root({}) == ROOT


def test_the_index_is_kept_until_a_definition_changes(
    tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._index import TaskIndex

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    built: list[str] = []
    original = TaskIndex.process_cfg

    def counted(config: Any, path: Path, index: Any) -> None:
        built.append(path.name)
        original(config, path, index)

    monkeypatch.setattr(TaskIndex, "process_cfg", staticmethod(counted))

    def index() -> dict[str, Any]:
        built.clear()
        with kept_index():
            manager = TaskManager(include_path=str(tasks), include_defaults=False)
        return {name: (e.kind, e.yaml_path, e.tags) for name, e in manager.task_index.items()}

    first = index()
    assert built
    assert index() == first
    assert not built
    write_task(tasks, "later", dataset_path="team/plain")
    assert "later" in index()
    for kept in (tmp_path / "cache" / "overland").iterdir():
        kept.write_text("[{")  # half of one is none
    assert index().keys() == {*first, "later"}
    assert built


def test_groups_in_groups_are_expanded(tasks: Path) -> None:
    needs = needs_of(["all_quiz", "plain"], tasks)
    names = [name for some in needs.datasets.values() for name in some]
    assert sorted(names) == ["plain", "quiz_easy", "quiz_hard"]
