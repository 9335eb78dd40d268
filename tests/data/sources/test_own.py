"""Sources of users' own modules."""

import pytest

from overland.data.sources.source import Source, as_source
from overland.errors import DataError


@pytest.mark.parametrize("base", [object, Source])
def test_a_source_without_a_method_that_it_needs_is_one_sentence(base: type) -> None:
    unread = type("Unread", (base,), {"chunks": lambda self: ["a"]})()
    with pytest.raises(DataError, match=r"the source Unread has no method read\(\)"):
        as_source(unread)
