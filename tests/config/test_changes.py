"""What may change at a resume: each key has one rule, and the docs show the same table."""

from pathlib import Path

import pytest

from overland.checks import load_checked
from overland.config.changes import BY_THE_PLAN, FIXED, NOTED, REFUSED, same_place, table
from overland.config.errors import ConfigError
from overland.config.fields import all_keys

DOCS = Path(__file__).resolve().parents[2] / "docs"
TABLES = {"refused": REFUSED, "fixed": FIXED, "noted": NOTED}


def test_every_listed_key_exists_and_has_one_rule() -> None:
    listed = [
        f"{section}.{name}"
        for rules in TABLES.values()
        for section, names in rules.items()
        for name in names
    ]
    assert sorted(listed) == sorted(set(listed))
    assert set(listed) <= set(all_keys())
    assert all(set(names) <= set(NOTED[section]) for section, names in BY_THE_PLAN.items())


def test_the_docs_show_the_table() -> None:
    assert table() in (DOCS / "train.md").read_text(), "paste overland.config.changes.table()"


def test_only_changes_that_need_it_can_be_allowed() -> None:
    def told(*keys: str) -> str:
        with pytest.raises(ConfigError) as error:
            load_checked("quickstart", [f"checkpoint.allow_changes={list(keys)}".replace("'", '"')])
        return str(error.value)

    load_checked("quickstart", ['checkpoint.allow_changes=["lora.alpha", "model.overrides.x"]'])
    assert '"lora.alpha"' in told("lora.alfa")
    assert "may change without" in told("optimizer.lr")
    assert "which data" in told("debug.seed")


def test_a_path_that_became_absolute_is_the_same() -> None:
    assert same_place("models/base", "/somewhere/models/base")
    assert same_place("./models/base/", "models/base")
    assert not same_place("models/base", "/somewhere/models/other")
    assert not same_place("/a/models/base", "/b/models/base")
    assert same_place(None, None)
    assert not same_place(None, "x")
