"""`overland push`: what is sent, refused and compared afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from overland.cli.main import app
from overland.hub import push as pushing
from tests.hub.server import TOKEN, Hub

FILES = {
    "config.json": b'{"a": 1}',
    "model.safetensors": b"w" * 20_000,
    "README.md": b"---\nlicense: mit\n---\nhello\n",
    "sub/empty.txt": b"",
}


@pytest.fixture
def folder(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name, data in {**FILES, ".overland/snapshot.json": b"{}", ".git/HEAD": b"x"}.items():
        path = tmp_path / "hf" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "hf"


def run(*words: str, code: int = 0) -> Result:
    done = CliRunner().invoke(app, ["push", *words])
    assert done.exit_code == code, f"{done.output}\n{done.exception}"
    assert TOKEN not in done.output
    return done


def held(hub: Hub, name: str, kind: str = "model", ref: str = "main") -> dict[str, bytes]:
    repo = hub.repos[kind, name]
    return {k: v for k, v in repo.commits[repo.refs[ref]].items() if k != ".gitattributes"}


def test_a_folder_arrives_as_it_is_and_comes_back_so(hub: Hub, folder: Path) -> None:
    said = run(str(folder), "me/new", "--private").stdout
    assert "verified" in said
    assert held(hub, "me/new") == FILES
    assert hub.repos["model", "me/new"].private
    done = CliRunner().invoke(app, ["fetch", "model", "me/new", "--to", "back"])
    assert done.exit_code == 0
    assert Path("back/model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_a_dataset_on_a_branch(hub: Hub, folder: Path) -> None:
    said = run(
        str(folder), "me/texts", "--type", "dataset", "--revision", "v2", "--message", "m", "--json"
    ).stdout
    assert held(hub, "me/texts", "dataset", "v2") == FILES
    assert held(hub, "me/texts", "dataset") == {}
    facts = json.loads(said)
    assert facts["files"]["model.safetensors"] == 20_000
    assert facts["commit"] == hub.repos["dataset", "me/texts"].refs["v2"]


def test_pushing_again_sends_only_what_changed(hub: Hub, folder: Path) -> None:
    run(str(folder), "me/new")
    hub.requests.clear()
    (folder / "config.json").write_bytes(b'{"a": 2}')
    run(str(folder), "me/new")
    assert held(hub, "me/new")["config.json"] == b'{"a": 2}'
    assert not any(one.method == "PUT" for one in hub.requests)


def test_private_files_do_not_go_into_an_open_repository(hub: Hub, folder: Path) -> None:
    hub.add("me/open", {"old.txt": b"old"})
    said = run(str(folder), "me/open", "--private", code=2).stderr
    assert "open to everyone" in said
    assert held(hub, "me/open") == {"old.txt": b"old"}


def test_what_arrives_damaged_is_said(hub: Hub, folder: Path) -> None:
    hub.corrupt["upload"] = 1
    said = run(str(folder), "me/new", code=2).stderr
    assert "does not hold what was sent: model.safetensors" in said


def test_what_a_gitignore_leaves_out_is_said(hub: Hub, folder: Path) -> None:
    hub.gitignored.add("config.json")
    assert "does not hold what was sent: config.json" in run(str(folder), "me/new", code=2).stderr


def test_a_secret_of_the_environment_is_never_sent(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a-key-that-is-secret")
    monkeypatch.setattr(pushing, "BLOCK", 64)  # it lies across the border of two blocks
    (folder / "log.txt").write_bytes(b"x" * 55 + b"a-key-that-is-secret" + b"y" * 100)
    said = run(str(folder), "me/new", code=2).stderr
    assert "log.txt holds the value of WANDB_API_KEY" in said
    assert "a-key-that-is-secret" not in said
    assert hub.requests == []


@pytest.mark.parametrize("name", ["step_10/COMMITTED", "dcp/.metadata", "__0_0.distcp"])
def test_a_checkpoint_is_to_be_converted_first(hub: Hub, folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"x")
    said = run(str(folder), "me/new", code=2).stderr
    assert "`overland convert" in said
    assert "--to hf`" in said
    assert hub.requests == []


def test_refusals_are_one_sentence(
    hub: Hub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()

    def says(*words: str) -> str:
        said = run(*words, code=2).stderr
        assert said.count("\n") == 1
        return said

    assert "nowhere is no folder" in says("nowhere", "me/new")
    assert "holds no files" in says("empty", "me/new")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE is set" in says(str(folder), "me/new")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_TOKEN", "hf_some-other-token")
    assert "does not know the token in HF_TOKEN" in says(str(folder), "me/new")
    monkeypatch.delenv("HF_TOKEN")
    assert "set HF_TOKEN" in says(str(folder), "me/new")
    assert hub.repos == {}
