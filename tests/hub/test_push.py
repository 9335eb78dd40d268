"""`overland push`: what is sent, refused and compared afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from overland.apps.hub import secrets
from overland.cli.main import app
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
    assert "already exists and is public" in said
    assert held(hub, "me/open") == {"old.txt": b"old"}


def test_what_arrives_damaged_is_said(hub: Hub, folder: Path) -> None:
    hub.corrupt["upload"] = 1
    said = run(str(folder), "me/new", code=2).stderr
    assert "does not match what was pushed: model.safetensors" in said


def test_what_a_gitignore_leaves_out_is_said(hub: Hub, folder: Path) -> None:
    hub.gitignored.add("config.json")
    assert (
        "does not match what was pushed: config.json" in run(str(folder), "me/new", code=2).stderr
    )


def test_a_secret_of_the_environment_is_never_sent(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a-key-that-is-secret")
    monkeypatch.setattr(secrets, "BLOCK", 64)  # it lies across the border of two blocks
    (folder / "log.txt").write_bytes(b"x" * 55 + b"a-key-that-is-secret" + b"y" * 100)
    said = run(str(folder), "me/new", code=2).stderr
    assert "log.txt contains the value of WANDB_API_KEY" in said
    assert "a-key-that-is-secret" not in said
    assert hub.requests == []


@pytest.mark.parametrize(
    "name",
    [
        ".env", ".env.local", ".ENV", ".netrc", ".git_credentials", "sub/credentials.json",
        "id_rsa", "id_ed25519.bak", "server.key", "cert.pem", ".ssh/config", ".aws/config",
    ],
)  # fmt: skip
def test_a_file_of_secrets_is_known_by_its_name(hub: Hub, folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"x")
    said = run(str(folder), "me/new", code=2).stderr
    assert f"{name} looks like a file with keys or passwords" in said
    assert hub.requests == []


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("hf_" + "a1B2" * 9, "a Hugging Face token"),
        ("key = AKIA" + "A1B2" * 4 + "\n", "an AWS key"),
        ('"AIza' + "x-_1a" * 7, "a Google Cloud key"),
        ("AccountKey=" + "a" * 86 + "==;", "an Azure key"),
        ("ghp_" + "a1" * 18, "a GitHub token"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----", "a private key"),
        ("-----BEGIN PRIVATE KEY-----", "a private key"),
        ("-----BEGIN RSA PRIVATE KEY-----", "a private key"),
    ],
)
def test_a_key_is_found_in_any_file(
    hub: Hub, folder: Path, text: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "BLOCK", 50)  # it lies across the borders of blocks
    (folder / "notes.md").write_bytes(b"\xff" * 45 + text.encode() + b" " * 99)
    said = run(str(folder), "me/new", code=2).stderr
    assert f"notes.md contains {kind}" in said
    assert text.strip() not in said
    assert hub.requests == []


def test_what_only_resembles_a_secret_is_sent(hub: Hub, folder: Path) -> None:
    resembling = {
        "tokenizer.json": b'{"hf_token": "hf_xxx", "AKIA": 1}',
        "environment.md": b"-----BEGIN PUBLIC KEY-----",
        "id_rsa.pub": b"ssh-rsa AAAA",
    }
    for name, data in resembling.items():
        (folder / name).write_bytes(data)
    run(str(folder), "me/new")
    assert held(hub, "me/new") == FILES | resembling


def test_links_lead_to_files_of_the_folder_or_are_refused(
    hub: Hub, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "outside.txt").write_text("private")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.txt").write_text("private")
    link = folder / "link.txt"
    for target, reason in (
        (tmp_path / "outside.txt", "is a link out of the folder"),
        (Path("../outside.txt"), "is a link out of the folder"),
        (tmp_path / "elsewhere", "is a link to a folder"),
        (Path("link.txt"), "is a broken link"),
        (Path("nothing"), "is a broken link"),
    ):
        link.symlink_to(target)
        said = run(str(folder), "me/new", code=2).stderr
        assert reason in said
        assert said.count("\n") == 1
        link.unlink()
    assert hub.requests == []
    link.symlink_to("config.json")
    run(str(folder), "me/new")
    assert held(hub, "me/new") == {**FILES, "link.txt": FILES["config.json"]}


def test_a_snapshot_in_the_cache_of_hugging_face_is_a_folder_like_any_other(
    hub: Hub, folder: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "models--me--x"
    snapshot = cache / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    (cache / "blobs" / "1").write_bytes(b"{}")
    (snapshot / "config.json").symlink_to("../../blobs/1")
    run(str(snapshot), "me/new")
    assert held(hub, "me/new") == {"config.json": b"{}"}


@pytest.mark.parametrize("name", ["step_10/COMMITTED", "dcp/.metadata", "__0_0.distcp"])
def test_a_checkpoint_is_to_be_converted_first(hub: Hub, folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"x")
    said = run(str(folder), "me/new", code=2).stderr
    assert "overland convert" in said
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

    assert "nowhere is not a folder" in says("nowhere", "me/new")
    assert "contains no files" in says("empty", "me/new")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE is set" in says(str(folder), "me/new")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_TOKEN", "hf_some-other-token")
    assert "rejected the token in HF_TOKEN" in says(str(folder), "me/new")
    monkeypatch.delenv("HF_TOKEN")
    assert "HF_TOKEN is not set" in says(str(folder), "me/new")
    assert hub.repos == {}
