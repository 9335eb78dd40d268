"""docs/architecture.md is correct: the levels of the packages, their files, their dependencies."""

from __future__ import annotations

import ast
import os
import re
import tomllib
from collections import defaultdict
from collections.abc import Collection
from graphlib import TopologicalSorter
from pathlib import Path

from tests.cli.processes import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "overland"
MODULES = list(PACKAGE.rglob("*.py"))
EVERY_FILE = """\
## Every file

The first sentence of each. `OVERLAND_WRITE_EVIDENCE=1 pytest tests/docs/test_architecture.py`
writes this list.
"""


def levels() -> dict[str, int]:
    rows = re.findall(r"^\| (\d) \| ([^|]+) \|$", PAGE, flags=re.MULTILINE)
    return {room: int(level) for level, rooms in rows for room in re.findall(r"`(\w+)`", rooms)}


def imports_between_rooms() -> dict[str, set[tuple[str, str]]]:
    """Room -> (file, room it imports)."""
    found: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[0].startswith("__"):
            continue
        for name in imported_names(ast.parse(path.read_text(encoding="utf-8"))):
            other = name.removeprefix("overland.").split(".")[0]
            if name.startswith("overland.") and other != parts[0]:
                found[parts[0]].add((str(path.relative_to(ROOT)), other))
    return found


def imported_names(tree: ast.AST, modules: Collection[str] = (), hints: bool = False) -> list[str]:
    """What is imported; of `modules`, to the very file. `hints`: also for type hints alone."""
    names: list[str] = []
    for node in ast.iter_child_nodes(tree):
        is_hint = isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        if is_hint and not hints:
            continue
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "overland":
            names += [f"overland.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            names += [name if name in modules else node.module for name in inside]
        names += imported_names(node, modules, hints)
    return names


def test_every_room_has_a_level() -> None:
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - {"recipes"}
    rooms.add("scripts")  # which are no package
    files = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    assert set(levels()) == rooms | files


def test_no_import_goes_up() -> None:
    level = levels()
    upward = [
        f"{file} imports {other}"
        for room, imports in imports_between_rooms().items()
        for file, other in imports
        if level[other] > level[room]
    ]
    assert upward == []


def test_no_rooms_import_each_other_in_a_circle() -> None:
    graph = {room: {other for _, other in found} for room, found in imports_between_rooms().items()}
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports inside of functions and for type hints count too: they hide a circle, and do not
    undo it."""
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in MODULES}
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}
    graph = {
        name: set(imported_names(ast.parse(path.read_text(encoding="utf-8")), files, hints=True))
        - {name, "overland"}
        for name, path in files.items()
        if name != "overland"  # it names what is public, and its version is imported
    }
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_parallel_code_knows_no_transform_by_name() -> None:
    """Transforms say the roles of their matrices (models/linear.py), so a new one can be split."""
    transforms = {"float8", "lora", "nf4", "sparse"}
    for path in (PACKAGE / "parallel").rglob("*.py"):
        names = imported_names(ast.parse(path.read_text(encoding="utf-8")), hints=True)
        assert transforms.isdisjoint(name.rpartition(".")[2] for name in names), path


def test_every_file_that_is_named_is_there() -> None:
    files = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*") if path.is_file()}
    names = {Path(file).name for file in files}
    for name in re.findall(r"`((?:\w+/)*\w+\.(?:py|toml))`", PAGE):
        if name.startswith("tests/"):
            assert (ROOT / name).is_file(), name
        else:
            assert name in (files if "/" in name else names), name


def test_every_function_on_the_way_of_a_token_is_in_its_file() -> None:
    stops = re.findall(r"^\| \d+ \| `([\w/]+\.py)` \| `([\w.]+)` \|", PAGE, flags=re.MULTILINE)
    assert len(stops) > 30
    for file, function in stops:
        scope: list[ast.stmt] = ast.parse((PACKAGE / file).read_text(encoding="utf-8")).body
        for name in function.split("."):
            named = [node for node in scope if getattr(node, "name", "") == name]
            assert named, f"{file} has no {function}"
            scope = getattr(named[0], "body", [])


def test_the_list_of_files_is_what_they_say_of_themselves() -> None:
    head, title, _ = PAGE.partition(EVERY_FILE)
    page = head + title + list_of_files()
    if os.environ.get("OVERLAND_WRITE_EVIDENCE"):
        (ROOT / "docs" / "architecture.md").write_text(page, encoding="utf-8")
    assert page == PAGE


def list_of_files() -> str:
    """Every folder of the package and its files, each with its first sentence."""
    lines = [""]
    for folder in sorted({path.parent for path in MODULES}):
        files = sorted([*folder.glob("*.py"), *folder.glob("*.js")])
        files = [path for path in files if not path.stem.startswith("__")]
        name = str(folder.relative_to(PACKAGE))
        if not files or name.startswith("scripts"):
            continue
        lines += ["", f"### `{name}/`" if name != "." else "### The foundation", ""]
        if name != ".":
            lines += [first_sentence(folder / "__init__.py"), ""]
        lines += ["| | |", "|---|---|"]
        lines += [f"| `{path.name}` | {first_sentence(path)} |" for path in files]
    return "\n".join(lines) + "\n"


def first_sentence(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    else:
        text = "\n".join(re.findall(r"^// (.+)", text.partition("\n\n")[0], flags=re.MULTILINE))
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=[^A-Z ]\.) (?=[A-Z`])", paragraph)[0].replace("|", "\\|")


def test_scripts_that_no_test_runs_import_what_is_there() -> None:
    """Benchmarks run on GPUs, and pictures are drawn by hand."""
    scripts = [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "docs").rglob("*.py")]
    missing = []
    for script in scripts:
        for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(
                "overland"
            ):
                continue
            file = ROOT / str(node.module).replace(".", "/")
            file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
            text = file.read_text(encoding="utf-8") if file.exists() else ""
            names = [
                one.name for one in node.names if not (file.parent / f"{one.name}.py").exists()
            ]
            missing += [
                f"{script.relative_to(ROOT)}: {node.module}.{name}"
                for name in names
                if not re.search(rf"\b{name}\b", text)
            ]
    assert not missing


def test_every_dependency_is_given_a_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    needed = {re.split(r"[><=\[]", word)[0].lower() for words in lists for word in words}
    section = PAGE.partition("## Dependencies")[2].partition("\n## ")[0]
    for name in needed - {"overland", "types-pyyaml"}:
        assert re.search(rf"\b{name}\b", section), name


# They try a disk: what they write and sync is removed again.
TRIALS = {"cluster/supervise/supervised.py", "cluster/preflight/measure.py"}


def test_files_become_durable_in_one_place() -> None:
    for path in PACKAGE.rglob("*.py"):
        name = str(path.relative_to(PACKAGE))
        if name == "files.py" or name in TRIALS:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Attribute):
                owner = ast.unparse(called.value)
                by_hand = called.attr in ("fsync", "fdatasync") or (
                    called.attr in ("rename", "replace") and owner in ("os", "beside", "part")
                )
                assert not by_hand, f"{name}:{node.lineno}: {ast.unparse(called)}"


FORKS = {
    "overland/cluster/preflight/task.py": "the task has imported torch and computed nothing",
    "tests/cli/warm.py": "the server has imported torch and computed nothing",
    "tests/limited.py": "the child reads a file, and computes nothing",
    "tests/test_files.py": "the child writes a file, and computes nothing",
}


def test_no_process_that_has_computed_is_forked_to_compute() -> None:
    """A fork lacks the threads of torch: on some processors it crashes at the first product."""
    root = Path(__file__).parents[2]
    files = [*root.glob("overland/**/*.py"), *root.glob("tests/**/*.py")]
    pattern = re.compile(r"\bos\.fork\(\)|get_context\(\"fork\"\)|set_start_method\(")
    own = Path(__file__).resolve()
    found = {
        str(path.relative_to(root))
        for path in files
        if path.resolve() != own and pattern.search(path.read_text(encoding="utf-8"))
    }
    assert found == FORKS.keys()
