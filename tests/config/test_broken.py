"""Every broken config gives its exact lines; the page in docs/evidence shows the same."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch

from overland.apps.dialects.lessons import LESSONS
from overland.checks import load_checked, machine
from overland.config.errors import ConfigError
from overland.config.fields import all_keys

from .broken import BROKEN, Broken

PAGE = Path(__file__).parents[2] / "docs" / "evidence" / "broken_configs.md"


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.title)
def test_a_broken_config_says_what_where_and_what_was_expected(
    case: Broken, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / case.file).write_text(case.text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))  # commands by name
    only_gloo = {"gloo": True, "nccl": False, "mpi": False, "nvshmem": False}
    monkeypatch.setattr(machine, "_backends", lambda: only_gloo)
    with pytest.raises(ConfigError) as caught:
        load_checked(case.file, case.arguments, case.env, world_size=case.world_size)
    assert str(caught.value).replace(torch.__version__, "TORCH") == case.says


def test_every_lesson_names_keys_that_exist() -> None:
    named = {
        found
        for advice in LESSONS.values()
        for found in re.findall(r"\b([a-z_]+\.[a-z_0-9]+)\b", advice)
        if found != "sources.NAME"
    }
    assert len(named) > 10
    assert named <= {*all_keys(), "data.sources"}


def test_the_page_of_broken_configs_is_true() -> None:
    page = render()
    if os.environ.get("OVERLAND_WRITE_EVIDENCE"):
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(page, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page


def render() -> str:
    lines = [
        "# Broken configs and what the user sees",
        "",
        f"{len(BROKEN)} configs, each with the exact lines on the screen; the exit code is 2. "
        "Checked by `tests/config/test_broken.py`, which also writes this page "
        "(`OVERLAND_WRITE_EVIDENCE=1`). The world has 8 devices.",
    ]
    for number, case in enumerate(BROKEN, 1):
        lines += ["", f"## {number}. {case.title}", "", f"`{case.file}`:"]
        lines += ["", f"```{Path(case.file).suffix[1:]}", case.text.strip(), "```", ""]
        words = [f"{name}={value}" for name, value in case.env.items()]
        words += ["overland", "train", case.file, *case.arguments]
        says = case.says.replace("TORCH", "2.11.0+cpu")
        lines += ["```text", f"$ {' '.join(words)}", says, "```"]
    return "\n".join(lines) + "\n"
