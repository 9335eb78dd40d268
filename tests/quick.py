"""The tests to run before a commit: those nearest to what changed, in at most two minutes.

make quick                      lints, then runs them
python -m tests.quick --list    only names them

Changed is what differs from the main branch, committed or not. A changed module is tested by the
files that import it and by the folder that mirrors its package; a few files are always run. How
long each file takes is in times.json (`make times` measures it again): the nearest come first, and
those that no longer fit are named and left to `make test`.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from tests.times import read_times

ROOT = Path(__file__).parents[1]
WORKERS = 2
# Seconds of tests, by both workers: the rest of two minutes goes into lint, imports and collecting.
BUDGET = 120
MAIN_BRANCHES = ("main", "origin/main")

# A config is read, checked and trained; a command ends well and badly; the house stands.
CORE = (
    "tests/test_files.py",
    "tests/test_quick.py",
    "tests/checks/test_run_folder.py",
    "tests/config/test_load.py",
    "tests/docs/test_architecture.py",
    "tests/docs/test_links.py",
    "tests/models/test_decoder.py",
    "tests/training/test_validation_sets.py",
)

# Packages whose tests are not in the folder of the same name; the longest name that fits counts.
FOLDERS = {
    "overland/recipes": "tests/cli",
    "overland/scripts": "tests/documents",
    "overland/slurm.py": "tests/cluster",
    "overland/apps/check": "tests/checks",
    "overland/apps/console": "tests/training",
    "overland/apps/convert": "tests/checkpoint/convert",
    "overland/cluster/doctor": "tests/cluster",
    "overland/apps/data": "tests/data",
    "overland/apps/dialects": "tests/config",
    "overland/apps/evaluation": "tests/evaluation",
    "overland/apps/hub": "tests/hub",
    "overland/cluster": "tests/cluster",
    "overland/cluster/supervise": "tests/cluster/supervise",
    "overland/cluster/preflight": "tests/cluster/preflight",
    "overland/apps/proofs": "tests/proofs",
    "overland/apps/report": "tests/reporting",
    "overland/apps/watch": "tests/reporting",
    "overland/world": "tests/cluster",
}


def changed_files() -> list[str]:
    """Paths that differ from the main branch where this one left it, and new ones."""
    base = next((_git("merge-base", "HEAD", one) for one in MAIN_BRANCHES if _is_known(one)), None)
    changed = _git("diff", "--name-only", base or "HEAD").splitlines()
    return sorted({*changed, *_git("ls-files", "--others", "--exclude-standard").splitlines()})


def nearest(changed: Iterable[str], files: Iterable[str]) -> list[str]:
    """The test files for these changes: changed ones, those named after a changed file, those that
    import it, those of its folder, the nearest folder first."""
    changed = set(changed)
    modules = {module_name(path) for path in changed if path.endswith(".py")}
    names = {f"test_{PurePosixPath(path).stem}" for path in changed}
    folders = {folder for path in changed if (folder := folder_of(path))}

    def distance(file: str) -> int | None:
        folder = str(PurePosixPath(file).parent)
        if file in changed:
            return 0
        if folder in folders and PurePosixPath(file).stem in names:
            return 1
        if modules & imported_modules(ROOT / file):
            return 2
        if folder in folders:
            return 3
        return 4 if any(folder.startswith(f"{one}/") for one in folders) else None

    found = [(away, file) for file in files if (away := distance(file)) is not None]
    return [file for _, file in sorted(found)]


def folder_of(path: str) -> str:
    """The folder of tests for a changed file; "" when there is none."""
    parts = PurePosixPath(path).parts
    if parts[0] == "tests":
        return str(PurePosixPath(path).parent) if len(parts) > 2 else ""
    if parts[0] == "docs" or path.endswith(".md"):
        return "tests/docs"
    for length in range(len(parts), 1, -1):
        start = "/".join(parts[:length])
        mirror = f"tests/{'/'.join(parts[1:length])}"
        if folder := FOLDERS.get(start, mirror if (ROOT / mirror).is_dir() else ""):
            return folder
    return ""


def that_fit(files: Iterable[str], times: dict[str, float]) -> tuple[list[str], list[str]]:
    """Those to run, in this order, and those that would take too long. A file is run by one worker,
    so none may take a worker's whole time."""
    chosen: list[str] = []
    left_out: list[str] = []
    seconds = 0.0
    for file in files:
        takes = times.get(file, 1.0)
        fits = takes <= BUDGET / WORKERS and seconds + takes <= BUDGET
        (chosen if fits else left_out).append(file)
        seconds += takes * fits
    return chosen, left_out


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported_modules(path: Path) -> set[str]:
    """All modules that a file may mean by its imports, those inside of functions included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def all_test_files() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))


def main(only_list: bool) -> int:
    files = all_test_files()
    wanted = dict.fromkeys([*CORE, *nearest(changed_files(), files)])
    chosen, left_out = that_fit(wanted, read_times())
    if only_list:
        print("\n".join(chosen))
        return 0
    print(f"{len(chosen)} of {len(files)} test files, the nearest to what changed.")
    if left_out:
        print(f"Left to `make test`, for want of time: {', '.join(left_out)}")
    command = [
        "pytest",
        "--numprocesses",
        str(WORKERS),
        "--dist",
        "loadfile",
        "--no-loadscope-reorder",
    ]
    return subprocess.run([sys.executable, "-m", *command, *chosen], cwd=ROOT).returncode


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _is_known(branch: str) -> bool:
    words = ["git", "rev-parse", "--verify", "--quiet", branch]
    return subprocess.run(words, cwd=ROOT, capture_output=True).returncode == 0


if __name__ == "__main__":
    sys.exit(main(only_list="--list" in sys.argv[1:]))
