"""docs/private_torch.md lists what the package uses of torch without a promise that it will
stay."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from typing import Any

import pytest

from tests.cli.processes import ROOT

PAGE = (ROOT / "docs" / "private_torch.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (`.+`) \| .+ \|$", PAGE, flags=re.MULTILINE)
LISTED = {name for row in ROWS for name in re.findall(r"`([\w.]+)`", row)}
OF_NAMED_TUPLES = {"_asdict", "_make", "_replace"}


def is_private(dotted: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in dotted.split("."))


class PrivateNames(ast.NodeVisitor):
    """Collects the private names that a file uses: of torch by their dotted path, and `._name` for
    an attribute that no object of the package has."""

    def __init__(self, stored: set[str], members: set[str]) -> None:
        self.stored, self.members = stored, members
        self.found: set[str] = set()
        self.imported: dict[str, str] = {}
        """What a name in this file stands for."""

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            top = alias.name.partition(".")[0]
            self.imported[alias.asname or top] = alias.name if alias.asname else top

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.imported |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}

    def visit_Assign(self, node: ast.Assign) -> None:
        """Follows a short name, such as `aten = torch.ops.aten`."""
        self.generic_visit(node)
        name, words = node.targets[0], ast.unparse(node.value)
        if isinstance(name, ast.Name) and words.startswith("torch.") and self.resolve(words):
            self.imported[name.id] = self.resolve(words) or ""

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        if ast.unparse(node.func) == "getattr" and isinstance(node.args[1], ast.Constant):
            self.visit_Attribute(ast.Attribute(node.args[0], node.args[1].value, ast.Load()))

    def visit_Name(self, node: ast.Name) -> None:
        self.note(self.imported.get(node.id, ""))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self.resolve(ast.unparse(node))
        if name is not None:
            self.note(name)
            return
        is_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        own = self.stored | self.members if is_self else self.stored
        if is_private(node.attr) and node.attr not in own | OF_NAMED_TUPLES:
            self.found.add(f".{node.attr}")
        self.visit(node.value)

    def resolve(self, words: str) -> str | None:
        """The dotted path of an expression that begins with something imported."""
        first, dot, rest = words.partition(".")
        is_path = all(part.isidentifier() for part in words.split("."))
        return self.imported[first] + dot + rest if is_path and first in self.imported else None

    def note(self, name: str) -> None:
        if name.startswith("torch.") and is_private(name):
            self.found.add(name)


def names_used() -> dict[str, str]:
    """Private name of torch -> a file that uses it."""
    trees = {
        str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / "overland").rglob("*.py"))
    }
    stored, members = set(), set()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                stored.add(node.attr)
            elif isinstance(node, ast.ClassDef):
                members |= {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
                fields = [one.target for one in node.body if isinstance(one, ast.AnnAssign)]
                members |= {ast.unparse(field) for field in fields}
    used = {}
    for file, tree in trees.items():
        visitor = PrivateNames(stored, members)
        visitor.visit(tree)
        used |= dict.fromkeys(visitor.found, file)
    return used


def covers(listed: str, used: str) -> bool:
    """Whether a name on the page is the used one, or begins with it."""
    return listed.endswith(used) if used.startswith(".") else f"{listed}.".startswith(f"{used}.")


def test_every_private_name_of_torch_is_listed() -> None:
    missing = [
        f"{file} uses {used}"
        for used, file in names_used().items()
        if not any(covers(listed, used) for listed in LISTED)
    ]
    assert missing == [], "add it to docs/private_torch.md with the reason, or do without"


def test_every_listed_name_is_used() -> None:
    used = names_used()
    assert [one for one in LISTED if not any(covers(one, name) for name in used)] == []


@pytest.mark.parametrize("name", sorted(LISTED))
def test_the_installed_torch_has_it(name: str) -> None:
    owner: Any = importlib.import_module("torch")
    path = name.split(".")
    for depth, part in enumerate(path[1:], start=2):
        if hasattr(owner, part):
            owner = getattr(owner, part)
        elif inspect.ismodule(owner):
            owner = importlib.import_module(".".join(path[:depth]))
        else:  # an attribute of objects
            assert depth == len(path)
            assert re.search(rf"\bself\.{part}\b", inspect.getsource(owner))


def test_a_private_name_is_found_however_it_is_spelled() -> None:
    code = """
import torch
import torch._inductor.config as compiler
from torch.distributed import _functional_collectives as functional
from torch.distributed.distributed_c10d import _set_pg_timeout, new_group
aten = torch.ops.aten

class Mine(torch.nn.Module):
    def _apply(self, fn):
        self._seen = 1
        super()._apply(fn)
        self._helper(self._seen, self._buffers, new_group)
    def _helper(self, *args):
        compiler._micro_pipeline_tp = True
        _set_pg_timeout(functional, aten._scaled_mm, getattr(torch._C, "_clear", None))
        return args[0]._local_tensor
"""
    visitor = PrivateNames({"_seen"}, {"_apply", "_helper"})
    visitor.visit(ast.parse(code))
    assert visitor.found == {
        "._apply",
        "._buffers",
        "._local_tensor",
        "torch._C",
        "torch._C._clear",
        "torch._inductor.config._micro_pipeline_tp",
        "torch.distributed._functional_collectives",
        "torch.distributed.distributed_c10d._set_pg_timeout",
        "torch.ops.aten._scaled_mm",
    }
