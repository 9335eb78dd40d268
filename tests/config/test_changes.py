"""What may change on resume: each key has one rule, and the docs show the same table."""

from pathlib import Path
from typing import Any

import pytest

from overland.checks import load_checked
from overland.config.changes import (
    BY_THE_PLAN,
    FIXED,
    NOTED,
    REFUSED,
    fixed_changes,
    noted_changes,
    refused_changes,
    rule_of,
    same_place,
)
from overland.config.errors import ConfigError
from overland.config.fields import all_keys
from overland.config.schema import JobConfig
from tests.checks.test_effect import every_key

DOCS = Path(__file__).resolve().parents[2] / "docs"
TABLES = {"refused": REFUSED, "fixed": FIXED, "noted": NOTED}
WORDS = {
    "refused": "Would train something other than what the checkpoint holds, or has no effect once "
    "a run has begun. `checkpoint.allow_changes` allows single keys",
    "fixed": "Would change the order of the data, or the contents of a source; no key allows it",
    "noted": "Takes effect at the next step, and the run says so",
    "free": "Takes effect silently",
}


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


def table() -> str:
    rows = ["| a change of | is | |", "|---|---|---|"]
    for rule, words in WORDS.items():
        names: dict[str, list[str]] = {}
        for key in all_keys():
            if rule_of(key) == rule:
                section, _, name = key.partition(".")
                names.setdefault(section, []).append(name)
        keys = "everything else"
        if rule != "free":
            keys = "; ".join(f"`[{section}]` {', '.join(all_)}" for section, all_ in names.items())
        rows.append(f"| {keys} | **{'refused' if rule == 'fixed' else rule}** | {words} |")
    return "\n".join(rows) + "\n"


def test_the_docs_show_the_table() -> None:
    assert table() in (DOCS / "train.md").read_text(), table()


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


def test_every_key_is_treated_as_the_table_says() -> None:
    """Each key with another value: refused, noted, or neither. What changes the data is refused by
    the data plan, and what the plan notes is in its words (tests/data)."""
    before = JobConfig().model_dump(mode="json")
    for key, value in every_key().items():
        section, _, name = key.partition(".")
        if "." in name or key == "model.from":  # which is replaced by other keys as it is loaded
            continue
        after = {**before, section: {**before[section], name: value}}
        refused = [change.key for change in refused_changes(before, after)]
        noted = [change.key for change in noted_changes(before, after)]
        by_the_plan = name in BY_THE_PLAN.get(section, ())
        # A dense run may become sparse, and only nf4 does more than round.
        is_free = key in ("model.sparse", "lora.base")
        rule = rule_of(key)
        assert refused == ([key] if rule == "refused" and not is_free else []), key
        is_noted = (rule == "noted" and not by_the_plan) or key == "lora.base"
        assert noted == ([key] if is_noted else []), key


def test_some_values_of_a_refused_key_are_the_same_or_noted() -> None:
    def told(key: str, old: Any, new: Any, **more: Any) -> tuple[int, int]:
        section, _, name = key.partition(".")
        both = ({section: {name: old}}, {section: {name: new}})
        return len(refused_changes(*both, **more)), len(noted_changes(*both))

    assert told("training.objective", "auto", "next_token") == (0, 0)
    assert told("training.objective", "per_sample", "auto", objective="per_sample") == (0, 0)
    assert told("training.objective", "auto", "per_sample") == (1, 0)
    assert told("training.objective", "auto", "next_token", objective="clip") == (1, 0)
    sparse = {"pattern": "2:4", "refresh": 1}
    assert told("model.sparse", sparse, {**sparse, "refresh": 2}) == (0, 1)
    assert told("model.sparse", sparse, {**sparse, "pattern": "1:4"}) == (1, 0)
    assert told("model.sparse", sparse, None) == (1, 0)
    assert told("lora.base", "float32", "bfloat16") == (0, 1)
    assert told("lora.base", "float32", "nf4") == (1, 0)
    weights = "checkpoint.initial_load_path"
    assert told(weights, "a", "b", base_is_known=True) == (0, 0)  # by their contents
    assert told(weights, "a", None, base_is_known=True) == (1, 0)
    assert told("validation.dataset_path", "held", "/data/held") == (0, 0)
    assert told("training.mixed_precision_param", "bfloat16", "auto") == (0, 0)


def test_a_value_under_its_former_name_has_not_changed() -> None:
    before, after = {"data": {"mixture": "rows"}}, {"data": {"mixture": "documents"}}
    assert fixed_changes(before, after) == []
    assert fixed_changes({"data": {"mixture": "tokens"}}, after) != []


def test_what_the_keys_of_a_model_come_to_is_compared() -> None:
    def told(before: dict[str, Any], after: dict[str, Any], old: Any, new: Any) -> list[str]:
        both = ({"model": before}, {"model": after})
        return [change.key for change in refused_changes(*both, architecture=(old, new))]

    flavor = {"name": "llama3", "flavor": "debug", "config": None, "overrides": {}}
    config = {**flavor, "config": "config.json"}
    theta = {**flavor, "overrides": {"rope_theta": 1e6}}
    one = {"rope_theta": 1e4, "hidden_size": 8, "max_position_embeddings": 64}
    other = {**one, "rope_theta": 1e6}
    assert told(flavor, config, one, one) == []
    assert told(flavor, flavor, one, {**one, "max_position_embeddings": 128}) == []
    assert told(flavor, theta, one, other) == ["model.overrides.rope_theta"]
    assert told(flavor, config, one, other) == ["model.config.rope_theta"]
