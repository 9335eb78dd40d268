import os
import signal
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from overland.tools.proofs.pool import RankPool
from tests.times import longest_first, read_times


def pytest_configure() -> None:
    """A shell that starts tests in the background lets them, and all that they start, ignore
    Ctrl-C, and `nohup` the end of a terminal; some of them send these signals."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    longest_first(items, read_times())


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """What a test changes there is gone after it: the next one starts processes, too."""
    with patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the built-in corpus and its tokenizer are built, once for all tests."""
    return tmp_path_factory.mktemp("data")
