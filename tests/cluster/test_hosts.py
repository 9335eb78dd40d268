import pytest

from overland.errors import ClusterError
from overland.slurm import expand_counts, expand_hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n1,n2", ["n1", "n2"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[09-11]", ["n09", "n10", "n11"]),
        (
            "frontier[00001-00003,00007],login1",
            ["frontier00001", "frontier00002", "frontier00003", "frontier00007", "login1"],
        ),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("a-b[2,1]-ib.site.org", ["a-b2-ib.site.org", "a-b1-ib.site.org"]),
    ],
)
def test_a_short_list_of_hosts_is_written_out(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "n[1-", "n1,,n2", "n[3-1]", "n[a-b]", "n[]", "n]1["])
def test_what_is_no_list_of_hosts_is_refused(text: str) -> None:
    with pytest.raises(ClusterError, match="expected"):
        expand_hosts(text)


def test_a_short_list_of_numbers_is_written_out() -> None:
    assert expand_counts("2(x4)") == [2, 2, 2, 2]
    assert expand_counts("3,1(x2)") == [3, 1, 1]
    for text in ("", "2(x", "a", "1,,2"):
        with pytest.raises(ClusterError, match="expected a list of numbers"):
            expand_counts(text)
