"""Configs with a mistake in them: what each trainer says, and when."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cli.processes import Command, environment
from tests.comparison import resume
from tests.comparison.checkers import toml
from tests.comparison.mistakes import MISTAKES, Mistake

Results = list[dict[str, Any]]
NEEDS_GPU = ("torchtitan", "axolotl")
"""Trainers whose training was not started here."""
KEYS = ("misspelled key", "key in the wrong section", "key of another trainer")
"""What is decided where the file is read: nothing looks at such a key later."""


def checkers(clone: Path | None) -> dict[str, Callable[[], Results]]:
    others = ("transformers", "TRL", "axolotl", "torchtitan")
    found: dict[str, Callable[[], Results]] = {"Overland": ours}
    found |= {name: lambda name=name: theirs(name) for name in others}
    return {**found, "nanochat": lambda: theirs("nanochat", clone)} if clone else found


def files(folder: Path) -> Path:
    resume.write_files(folder)
    (folder / "data").mkdir()
    shutil.copy(folder / "texts.jsonl", folder / "data")
    return folder


def ours() -> Results:
    with tempfile.TemporaryDirectory() as name:
        folder = files(Path(name))
        base = {
            "job.dump_folder": "run", "model.from": str(folder / "base"), "optimizer.lr": 1e-3,
            "metrics.log_freq": 1, "data.folder": str(folder / "prepared"),
            "training.dataset_path": str(folder / "data"), "training.seq_len": resume.SEQ_LEN,
            "training.local_batch_size": 4, "training.global_batch_size": 4, "training.steps": 2,
        }  # fmt: skip
        sound = Mistake("none", (), settings={"Overland": {}})
        return [our_answer(one, base, folder) for one in [sound, *MISTAKES]]


def our_answer(mistake: Mistake, base: dict[str, Any], folder: Path) -> dict[str, Any]:
    place = Path(tempfile.mkdtemp(dir=folder))
    text = toml({**base, **mistake.settings["Overland"]}) + mistake.text.get("Overland", "")
    (place / "run.toml").write_text(text)
    done = Command(("train", "run.toml"), place, environment(NGPU="1"), merged=True)
    code = done.wait()
    metrics = place / "run" / "metrics.jsonl"
    steps = metrics.read_text().count('"loss"') if metrics.exists() else 0
    refused = {0: "", 2: "message"}.get(code, "trace")
    return answer(mistake, refused, re.sub(r"/\S+/bin/(?=overland)", "", done.stdout), steps)


def theirs(name: str, clone: Path | None = None) -> Results:
    with tempfile.TemporaryDirectory() as place:
        folder = files(Path(place))
        env = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        if clone is not None:
            env |= resume.nanochat(clone).prepare(folder)
            env |= {"NANOCHAT_BASE_DIR": str(folder / "nanochat-data"), "NANOCHAT": str(clone)}
        words = ["-m", "tests.comparison.checkers", name, str(folder)]
        done = subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, env=environment(**env)
        )
    assert not done.returncode, done.stderr
    marked = [line for line in done.stdout.splitlines() if line.startswith("CHECKED ")]
    return [json.loads(line.removeprefix("CHECKED ")) for line in marked]


def data_of_torchtitan() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        words = ["-m", "tests.comparison.torchtitan_data", str(files(Path(place)))]
        done = subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, env=environment()
        )
    assert not done.returncode, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    return dict(json.loads(line.removeprefix("FOUND ")))


def answer(mistake: Mistake, refused: str, said: str, passes: int) -> dict[str, Any]:
    return {
        "title": mistake.title, "refused": refused, "said": said if refused else "",
        "warned": "" if refused else said, "passes": passes,
    }  # fmt: skip


def verdict(name: str, mistake: Mistake, found: dict[str, Any]) -> dict[str, bool]:
    """Whether it was refused before training, with the key, a suggestion and the line; whether it
    was trained with instead, with a warning or without; and whether neither could be seen here."""
    said, warned = without_usage(found["said"]), found["warned"]
    refused = bool(found["refused"]) and not found["passes"]
    unseen = not found["refused"] and name in NEEDS_GPU and mistake.title not in KEYS
    return {
        "refused": refused,
        "sentence": refused and found["refused"] == "message",
        "named": refused and names(mistake, said),
        "suggested": refused and suggests(name, mistake, said),
        "line": refused and bool(re.search(r"line \d+|\.(toml|yaml):\d+", said)),
        "warned": not found["refused"] and names(mistake, warned),
        "accepted": not found["refused"] and not unseen and not names(mistake, warned),
        "unseen": unseen,
        "late": bool(found["refused"]) and bool(found["passes"]),
    }


def without_usage(said: str) -> str:
    """Leaves out a banner, and the list of all options that argparse puts in front of a message."""
    return re.sub(r"\A.*?^usage: .*? error: ", "", said.strip(), flags=re.M | re.S)


def names(mistake: Mistake, said: str) -> bool:
    return all(re.search(rf"\b({key})\b", said) for key in mistake.keys)


def suggests(name: str, mistake: Mistake, said: str) -> bool:
    """Whether a name or word is said that was meant, and was not the mistake itself."""
    wrong = [key.rpartition(".")[2] for key in mistake.settings[name]]
    right = [one for one in mistake.right.split("|") if one and one not in wrong]
    return any(re.search(rf"(?<![\w-]){one}(?![\w-])", said) for one in right)
