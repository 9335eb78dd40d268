"""What is installed, under which license, and what it promises."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from typer.testing import CliRunner

from overland.cli.main import app

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_command_says_its_version() -> None:
    said = CliRunner().invoke(app, ["--version"])
    assert (said.exit_code, said.output) == (0, f"overland {PROJECT['version']}\n")


def test_the_licence_is_apaches() -> None:
    assert (PROJECT["license"], PROJECT["license-files"]) == ("Apache-2.0", ["LICENSE"])
    text = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_requirements_bring_every_format() -> None:
    (line,) = [x for x in (ROOT / "requirements.txt").read_text().splitlines() if x[0] == "."]
    assert {"text", "data"} <= set(re.findall(r"\w+", line))


def test_every_verb_that_the_readme_or_a_page_names_exists() -> None:
    verbs = {command.name or command.callback.__name__ for command in app.registered_commands}
    verbs |= {group.name for group in app.registered_groups}
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    sources = [*pages, *(ROOT / "overland").rglob("*.py"), *(ROOT / "overland").rglob("*.toml")]
    for page in sources:
        named = set(re.findall(r"`overland ([a-z]+)[ `]", page.read_text()))
        assert named <= verbs, page


def test_the_install_page_installs_the_wheel_that_the_project_makes() -> None:
    text = (ROOT / "docs" / "install.md").read_text()
    assert f"overland-{PROJECT['version']}-py3-none-any.whl" in text
    assert "git+http" not in text  # no address of a repository is known here
    for extras in re.findall(r"pip install '[^']*\[([\w,]+)\]", text):
        assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


def test_the_readme_promises_the_same_bits_in_the_same_layout_alone() -> None:
    text = (ROOT / "README.md").read_text()
    assert "resumes bit for bit in the same layout, and up to rounding in any other" in text
    assert "bit-equal" not in text
