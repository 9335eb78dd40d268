"""Builds the wheel, installs it into empty environments by pip and by uv, and trains the quickstart
there, in a folder with nothing from the clone; then runs the commands that the run suggests at its
end.

    python -m tests.prove_wheel docs/evidence/wheel.md
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

from tests.cli.processes import ROOT

EXTRAS = "text,data,cluster,hub"
CONSTRAINTS = ROOT / "constraints.txt"
SUGGESTED = re.compile(r"^  (\S*/?(?:overland|tensorboard) .+)$", re.MULTILINE)


def main(page: Path) -> None:
    page = page.absolute()
    rows: list[tuple[str, str, str]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", str(ROOT)]
        subprocess.run([*pip, "--wheel-dir", str(folder)], check=True)
        (wheel,) = folder.glob("overland-*.whl")
        for installer in ("pip", "uv"):
            place = folder / installer
            install(installer, wheel, place / "venv")
            (place / "empty").mkdir()
            rows += [(installer, *row) for row in try_out(place)]
    page.write_text(table(rows, wheel.name))
    print(page.read_text())


def install(installer: str, wheel: Path, venv: Path) -> None:
    """Torch first and by pip, as `make setup` does: a CPU build where there is no GPU."""
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [str(venv / "bin" / "pip"), "install", "--quiet", "--constraint", str(CONSTRAINTS)]
    subprocess.run([*pip[:3], "--upgrade", "pip"], check=True)
    subprocess.run([*pip, "torch"], check=True)
    what = f"overland[{EXTRAS}] @ {wheel.as_uri()}"
    if installer == "uv":
        subprocess.run([*pip[:3], "uv"], check=True)
        pip = [str(venv / "bin" / "uv"), "pip", *pip[1:]]
        pip += ["--python", str(venv / "bin" / "python")]
    subprocess.run([*pip, what], check=True)


def try_out(place: Path) -> list[tuple[str, str]]:
    """The commands and how each ended, in an environment that knows nothing of this one."""
    trained = type_in(place, "overland train quickstart")
    seen = [("overland train quickstart", said(trained))]
    suggested = [line for line in SUGGESTED.findall(trained.stdout) if "tensorboard" not in line]
    assert suggested, trained.stdout
    for line in suggested:
        shown = line.replace(f"{place}/venv/bin/", "")
        seen.append((shown, said(type_in(place, line))))
    return seen


def type_in(place: Path, line: str) -> subprocess.CompletedProcess[str]:
    path = f"{place}/venv/bin:/usr/local/bin:/usr/bin:/bin"
    env = {"PATH": path, "HOME": str(place), "LANG": "C.UTF-8"}
    started = time.monotonic()
    done = subprocess.run(
        shlex.split(line), cwd=place / "empty", env=env, text=True, capture_output=True
    )
    print(f"{place.name}: {line}: exit code {done.returncode}, {time.monotonic() - started:.0f} s")
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return done


def said(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    held_out = [line for line in lines if line.startswith("held-out loss")]
    return (held_out or lines[-1:] or ["done"])[0].replace("|", "\\|")[:100]


def table(rows: list[tuple[str, str, str]], wheel: str) -> str:
    lines = [
        "# The wheel in an empty environment\n",
        "By `python -m tests.prove_wheel` (part of `make prove-all`), "
        f"{date.today()}. `{wheel}` is built from the clone, installed with "
        f"`[{EXTRAS}]` into a new environment by each installer, and used in an empty folder: "
        "first the quickstart, then what it suggests at its end. Every command ended with exit "
        "code 0.\n",
        "| installed by | command | it said |\n|---|---|---|",
        *(f"| {installer} | `{command}` | {words} |" for installer, command, words in rows),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    main(Path(sys.argv[1]))
