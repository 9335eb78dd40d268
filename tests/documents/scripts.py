"""The scripts of a document in a user's folder, and lines as the user types them."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from overland.cli.init import copy_scripts
from tests.cli.processes import ROOT, environment, overland
from tests.cli.warm import Command
from tests.waiting import LIMIT_SECONDS

HERE = Path(__file__).parent
TINY = [
    "model.overrides={hidden_size = 32, intermediate_size = 64, num_hidden_layers = 2, "
    "num_attention_heads = 4, num_key_value_heads = 2, vocab_size = 640}",
    "training.seq_len=32",
    "training.dtype=float32",
    "training.mixed_precision_param=float32",
]


def copied(name: str, folder: Path, *configs: str) -> Path:
    """`overland init --from NAME` in an empty folder, with configs of the document next to it."""
    copy_scripts(name, folder)
    for config in configs:
        shutil.copy(HERE / config, folder)
    return folder


def typed(line: str, cwd: Path, code: int = 0, **env: str) -> str:
    """What a line in bash says; asserts on its exit code. `overland`, `python`, `pip`, `torchrun`
    and `tensorboard` are this environment's."""
    line = f'pip() {{ python -m pip "$@"; }}; {line}'
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", line], cwd=cwd, env=environment(PATH=path, **env),
        capture_output=True, text=True, timeout=LIMIT_SECONDS,
    )  # fmt: skip
    assert done.returncode == code, f"exit {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def shown(
    line: str,
    cwd: Path,
    *more: str,
    code: int = 0,
    env: dict[str, str] | None = None,
    **places: str,
) -> Command:
    """`overland …` or `python …` as a page shows it, with `places` for the words in capitals, and
    with `more` behind it."""
    program, *words = [places.get(word, word) for word in shlex.split(line)]
    assert program in ("overland", "python")
    for name, value in places.items():
        words = [word.replace(f"={name}", f"={value}") for word in words]
    return overland(*words, *more, cwd=cwd, code=code, **(env or {}))


def page_lines(name: str) -> list[str]:
    """What a page of docs/coming-from tells its reader to type, but for comments."""
    text = (ROOT / "docs/coming-from" / f"{name}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [
        line.split("  #")[0].split(" # ")[0].strip() for one in blocks for line in one.splitlines()
    ]


PROGRAMS = [
    "overland",
    "python",
    "torchrun",
    "srun",
    "sbatch",
    "mpirun",
    "pip",
    "tensorboard",
    "bash",
    "sh",
]


def page_commands(name: str) -> list[str]:
    """Every command on a page, in blocks and in the text, up to an ellipsis: a program with what
    follows it, and with variables before it."""
    text = (ROOT / "docs/coming-from" / f"{name}.md").read_text(encoding="utf-8")
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))
    found = []
    for span in [*page_lines(name), *spans]:
        command = span.replace("\\|", "|").removeprefix("… ").split(" …")[0].strip()
        words = [word for word in command.split(" ") if not re.match(r"[A-Z_]+=", word)]
        is_script = bool(words) and words[0].startswith("./")
        if is_script or (len(words) > 1 and words[0] in PROGRAMS):
            found.append(command)
    return found


def typed_in_tests() -> list[str]:
    """The strings of these tests: lines are typed as they are written there."""
    texts = [path.read_text(encoding="utf-8") for path in HERE.glob("*.py")]
    nodes = (node for text in texts for node in ast.walk(ast.parse(text)))
    return [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
