"""The test server is realistic enough: huggingface_hub's own functions work with it, with Xet
enabled."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from tests.hub.server import TOKEN, Hub

FILES = {"config.json": b"{}", "model.safetensors": b"w" * 5000, "a/b/c.txt": b"deep", "e.txt": b""}


def test_the_clients_own_snapshot_comes_whole(hub: Hub, tmp_path: Path) -> None:
    hub.add("me/tiny", FILES)
    snapshot_download("me/tiny", local_dir=tmp_path / "there", endpoint=hub.url, token=False)
    for name, data in FILES.items():
        assert (tmp_path / "there" / name).read_bytes() == data
    assert any(one.method == "HEAD" for one in hub.requests)


def test_the_clients_own_upload_arrives(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This client sends by Xet whenever hf_xet is installed, without asking the server.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").write_bytes(b"w" * 3000)
    (tmp_path / "out" / "README.md").write_text("---\nlicense: mit\n---\n")
    api = HfApi(endpoint=hub.url, token=TOKEN)
    api.create_repo("me/new")
    api.upload_folder(repo_id="me/new", folder_path=tmp_path / "out")
    repo = hub.repos["model", "me/new"]
    assert repo.commits[repo.refs["main"]]["model.safetensors"] == b"w" * 3000


def test_strangers_are_told_what_the_hub_tells_them(hub: Hub, tmp_path: Path) -> None:
    hub.add("me/gated", FILES, gated=True)
    hub.add("me/private", FILES, private=True)
    with pytest.raises(GatedRepoError):
        snapshot_download("me/gated", local_dir=tmp_path / "g", endpoint=hub.url, token=False)
    with pytest.raises(RepositoryNotFoundError):
        snapshot_download("me/private", local_dir=tmp_path / "p", endpoint=hub.url, token=False)
