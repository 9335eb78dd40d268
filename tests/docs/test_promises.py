"""What docs/train.md promises about text, run folders and exit codes."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from overland.apps.data.tokenizer_training import train_tokenizer
from overland.cli.common import is_user_error
from overland.config.errors import ConfigError
from overland.config.load import load_config
from overland.data.layout import lay_out
from overland.data.sources import open_source
from overland.data.tokenizer import Tokenizer
from overland.errors import DataError, sentence
from overland.training.main import with_fresh_folder
from tests.cli.processes import ROOT
from tests.docs.pages import blocks


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    train_tokenizer(["some text"], 300, tmp_path / "tokenizer.json")
    return Tokenizer(tmp_path / "tokenizer.json")


def test_tokens_are_made_anew_when_a_file_changes(tmp_path: Path, tokenizer: Tokenizer) -> None:
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("first")
    before = lay_out("text", open_source(text), tokenizer, tmp_path / "data")
    assert lay_out("text", open_source(text), tokenizer, tmp_path / "data") == before
    (text / "a.txt").write_text("second")
    assert lay_out("text", open_source(text), tokenizer, tmp_path / "data") != before


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("latin.txt", b"caf\xe9", "latin.txt: expected UTF-8 text"),
        ("broken.txt.gz", b"no gzip", "broken.txt.gz cannot be read: .* incorrect header"),
        ("cut.txt.gz", b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03ab", "cut.txt.gz cannot be read"),
    ],
)
def test_text_that_cannot_be_read_is_named(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(open_source(tmp_path).read(str(tmp_path / name)))


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{bad")
    with pytest.raises(DataError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer(tmp_path)


def test_a_file_that_the_system_refuses_is_the_users_to_mend(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError) as refused:  # noqa: PT011
        (tmp_path / "file" / "folder").mkdir()
    assert is_user_error(refused.value)
    assert sentence(refused.value) == f"{tmp_path}/file/folder: Not a directory"
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert is_user_error(full)
    assert sentence(full).startswith("No space left on device; `df -h` shows")
    full.filename, full.filename2 = "from", f"{tmp_path}/file"
    assert sentence(full) == f"{tmp_path}/file: No space left on device; free some space there"


def test_an_error_that_cannot_be_printed_still_gives_its_exit_code() -> None:
    """A rank's log is on the disk that is full."""
    code = (
        "from overland.cli.common import verb\n"
        "from overland.errors import NotSavedError\n"
        "@verb\ndef fail(): raise NotSavedError('x')\n"
        "import typer\ntry: fail()\nexcept typer.Exit as end: raise SystemExit(end.exit_code)"
    )
    with open("/dev/full", "wb") as full:
        assert subprocess.run([sys.executable, "-c", code], stderr=full).returncode == 74


def test_errors_of_our_own_making_are_no_users_errors() -> None:
    for error in (ValueError("x"), KeyError("x"), OSError("a socket"), AssertionError()):
        assert not is_user_error(error)


def test_a_run_made_with_resume_none_can_be_resumed_by_its_own_config(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("")
    words = [f"job.dump_folder={tmp_path}/run", "checkpoint.resume=none"]
    config = with_fresh_folder(load_config("quickstart", words, env={}).config)
    assert config.job.dump_folder == f"{tmp_path}/run-2"
    assert config.checkpoint.resume == "auto"


def test_every_config_on_a_page_is_one_that_loads(tmp_path: Path) -> None:
    pages = [path for path in (ROOT / "docs").rglob("*.md") if path.name != "broken_configs.md"]
    failed = {}
    for page in [ROOT / "README.md", *pages]:
        for block in blocks(page.read_text(encoding="utf-8")):
            if block.language not in ("toml", "yaml") or block.text.startswith("description ="):
                continue  # a site
            file = tmp_path / f"run.{block.language}"
            file.write_text(block.text)
            try:
                load_config(str(file), env={"SCRATCH_ROOT": "/scratch"})
            except ConfigError as error:
                failed[str(page.relative_to(ROOT))] = str(error)
    assert failed == {}
