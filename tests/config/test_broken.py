"""What is wrong with a config is reported by kind and key; a page in docs/evidence has the
sentences, and is compared with what a user would see."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

from overland.apps.dialects import LESSONS
from overland.checks import check_config, load_checked, machine
from overland.config.errors import ConfigError, Problem
from overland.config.fields import all_keys
from overland.config.load import load_config

from .broken import BROKEN, SETTINGS, Broken

PAGE = Path(__file__).parents[2] / "docs" / "evidence" / "broken_configs.md"


@pytest.fixture(autouse=True)
def _somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty folder, with a torch that knows one backend, and commands by name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    only_gloo = {"gloo": True, "nccl": False, "mpi": False, "nvshmem": False}
    monkeypatch.setattr(machine, "_backends", lambda: only_gloo)


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.title)
def test_a_broken_config_has_problems_of_these_kinds_and_keys(case: Broken) -> None:
    assert tuple(f"{one.kind} {one.key}".rstrip() for one in problems(case)) == case.found


@pytest.mark.parametrize("case", SETTINGS, ids=" ".join)
def test_what_does_not_fit_is_one_problem_with_its_place(case: tuple[str, ...]) -> None:
    found, *words = case
    (problem,) = check_config(load_config(str(empty()), words, {}), 8)
    assert f"{problem.kind} {problem.key}".rstrip() == found
    assert problem.where == "command line"


def problems(case: Broken) -> list[Problem]:
    Path(case.file).write_text(case.text)
    with pytest.raises(ConfigError) as caught:
        load_checked(case.file, case.arguments, case.env, world_size=case.world_size)
    return caught.value.problems


def empty() -> Path:
    path = Path("run.toml")
    path.write_text("")
    return path


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
        f"{len(BROKEN)} configs and {len(SETTINGS)} settings, each with the exact lines on the "
        "screen; the exit code is 2, or 0 where there are only notes. "
        "Checked by `tests/config/test_broken.py`, which also writes this page "
        "(`OVERLAND_WRITE_EVIDENCE=1`). The world has 8 devices.",
    ]
    for number, case in enumerate(BROKEN, 1):
        lines += ["", f"## {number}. {case.title}", "", f"`{case.file}`:"]
        lines += ["", f"```{Path(case.file).suffix[1:]}", case.text.strip(), "```", ""]
        words = [f"{name}={value}" for name, value in case.env.items()]
        words += ["overland", "train", case.file, *case.arguments]
        says = "\n".join(map(str, problems(case))).replace(torch.__version__, "2.11.0+cpu")
        lines += ["```text", f"$ {' '.join(words)}", says, "```"]
    lines += ["", "## Settings that do not fit", "", "`run.toml` is empty.", "", "```text"]
    for _, *arguments in SETTINGS:
        (problem,) = check_config(load_config(str(empty()), arguments, {}), 8)
        lines += [
            "$ " + shlex.join(["overland", "train", "run.toml", *arguments]),
            str(problem),
            "",
        ]
    return "\n".join([*lines[:-1], "```"]) + "\n"
