"""Commands that are suggested work when they are pasted."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from overland.words import command


@pytest.mark.parametrize("where", ["on the PATH", "below this folder", "elsewhere", "without one"])
def test_a_suggested_command_runs_in_the_shell_that_saw_it(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bin_folder = tmp_path / "an env" / "bin"
    bin_folder.mkdir(parents=True)
    python = bin_folder / "python"
    python.write_text('#!/bin/sh\necho "python $*"\n')
    python.chmod(0o755)
    if where != "without one":
        (bin_folder / "overland").write_text('#!/bin/sh\necho "overland $*"\n')
        (bin_folder / "overland").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    path = f"{bin_folder}:/usr/bin:/bin" if where == "on the PATH" else "/usr/bin:/bin"
    monkeypatch.setenv("PATH", path)
    monkeypatch.chdir(tmp_path if where == "below this folder" else "/")
    line = command("overland", "train", "a run/config.toml", "x=1")
    said = subprocess.check_output(line, shell=True, text=True)
    before = "python -m " if where == "without one" else ""
    assert said == f"{before}overland train a run/config.toml x=1\n"
    assert line.startswith("overland ") == (where == "on the PATH")
    if where == "below this folder":
        assert line.startswith("'an env/bin/overland'")


def test_another_installation_on_the_path_is_not_suggested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mine", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "overland").write_text("#!/bin/sh\n")
        (tmp_path / name / "overland").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "mine" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "other"))
    assert command("overland", "check") == f"{tmp_path}/mine/overland check"


def test_no_message_writes_a_command_out_by_hand() -> None:
    """A command with arguments is meant to be pasted; without any, it is a name to look up."""
    package = Path(__file__).parents[2] / "overland"
    by_hand = [
        f"{path.relative_to(package)}:{node.lineno}: {node.value.strip()}"
        for path in package.rglob("*.py")
        for node in messages(ast.parse(path.read_text(encoding="utf-8")))
        if re.search(r"(`|\n    )overland (?!prove |(data|config) \w+`)\w+ ", node.value)
    ]
    assert by_hand == []


def messages(tree: ast.Module) -> list[ast.Constant]:
    """Texts of a module, without its docstrings."""
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return [node for node in found if isinstance(node.value, str) and id(node) not in alone]
