"""Training never needs the network: a run from text to checkpoints with all connections blocked.

Two walls: an audit hook in every Python process of the run (offline/sitecustomize.py), which also
notes who tried, and, where the kernel lets us, a network namespace that has only the loopback.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from overland.apps.data.tokenizer_training import train_tokenizer
from overland.apps.proofs.checkpoint import verify
from tests.cli.processes import ROOT, TINY, environment, read_metrics
from tests.data.tokenizer_folders import CORPUS
from tests.waiting import LIMIT_SECONDS

RUN = Path("runs/quickstart")
HOOK = Path(__file__).parent / "offline"
INSIDE = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "inside"]

CALLS_HOME = """
import socket
from overland.training.callbacks import Callback, register_callback

@register_callback
class CallsHome(Callback):
    def on_start(self, run):
        for call in (lambda: socket.socket().connect(("192.0.2.1", 80)),
                     lambda: socket.getaddrinfo("example.org", 443)):
            try:
                call()
            except OSError as error:
                print("could not:", error)
"""


def namespace() -> list[str]:
    """What to put before a command, so that it sees no network but the loopback."""
    try:
        works = subprocess.run([*INSIDE, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        works = False
    return INSIDE if works else []


def train(folder: Path, *words: str, **env: str) -> tuple[str, list[str]]:
    """(what was printed, who tried to get out)."""
    attempts = folder / "attempts"
    path = f"{HOOK}:{ROOT}"
    has_tokenizer = any(word.startswith("model.hf_assets_path") for word in words)
    tiny = [word for word in TINY if not (has_tokenizer and word.startswith("data.vocab_size"))]
    done = subprocess.run(
        [*namespace(), sys.executable, "-m", "overland", "train", "quickstart", *tiny, *words],
        cwd=folder,
        env=environment(PYTHONPATH=path, OVERLAND_ATTEMPTS=str(attempts), **env),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    tried = attempts.read_text().splitlines() if attempts.exists() else []
    return done.stdout + done.stderr, tried


def test_two_ranks_train_on_text_with_every_way_out_shut(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "assets").mkdir()
    for number, text in enumerate(CORPUS):
        (tmp_path / "text" / f"{number}.txt").write_text(text)
    train_tokenizer(CORPUS, 512, tmp_path / "assets" / "tokenizer.json")
    _, tried = train(
        tmp_path, "training.dataset_path=text", "model.hf_assets_path=assets",
        "validation.dataset_path=text", "validation.allow_training_data=true",
        "validation.freq=3", "training.steps=6",
        "checkpoint.interval=3",
        "metrics.enable_tensorboard=true", "metrics.sample_prompt=", "compile.enable=false",
        "lr_scheduler.warmup_steps=2", NGPU="2",
    )  # fmt: skip
    assert tried == []
    run = tmp_path / RUN
    records = read_metrics(run / "metrics.jsonl")
    assert [r["step"] for r in records if "loss" in r] == [1, 2, 3, 4, 5, 6]
    assert [r["step"] for r in records if "validation_loss" in r] == [3, 6]
    assert verify(run / "checkpoint" / "step_6") == []
    assert list((run / "tb").glob("events.*"))
    assert list((run / "tokenizer").iterdir())  # it was text


def test_one_that_calls_home_is_refused_and_noted(tmp_path: Path) -> None:
    """Else the test above would prove nothing."""
    (tmp_path / "calls_home.py").write_text(CALLS_HOME)
    said, tried = train(
        tmp_path, "training.steps=2", "training.dataset=random", "validation.enable=false",
        "checkpoint.enable=false", "metrics.enable_tensorboard=false", "metrics.sample_prompt=",
        "job.custom_import=calls_home", "lr_scheduler.warmup_steps=1", NGPU="1",
    )  # fmt: skip
    assert said.count("could not: the test lets nobody out") == 2
    assert [line.split(" ", 1)[1] for line in tried] == [
        "socket.connect ('192.0.2.1', 80)",
        "socket.getaddrinfo 'example.org'",
    ]


@pytest.mark.skipif(not namespace(), reason="the kernel gives us no network namespace")
def test_the_namespace_has_no_way_out_either() -> None:
    code = "import socket; socket.create_connection(('192.0.2.1', 80), timeout=5)"
    done = subprocess.run([*INSIDE, sys.executable, "-c", code], capture_output=True, text=True)
    assert "Network is unreachable" in done.stderr
