"""The reference of `import overland`: signatures and docstrings, read from the source as it is
written, without importing it."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from words import as_code, as_markdown, table

import overland

PAGE = "reference/python.md"
PACKAGE = Path(overland.__file__).parent
INTRODUCTION = """\
# Python API

The public names of `import overland`. [As a library](../library.md) shows them at work; \
[extending](../extending.md) does so for the registries."""
Definition = ast.FunctionDef | ast.ClassDef


def page() -> str:
    names = [name for name in overland.__all__ if not name.startswith("_")]
    groups = {
        "Functions": [n for n in names if n[0].islower() and not n.startswith("register_")],
        "Registries": [n for n in names if n.startswith("register_")],
        "Classes": [n for n in names if n[0].isupper() and not n.endswith("Error")],
        "Errors": [n for n in names if n.endswith("Error")],
    }
    parts = [INTRODUCTION]
    for title, members in groups.items():
        parts += [f"## {title}", *(_entry(name) for name in members)]
    return "\n\n".join(parts) + "\n"


def place_of(code: str) -> str | None:
    name = code.removeprefix("overland.").partition("(")[0]
    return f"{PAGE}#{name}" if code.startswith("overland.") and name in overland.__all__ else None


def _entry(name: str) -> str:
    module, _, there = overland._PLACES[name].partition(":")
    found = _definition(module, there or name)
    parts = [f"### {name} {{ #{name} }}", _block(_signature(found, name)), _docstring(found)]
    if name == "JobConfig":
        parts.append("Its fields are the [sections of the config](config/index.md).")
    elif isinstance(found, ast.ClassDef):
        parts += _members(found)
    return "\n\n".join(part for part in parts if part)


def _definition(module: str, name: str) -> Definition:
    """Finds a function or class in its module, or where that one imports it from."""
    path = PACKAGE.parent / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, Definition) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            return _definition(str(node.module), name)
    raise LookupError(f"{module} has no {name}")


def _signature(node: Definition, name: str) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(map(ast.unparse, node.bases))
        return f"class {name}({bases})" if bases else f"class {name}"
    arguments = [one for one in _arguments(node.args) if one not in ("self", "cls")]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"{name}({', '.join(arguments)}){returns}"
    if len(line) <= 88:
        return line
    return f"{name}(\n" + "".join(f"    {one},\n" for one in arguments) + f"){returns}"


def _arguments(given: ast.arguments) -> Iterator[str]:
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + given.defaults
    for one, default in zip(plain, defaults, strict=True):
        yield _argument(one, default)
        if given.posonlyargs and one is given.posonlyargs[-1]:
            yield "/"
    if given.vararg:
        yield "*" + ast.unparse(given.vararg)
    elif given.kwonlyargs:
        yield "*"
    for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        yield _argument(one, default)
    if given.kwarg:
        yield "**" + ast.unparse(given.kwarg)


def _argument(one: ast.arg, default: ast.expr | None) -> str:
    equals = " = " if one.annotation else "="
    return ast.unparse(one) + (equals + ast.unparse(default) if default else "")


def _members(node: ast.ClassDef) -> Iterator[str]:
    """Yields a table of the fields and properties of a class, and then its methods."""
    rows = []
    for member, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(member, ast.AnnAssign) and not ast.unparse(member.target).startswith("_"):
            rows.append(_row(ast.unparse(member.target), member.annotation, _string(after)))
        elif isinstance(member, ast.FunctionDef) and member.decorator_list and member.returns:
            rows.append(_row(member.name, member.returns, ast.get_docstring(member) or ""))
    if rows:
        yield table(("field", "type", "meaning"), rows)
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and not member.decorator_list and _is_shown(member):
            yield _block(_signature(member, member.name))
            yield _docstring(member)


def _row(name: str, kind: ast.expr, about: str) -> tuple[str, str, str]:
    return as_code(name), as_code(ast.unparse(kind)), as_markdown(" ".join(about.split()))


def _is_shown(method: ast.FunctionDef) -> bool:
    special = method.name.startswith("__") and ast.get_docstring(method) is not None
    return special or not method.name.startswith("_")


def _string(node: ast.stmt | None) -> str:
    """Returns the text of a string that stands by itself, as below a field."""
    value = node.value if isinstance(node, ast.Expr) else None
    text = value.value if isinstance(value, ast.Constant) else ""
    return inspect.cleandoc(text) if isinstance(text, str) else ""


def _docstring(node: Definition) -> str:
    """Returns a docstring with its sections, such as `Args:`, as lists."""
    text = ast.get_docstring(node) or ""
    about, *rest = re.split(r"^(Args|Returns|Raises|Yields):\n", text, flags=re.MULTILINE)
    parts = [as_markdown(about.strip())]
    for title, body in zip(rest[::2], rest[1::2], strict=True):
        items = re.split(r"\n(?=\S)", inspect.cleandoc(body))
        parts += [f"**{'Arguments' if title == 'Args' else title}**", _items(items)]
    return "\n\n".join(part for part in parts if part)


def _items(items: list[str]) -> str:
    """Returns `name: text` as a list; anything else as text."""
    named = [re.fullmatch(r"([*\w]+): (.*)", item, flags=re.DOTALL) for item in items]
    if not all(named):
        return as_markdown(" ".join(items))
    return "\n".join(_bullet(as_code(one[1]), one[2]) for one in named if one)


def _bullet(code: str, about: str) -> str:
    return f"- {code}: {as_markdown(' '.join(about.split()))}" if about else f"- {code}"


def _block(code: str) -> str:
    return f"```python\n{code}\n```"
