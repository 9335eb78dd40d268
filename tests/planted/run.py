"""Plants faults in copies of the project, one at a time, and asks the tests whether they notice.

faults.toml lists mistakes that a tired engineer could make: a text that occurs once in the package,
what replaces it, and the test files most likely to notice, best first. So the power of the tests
can be measured before and after they are changed.

python -m tests.planted.run                            each fault against its own tests
python -m tests.planted.run --only NAME --tests FILE   one of them, against other tests
python -m tests.planted.run --whole --into TABLE.md    all tests; rows already there are skipped
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PYTEST = (sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider")
LONGEST = "30m"  # for a test file: some faults make ranks wait for each other forever
HEAD = "| fault | area | what goes wrong | caught by |\n|---|---|---|---|\n"
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description="Plants faults, and runs tests that should fail.")
    parser.add_argument("--only", nargs="+", help="names of faults")
    parser.add_argument("--tests", nargs="+", help="instead of the tests that a fault names")
    parser.add_argument("--whole", action="store_true", help="run all tests")
    parser.add_argument("--into", type=Path, help="a Markdown table that gets a row for each fault")
    asked = parser.parse_args()
    known = asked.into.read_text() if asked.into and asked.into.is_file() else HEAD
    for fault in tomllib.loads(Path(__file__).with_name("faults.toml").read_text())["fault"]:
        if (asked.only and fault["name"] not in asked.only) or f"| {fault['name']} |" in known:
            continue
        caught_by = catch(fault, ["tests"] if asked.whole else asked.tests or fault["tests"])
        cells = (fault["name"], fault["area"], fault["what"], caught_by.replace("|", r"\|"))
        print(row := f"| {' | '.join(cells)} |", flush=True)
        known += row + "\n"
        if asked.into:
            asked.into.write_text(known)


def catch(fault: dict[str, Any], tests: list[str]) -> str:
    """Returns the first test that fails because of the fault, or MISSED."""
    with tempfile.TemporaryDirectory(prefix="planted-", ignore_cleanup_errors=True) as folder:
        copy = copy_project(Path(folder, "tree"))
        texts = {path: path.read_text() for path in (copy / "overland").rglob("*.py")}
        places = [path for path, text in texts.items() if fault["old"] in text]
        if sum(text.count(fault["old"]) for text in texts.values()) != 1:
            return f"NOT PLANTED: its text must occur once in the package, not in {len(places)}"
        for test in tests:
            places[0].write_text(texts[places[0]].replace(fault["old"], fault["new"]))
            if failed := first_failure(copy, test):
                places[0].write_text(texts[places[0]])  # does it fail anyway?
                return f"FAILS ANYWAY: {failed}" if first_failure(copy, failed) else failed
    return "MISSED"


def copy_project(to: Path) -> Path:
    """Copies the project's files as they are now. Some tests also read the folder ../shared."""
    words = ["git", "-C", str(ROOT), "ls-files", "-z", "-co", "--exclude-standard"]
    listed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    for name in filter(lambda name: (ROOT / name).is_file(), listed.rstrip("\0").split("\0")):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, to / name)
    (to.parent / "shared").symlink_to(ROOT.parent / "shared")
    return to


def first_failure(copy: Path, test: str) -> str:
    """Runs tests; returns the first that fails or never ends, or an empty string."""
    words = ["timeout", "--kill-after=30", LONGEST, *PYTEST, test]
    env = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(words, cwd=copy, env=env, stdout=subprocess.PIPE, text=True)
    found = FAILED.search(done.stdout)
    return found[1] if found else test if done.returncode else ""


if __name__ == "__main__":
    main()
