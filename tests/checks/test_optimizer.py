"""What `check` says about an optimizer, its options and its groups."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from overland.checks import check_config
from overland.config.errors import ConfigError
from overland.config.load import load_config
from overland.config.write import to_toml
from overland.errors import OptimizerError
from overland.optimizers import Elementwise, WholeMatrix, register_optimizer


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def problems(text: str) -> list[str]:
    Path("run.toml").write_text(f"[optimizer]\n{text}\n")
    return [str(problem) for problem in check_config(load_config("run.toml", (), {}), None)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('name = "Adamw"', "did you mean 'AdamW'?"),
        ('name = "Lion"\noptions = {beta3 = 0.9}', "Lion has no option 'beta3'; did you mean"),
        (
            'name = "Lion"\nbeta2 = 0.98',
            "optimizer.beta2 = 0.98: is an option of AdamW; Lion takes",
        ),
        ('[[optimizer.groups]]\npattern = "*.embed_tokns.*"', "'*.embed_tokns.*' matches no param"),
        (
            'groups = [{pattern = "*.mlp.*"}, {pattern = "*.mlp.up*"}]',
            "'*.mlp.up*' matches only parameters of earlier groups",
        ),
        (  # by this name the optimizer does not know it
            '[[optimizer.groups]]\npattern = "lm_head.*"\n[model]\n'
            "overrides = {tie_word_embeddings = true}",
            "'lm_head.*' matches no parameter; the nearest names are",
        ),
        (  # it is frozen
            '[[optimizer.groups]]\npattern = "*.q_proj.weight"\n[lora]\nrank = 4',
            "'*.q_proj.weight' matches no parameter; the nearest names are",
        ),
        (
            '[[optimizer.groups]]\npattern = "*.q_proj.*"\n[model]\nfreeze = ["*.self_attn.*"]',
            "'*.q_proj.*' matches only parameters that model.freeze freezes",
        ),
    ],
)
def test_what_is_wrong_is_one_line_with_a_way_out(text: str, says: str) -> None:
    (found,) = problems(text)
    assert found.startswith("run.toml:")
    assert says in found


def test_a_group_may_be_of_adapters() -> None:
    text = '[[optimizer.groups]]\npattern = "*.lora_magnitude_vector"\nweight_decay = 0.1\n'
    assert problems(f"{text}[lora]\nrank = 4\ndora = true") == []


def test_a_group_with_an_unknown_key_is_told_which_there_are() -> None:
    with pytest.raises(ConfigError) as error:
        problems('[[optimizer.groups]]\npattern = "*"\nlr = 0.1')
    assert "a list of tables with pattern, lr_factor and weight_decay" in str(error.value)


def test_options_and_groups_are_read_back_as_they_were_written() -> None:
    text = """
name = "Lion"
options = {beta2 = 0.98}
[[optimizer.groups]]
pattern = "*.embed_tokens.*"
lr_factor = 0.1
[[optimizer.groups]]
pattern = "model.norm.*"
weight_decay = 0.01
"""
    assert problems(text) == []
    config = load_config("run.toml", (), {}).config
    assert [group.lr_factor for group in config.optimizer.groups] == [0.1, 1.0]
    Path("again.toml").write_text(to_toml(config, full=True))
    assert load_config("again.toml", (), {}).config == config


def test_optimizers_are_checked_without_torch() -> None:
    code = (
        "import overland.checks.hyperparameters, overland.training.memory, sys; print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "torch" not in done.stdout.split()


@pytest.mark.parametrize(
    ("kind", "says"), [(Elementwise, r"has no update\(\)"), (WholeMatrix, r"no whole\(\) and no a")]
)
def test_an_optimizer_without_its_methods_is_refused_when_it_is_registered(
    kind: type, says: str
) -> None:
    rule = dataclass(frozen=True)(type("Empty", (kind,), {}))
    with pytest.raises(OptimizerError, match=says):
        register_optimizer("Empty", rule)
