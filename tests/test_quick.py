"""`make quick` takes the tests nearest to what changed, and `make test` the longest first."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import quick
from tests.quick import BUDGET, CORE, FOLDERS, ROOT, WORKERS, all_test_files, folder_of, nearest
from tests.times import longest_first, read_times

FILES = all_test_files()


@pytest.mark.parametrize(
    ("changed", "folder"),
    [
        ("overland/data/pack.py", "tests/data"),
        ("overland/data/sources/parquet.py", "tests/data/sources"),
        ("overland/apps/dialects/axolotl.py", "tests/config"),
        ("overland/cluster/submit.py", "tests/cluster"),
        ("overland/cluster/supervise/policy.py", "tests/cluster/supervise"),
        ("overland/world/launch.py", "tests/cluster"),
        ("overland/recipes/quickstart.toml", "tests/cli"),
        ("tests/hub/server.py", "tests/hub"),
        ("docs/data.md", "tests/docs"),
        ("README.md", "tests/docs"),
        ("overland/words.py", ""),
        ("tests/jobs.py", ""),
        ("Makefile", ""),
    ],
)
def test_a_changed_file_has_the_folder_that_mirrors_it(changed: str, folder: str) -> None:
    assert folder_of(changed) == folder


def test_every_package_has_tests() -> None:
    """Modules between packages have those that import them."""
    for path in (ROOT / "overland").glob("**/*/__init__.py"):
        changed = str(path.relative_to(ROOT))
        if changed not in ("overland/__init__.py", "overland/apps/__init__.py"):
            assert any(file.startswith(f"{folder_of(changed)}/") for file in FILES), changed


def test_the_nearest_come_first() -> None:
    found = nearest(["overland/data/pack.py", "tests/hub/test_push.py"], FILES)
    assert found[:2] == ["tests/hub/test_push.py", "tests/data/test_pack.py"]
    importers = [file for file in FILES if "overland.data.pack" in imports(file)]
    assert set(importers) <= set(found)
    rest = [file for file in found[2:] if file not in importers]
    assert rest == sorted(rest, key=lambda file: (file.startswith("tests/data/sources/"), file))
    assert {file.split("/")[1] for file in rest} == {"data", "hub"}


def imports(file: str) -> set[str]:
    return quick.imported_modules(ROOT / file)


def test_a_module_at_the_top_has_the_tests_that_import_it() -> None:
    assert "tests/test_files.py" in nearest(["overland/files.py"], FILES)


def test_nothing_changed_leaves_the_core() -> None:
    assert nearest([], FILES) == []
    assert set(CORE) <= set(FILES)
    chosen, left_out = quick.that_fit(CORE, read_times())
    assert (chosen, left_out) == ([*CORE], [])


def test_what_does_not_fit_is_left_out_and_named() -> None:
    half = BUDGET / WORKERS
    times = {"a": half + 1, "b": half, "c": half, "d": 0.5}
    assert quick.that_fit(["a", "b", "c", "d"], times) == (["b", "c"], ["a", "d"])
    assert quick.that_fit(["a", "new"], times) == (["new"], ["a"])


def test_names_are_of_what_is_there() -> None:
    for name, folder in FOLDERS.items():
        assert (ROOT / name).exists(), name
        assert (ROOT / folder).is_dir(), folder
    assert set(read_times()) <= set(FILES)


def test_changed_is_what_differs_from_main_and_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.setattr(quick, "ROOT", tmp_path)
    git("init", "-b", "main")
    for name in ("kept", "committed", "edited"):
        (tmp_path / name).write_text("before")
    git("add", ".")
    git("commit", "-m", "first")
    assert quick.changed_files() == []
    git("checkout", "-b", "work")
    (tmp_path / "committed").write_text("after")
    git("commit", "-am", "second")
    (tmp_path / "edited").write_text("after")
    (tmp_path / "new").write_text("")
    assert quick.changed_files() == ["committed", "edited", "new"]
    git("branch", "-D", "main")  # a clone of one branch, say
    assert quick.changed_files() == ["edited", "new"]


def test_the_longest_file_is_first_and_keeps_its_order() -> None:
    ids = ["a.py::2", "a.py::1", "b.py::1", "c.py::2", "c.py::1", "d.py::1"]
    items = [SimpleNamespace(nodeid=one) for one in ids]
    longest_first(items, {"b.py": 3, "c.py": 5})  # type: ignore[arg-type]
    assert [item.nodeid for item in items] == [
        "c.py::2", "c.py::1", "b.py::1", "a.py::2", "a.py::1", "d.py::1",
    ]  # fmt: skip


def test_tests_start_outside_of_the_clone_and_ci_trains_in_it_first() -> None:
    """In the README's order: what `make train` leaves in a clone must not reach the tests."""
    assert ROOT not in (Path.cwd(), *Path.cwd().parents)
    lines = (ROOT / ".ci/run").read_text().splitlines()
    assert lines.index("make train") < lines.index("make test")
