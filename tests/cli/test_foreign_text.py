"""Names, descriptions and files come from others: no verb prints the control characters in them."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from overland.apps.streams import guard_streams, raw
from overland.cli.main import app
from tests.cli.processes import TINY
from tests.reporting.runs import ATTEMPT, FAULT, SESSION, add_events, line, make_run, set_live

BAD = "evil\x1b]0;title\x07\x1b[2J\x9b31m\r\u202egood"
CONTROLS = {chr(one) for one in (*range(32), *range(0x7F, 0xA0), 0x202E)} - set("\n")
PACKAGE = Path(__file__).parents[2] / "overland"

Command = Callable[..., str]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """Runs a verb as `main` does, and returns all that it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("overland.apps.watch.status.queued", lambda which: None)
    monkeypatch.setenv("NGPU", "1")

    def run(*words: object, encoding: str = "utf-8") -> str:
        kept = [io.BytesIO(), io.BytesIO()]
        with monkeypatch.context() as patch:
            for name, bytes_ in zip(("stdout", "stderr"), kept, strict=True):
                patch.setattr(sys, name, io.TextIOWrapper(bytes_, encoding))
            guard_streams()
            with pytest.raises(SystemExit):
                app([str(word) for word in words])
            sys.stdout.flush()
            sys.stderr.flush()
            return b"".join(one.getvalue() for one in kept).decode(encoding)

    return run


def hostile_run(folder: Path) -> Path:
    run = make_run(folder, done=5)
    config = f"[job]\ndescription = {json.dumps(BAD)}\n[training]\nsteps = 10\n"
    (run / "config.toml").write_text(config)
    (run / "metrics.jsonl").write_text(
        line(1, 1.0) + json.dumps({"step": 1, f"validation_loss/{BAD}": 1.0, "time": 1.0}) + "\n"
    )
    add_events(
        run, {**SESSION, "job": BAD, "nodes": [BAD]}, {**ATTEMPT, "nodes": [BAD]},
        {**FAULT, "what": BAD, "kind": BAD, "nodes": [BAD], "excluded": [BAD], "action": BAD},
        {"event": "end", "how": "failed", "step": 5, "what": BAD},
    )  # fmt: skip
    (run / "stopped").write_text(BAD)
    result = run / "evaluations" / "one"
    result.mkdir(parents=True)
    record = {"kind": "perplexity", "name": BAD, "step": 5, "perplexity": 3.0, "time": 1.0}
    (result / "results.json").write_text(json.dumps(record))
    return run


def test_no_verb_prints_control_characters(command: Command, tmp_path: Path) -> None:
    run = hostile_run(tmp_path / "run\x1b[31m")
    live = hostile_run(tmp_path / "live")
    set_live(
        live, state=BAD, phase=BAD, nodes=[BAD], job=BAD, time=4e9, attempt=BAD, ranks=1,
        slowest={"rank": 1, "node": BAD, "factor": 2.0},
        late=[{"rank": BAD, "node": BAD, "seconds": 3, "phase": BAD}],
    )  # fmt: skip
    config = tmp_path / "a.toml"
    config.write_text(f"[job]\ndescription = {json.dumps(BAD)}\n{json.dumps(BAD)} = 1\n")
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": BAD, BAD: BAD}) + "\n")
    named = tmp_path / f"{BAD.replace('/', '')}.jsonl"
    named.write_text(json.dumps({"text": BAD}) + "\n")
    weights = tmp_path / "weights"
    weights.mkdir()
    save_file({BAD: torch.zeros(2)}, weights / "model.safetensors", {BAD: BAD})
    (weights / "config.json").write_text(json.dumps({"model_type": BAD, "architectures": [BAD]}))
    for words in (
        ("watch", run, "--once"),
        ("watch", live, "--once"),
        ("watch", tmp_path / BAD, "--once"),
        ("ls", tmp_path),
        ("report", run),
        ("check", config),
        ("check", "quickstart", *TINY, f"training.dataset={BAD}", "--no-step"),
        ("check", "quickstart", *TINY, f"training.dataset_path={named}", "--no-step"),
        ("train", config),
        ("config", "convert", config, "new.toml"),
        ("data", "inspect", named),
        ("data", "inspect", "data.jsonl"),
        ("convert", weights, tmp_path / "out\x1b[31m", "--to", "hf"),
        ("generate", weights, "x"),
        ("eval", run),
        ("submit", config, "--site", BAD),
        ("init", BAD),
        ("doctor", "--site", BAD),
        (BAD,),
    ):
        said = command(*words)
        assert any(word in said for word in ("evil", "\\x1b[31m", "weights")), (words, said)
        assert not CONTROLS & set(said), (words[:2], said)


def test_an_ascii_terminal_gets_ascii(command: Command, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", done=50)
    (run / "done").write_text("50\n")
    said = command("watch", run, "--once", encoding="ascii")
    assert "?" not in said
    assert ".." in said  # the end of the curve


def test_what_is_drawn_on_purpose_goes_around(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(kept, "utf-8"))
    guard_streams()
    print("\x1b[31m")
    print("\x1b[31m", file=raw(sys.stdout), flush=True)
    said = kept.getvalue()
    monkeypatch.undo()
    assert said == b"\\x1b[31m\n\x1b[31m\n"


def test_only_the_console_that_escapes_is_used() -> None:
    """rich's own prints what it is given, and reads markup in it."""
    own = r"from rich(\.console)? import [^\n]*\bConsole\b|\brich\.(print|get_console)\b"
    found = [path for path in PACKAGE.rglob("*.py") if re.search(own, path.read_text())]
    assert found == [PACKAGE / "apps" / "streams.py"]
