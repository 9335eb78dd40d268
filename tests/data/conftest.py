import pytest

from overland.data.tokenizer import Tokenizer
from tests.data.making import tokenizer_in


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A small one, trained once for all tests."""
    return tokenizer_in(tmp_path_factory.mktemp("tokenizer"))
