import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from overland.apps.proofs.pool import RankPool
from tests.times import longest_first, read_times

ROOT = Path(__file__).parents[1]
CACHES = (".git", ".venv", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache")
CLONE = pytest.StashKey[set[tuple[Path, int]]]()


def pytest_configure() -> None:
    """A shell that starts tests in the background lets them, and all that they start, ignore
    Ctrl-C, and `nohup` the end of a terminal; some of them send these signals."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    longest_first(items, read_times())


@pytest.fixture(scope="session", autouse=True)
def outside_the_clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fixtures of modules and sessions start in an empty folder: the clone may hold a user's runs
    and data, which tests must neither read nor write."""
    with patch.dict(os.environ, {"XDG_CONFIG_HOME": str(tmp_path_factory.mktemp("config"))}):
        os.chdir(tmp_path_factory.mktemp("start"))
        yield
        os.chdir(ROOT)


@pytest.fixture(autouse=True)
def own_place(outside_the_clone: None) -> Iterator[None]:
    """Every test starts in an empty folder. What it changes in the environment is gone after it:
    the next one starts processes, too."""
    start = Path.cwd()
    with patch.dict(os.environ), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        os.chdir(place)
        yield
        os.chdir(start)


def pytest_sessionstart(session: pytest.Session) -> None:
    if os.environ.get("CI"):  # elsewhere its user may be editing
        session.config.stash[CLONE] = files_of_clone()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails if the tests have written into the clone. Only the process that leads the workers knows
    when all are done."""
    before = session.config.stash.get(CLONE, None)
    if before is None or hasattr(session.config, "workerinput"):
        return
    changed = sorted(str(path) for path, _ in files_of_clone() ^ before)
    if changed:
        print("\nThe tests have written into the clone:", *changed[:20], sep="\n  ")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def files_of_clone() -> set[tuple[Path, int]]:
    """Returns the files of the clone with the times of their last change, without caches."""
    found = set()
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in CACHES]
        found |= {(Path(folder, name), Path(folder, name).lstat().st_mtime_ns) for name in names}
    return found


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the built-in corpus and its tokenizer are built, once for all tests."""
    return tmp_path_factory.mktemp("data")
