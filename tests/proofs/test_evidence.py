"""The table that a long proof fills, row by row, and resumes from."""

from pathlib import Path

import pytest

from overland.apps.proofs.evidence import Evidence, with_settings
from overland.config.errors import ConfigError

HEAD = "# A proof\n\nOf this.\n\n| layout | loss | verdict |\n|---|---|---|\n"


def table(path: Path, head: str = HEAD) -> Evidence:
    return Evidence(path, head, keys=(0,))


def test_a_row_replaces_that_of_the_same_name(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "table.md"
    table(path).add("`tp2`", "0.1", "differs")
    table(path).add("`pp2`", "0.0", "equal")
    assert not table(path).holds("tp2")
    table(path).add("`tp2`", "0.0", "equal, bit for bit")
    assert table(path).holds("tp2")
    assert path.read_text() == (
        HEAD + "| `pp2` | 0.0 | equal |\n| `tp2` | 0.0 | equal, bit for bit |\n"
    )


def test_half_a_row_is_none(tmp_path: Path) -> None:
    path = tmp_path / "table.md"
    path.write_text(HEAD + "| `tp2` | 0.0 | equal |\n| equal |\n| `pp2` | 0.")
    evidence = table(path)
    evidence.add("`cp2`", "0.0", "equal")
    assert [evidence.holds(name) for name in ("tp2", "pp2", "cp2")] == [True, False, True]
    assert path.read_text() == HEAD + "| `tp2` | 0.0 | equal |\n| `cp2` | 0.0 | equal |\n"


def test_an_empty_file_is_begun(tmp_path: Path) -> None:
    path = tmp_path / "table.md"
    path.touch()
    table(path)
    assert path.read_text() == HEAD


@pytest.mark.parametrize(
    "text",
    [
        with_settings(HEAD, ["--steps 3"]),
        HEAD.replace("loss", "pairs"),
        "# Notes of mine\n",
        "\n",
    ],
)
def test_a_file_of_something_else_stays_as_it_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "table.md"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--table") as refusal:
        table(path)
    assert len(refusal.value.problems) == 1
    assert path.read_text() == text


def test_a_page_of_ones_own_takes_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "table.md"
    path.write_text(HEAD.replace("# A proof", "# On our cluster"))
    table(path).add("`tp2`", "0.0", "equal")
    assert table(path).holds("tp2")


def test_text_below_the_table_stays(tmp_path: Path) -> None:
    path = tmp_path / "table.md"
    path.write_text(HEAD + "| `pp2` | 0.0 | equal |\n\n## My conclusions\n\n| a | b | c |\n")
    table(path).add("`tp2`", "0.0", "equal")
    assert path.read_text() == (
        HEAD + "| `pp2` | 0.0 | equal |\n| `tp2` | 0.0 | equal |\n"
        "\n## My conclusions\n\n| a | b | c |\n"
    )


def test_a_page_of_ones_own_has_rows_of_one_setting(tmp_path: Path) -> None:
    path, head = tmp_path / "table.md", with_settings(HEAD, ["--steps 3"])
    path.write_text(HEAD.replace("# A proof", "# On our cluster"))
    with pytest.raises(ConfigError, match="other settings"):
        table(path, head)
    path.write_text(head.replace("# A proof", "# On our cluster"))
    table(path, head).add("`tp2`", "0.0", "equal")
    with pytest.raises(ConfigError, match="other settings"):
        table(path)


def test_the_head_says_what_is_not_by_default() -> None:
    assert with_settings(HEAD, []) == HEAD
    assert "Of this.\n\nWith `--steps 3`, `a.toml`.\n\n| layout" in with_settings(
        HEAD, ["--steps 3", "a.toml"]
    )
