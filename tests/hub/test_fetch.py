"""`overland fetch`: what is chosen, resumed, verified and reported."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import signal
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from overland.apps.hub import download as downloading
from overland.apps.hub import fetch as fetching
from overland.apps.hub.snapshot import HubFile
from overland.cli.main import app
from overland.config.load import load_config
from overland.data.sources import open_source
from tests.cli.processes import overland, start_overland
from tests.hub.server import TOKEN, Hub
from tests.waiting import wait_until

MODEL = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{ }",
    "model-00001-of-00002.safetensors": b"a" * 40_000,
    "model-00002-of-00002.safetensors": b"b" * 30_000,
    "model.safetensors.index.json": b'{"weight_map": {}}',
    "pytorch_model-00001-of-00001.bin": b"c" * 1000,
    "pytorch_model.bin.index.json": b"{}",
    "consolidated.safetensors": b"d" * 1000,
    "original/consolidated.00.pth": b"e" * 1000,
    "original/tokenizer.model": b"sp",
    "tf_model.h5": b"f" * 1000,
}
README = b"""---
configs:
- config_name: en
  data_files:
  - split: train
    path: en/train-*.jsonl
  - split: validation
    path: en/valid.jsonl
- config_name: fr
  data_files: fr/*.jsonl
---
"""
DATASET = {
    "README.md": README,
    "en/train-00000.jsonl": b'{"text": "one"}\n{"text": "two"}\n',
    "en/valid.jsonl": b'{"text": "three"}\n',
    "fr/train.jsonl": b'{"text": "un"}\n',
}


def run(*words: str, code: int = 0) -> Result:
    done = CliRunner().invoke(app, ["fetch", *words])
    assert done.exit_code == code, f"{done.output}\n{done.exception}"
    return done


def refused(*words: str) -> str:
    """The one line of an error."""
    (said,) = run(*words, code=2).stderr.splitlines()
    assert TOKEN not in said
    return said


def files_in(folder: Path) -> set[str]:
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in found if path.parts[0] != ".overland"}


# what is chosen, and where it goes


def test_a_model_comes_once_and_in_safetensors(hub: Hub) -> None:
    hub.add("me/llama", MODEL)
    run("model", "me/llama", "--to", "there")
    assert files_in(Path("there")) == {
        "config.json", "tokenizer.json", "tokenizer_config.json", "original/tokenizer.model",
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    }  # fmt: skip
    for name in files_in(Path("there")):
        assert (Path("there") / name).read_bytes() == MODEL[name]


def test_without_safetensors_the_next_best_weights_come(hub: Hub) -> None:
    hub.add("me/old", {"config.json": b"{}", "pytorch_model.bin": b"x" * 10, "tf_model.h5": b"y"})
    run("model", "me/old", "--to", "there")
    assert files_in(Path("there")) == {"config.json", "pytorch_model.bin"}


def test_include_says_otherwise(hub: Hub) -> None:
    hub.add("me/llama", MODEL)
    run("model", "me/llama", "--to", "there", "--include", "original/", "--include", "*.h5")
    wanted = {"original/consolidated.00.pth", "original/tokenizer.model", "tf_model.h5"}
    assert files_in(Path("there")) == wanted


def test_a_tokenizer_is_small(hub: Hub) -> None:
    hub.add("me/llama", MODEL)
    run("tokenizer", "me/llama", "--to", "there")
    assert files_in(Path("there")) == {
        "config.json", "tokenizer.json", "tokenizer_config.json", "original/tokenizer.model",
    }  # fmt: skip


def test_a_subset_comes_with_all_its_splits_and_can_be_read(hub: Hub) -> None:
    hub.add("me/texts", DATASET, "dataset")
    said = run("dataset", "me/texts", "--subset", "en", "--to", "there").stdout
    assert files_in(Path("there")) == {"README.md", "en/train-00000.jsonl", "en/valid.jsonl"}
    lines = tomllib.loads(said.partition("In a config:")[2])
    settings = lines["data"]["sources"]["texts"]
    source = open_source(settings["path"], subset=settings["subset"])
    assert sum(1 for chunk in source.chunks() for _ in source.read(chunk)) == 2


def test_a_subset_may_be_a_folder(hub: Hub) -> None:
    hub.add("me/texts", {"a/x.jsonl": b"1", "b/y.jsonl": b"2"}, "dataset")
    run("dataset", "me/texts", "--subset", "b", "--to", "there")
    assert files_in(Path("there")) == {"b/y.jsonl"}


def test_lines_to_paste_are_a_config(hub: Hub) -> None:
    hub.add("me/llama", MODEL)
    said = run("model", "me/llama", "--to", 'a "b').stdout
    lines = said.partition("In a config:")[2]
    assert tomllib.loads(lines) == {"model": {"from": 'a "b'}}
    Path("run.toml").write_text(lines)
    config = load_config("run.toml", [], env={}).config
    assert config.model.config == config.checkpoint.initial_load_path == 'a "b'


def test_lines_for_metas_own_files_leave_the_architecture_to_the_config(hub: Hub) -> None:
    hub.add(
        "me/llama", {"consolidated.00.pth": b"x", "params.json": b"{}", "tokenizer.model": b"x"}
    )
    said = run("model", "me/llama", "--to", "there").stdout
    assert tomllib.loads(said.partition("In a config:")[2]) == {
        "model": {"hf_assets_path": "there"},
        "checkpoint": {"initial_load_path": "there"},
    }


def test_below_scratch_every_repository_has_a_folder_of_its_own(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SCRATCH_ROOT", str(tmp_path / "scratch"))
    hub.add("me/llama", MODEL)
    hub.add("me/texts", DATASET, "dataset")
    for words in (["model", "me/llama"], ["tokenizer", "me/llama"], ["dataset", "me/texts"]):
        run(*words)
    assert sorted(one.relative_to("scratch").as_posix() for one in Path("scratch").glob("*/*")) == [
        "data_cache/me___texts", "models_cache/me___llama", "tokenizers_cache/me___llama",
    ]  # fmt: skip


def test_without_scratch_it_goes_where_configs_look(hub: Hub) -> None:
    hub.add("me/llama", MODEL)
    hub.add("me/texts", DATASET, "dataset")
    run("tokenizer", "me/llama")
    run("model", "me/llama")
    run("dataset", "me/texts")
    assert Path("assets/hf/llama/model-00001-of-00002.safetensors").is_file()
    assert Path("data/texts/fr/train.jsonl").is_file()


# going on


def test_a_dropped_connection_goes_on_where_it_was(hub: Hub) -> None:
    hub.add("me/llama", MODEL)
    name = "model-00001-of-00002.safetensors"
    hub.cut[name] = [15_000, 10_000]
    run("model", "me/llama", "--to", "there")
    assert (Path("there") / name).read_bytes() == MODEL[name]
    starts = [one.headers["Range"] for one in hub.gets(name) if "/cdn/" in one.path]
    assert starts == ["bytes=0-39999", "bytes=15000-39999", "bytes=25000-39999"]


def test_a_killed_fetch_goes_on_in_the_middle_of_a_file(hub: Hub, tmp_path: Path) -> None:
    repo = hub.add("me/llama", MODEL)
    first = repo.refs["main"]
    name = "model-00001-of-00002.safetensors"
    hub.hold[name] = 15_000
    words = ["fetch", "model", "me/llama", "--to", "there"]
    process = start_overland(*words, cwd=tmp_path, HF_ENDPOINT=hub.url)
    partial = tmp_path / "there" / ".overland" / "partial"

    def has_come() -> bool:
        try:
            sizes = [path.stat().st_size for path in partial.glob("*")]
        except FileNotFoundError:  # one has just become whole, and was moved
            return False
        others = (tmp_path / "there" / "model-00002-of-00002.safetensors").is_file()
        return sizes == [15_000] and others

    wait_until(has_come)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "there" / name).exists()

    repo.commit({**MODEL, "config.json": b'{"newer": 1}'})  # what main is now does not matter
    hub.requests.clear()
    overland(*words, cwd=tmp_path, HF_ENDPOINT=hub.url)
    assert (tmp_path / "there" / name).read_bytes() == MODEL[name]
    starts = [one.headers["Range"] for one in hub.gets(name) if "/cdn/" in one.path]
    assert starts == ["bytes=15000-39999"]
    assert hub.gets("model-00002-of-00002.safetensors") == []
    assert (tmp_path / "there" / "config.json").read_bytes() == MODEL["config.json"]
    assert json.loads((tmp_path / "there/.overland/snapshot.json").read_text())["commit"] == first
    assert not partial.exists()


def test_a_large_file_is_asked_for_in_pieces(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("me/llama", MODEL)
    monkeypatch.setattr(downloading, "PIECE", 15_000)
    name = "model-00001-of-00002.safetensors"
    run("model", "me/llama", "--to", "there")
    assert (Path("there") / name).read_bytes() == MODEL[name]
    starts = [one.headers["Range"] for one in hub.gets(name) if "/cdn/" in one.path]
    assert starts == ["bytes=0-14999", "bytes=15000-29999", "bytes=30000-39999"]


def test_a_server_without_ranges_sends_the_whole_again(hub: Hub) -> None:
    hub.add("me/llama", MODEL)
    hub.no_ranges = True
    name = "model-00001-of-00002.safetensors"
    hub.cut[name] = [15_000]
    done = json.loads(run("model", "me/llama", "--to", "there", "--json").stdout)
    assert name in done["fetched"]
    assert (Path("there") / name).read_bytes() == MODEL[name]
    assert len([one for one in hub.gets(name) if "/cdn/" in one.path]) == 2


def test_a_part_that_was_damaged_on_disk_is_not_built_upon(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("me/llama", MODEL)
    monkeypatch.setattr(downloading, "WAIT", 0.0)
    name = "model-00001-of-00002.safetensors"
    hub.cut[name] = [15_000, *[0] * downloading.ATTEMPTS]
    words = ["model", "me/llama", "--to", "there", "--include", name]
    assert f"cannot connect to {hub.url}" in refused(*words)
    (part,) = Path("there/.overland/partial").iterdir()
    assert part.read_bytes() == MODEL[name][:15_000]
    part.write_bytes(b"X" * 15_000)
    hub.cut.clear()
    run(*words)
    assert (Path("there") / name).read_bytes() == MODEL[name]


def test_two_equal_files_come_to_their_own_places(hub: Hub) -> None:
    same = {f"{number}/part.bin": b"same" * 1000 for number in range(20)}
    hub.add("me/texts", same, "dataset")
    run("dataset", "me/texts", "--to", "there")
    assert files_in(Path("there")) == set(same)


def test_a_server_that_is_busy_is_asked_again(hub: Hub) -> None:
    hub.add("me/llama", MODEL)
    hub.fail["config.json"] = [503, 429]
    run("model", "me/llama", "--to", "there")
    assert (Path("there") / "config.json").read_bytes() == MODEL["config.json"]


def test_two_fetches_do_not_write_into_one_folder(hub: Hub) -> None:
    hub.add("me/llama", MODEL)
    with fetching.only_one(Path("there")):
        assert "another fetch is running in there" in refused("model", "me/llama", "--to", "there")


def test_a_file_system_without_locks_is_no_obstacle(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("me/llama", MODEL)

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fetching.fcntl, "flock", no_locks)
    run("model", "me/llama", "--to", "there")
    assert Path("there/config.json").is_file()


# verified


def test_a_file_that_comes_damaged_comes_again(hub: Hub) -> None:
    hub.add("me/llama", MODEL)
    hub.corrupt = {"model-00001-of-00002.safetensors": 1, "config.json": 1}
    run("model", "me/llama", "--to", "there")
    for name in hub.corrupt:
        assert (Path("there") / name).read_bytes() == MODEL[name]


def test_a_file_that_stays_damaged_never_gets_its_name(hub: Hub) -> None:
    hub.add("me/llama", MODEL)
    name = "model-00001-of-00002.safetensors"
    hub.corrupt = {name: 100}
    said = refused("model", "me/llama", "--to", "there")
    assert f"{name} was downloaded twice and does not match its hash at {hub.url}" in said
    assert not (Path("there") / name).exists()
    assert "missing" in run("model", "me/llama", "--to", "there", "--verify", code=1).stderr


def test_verify_needs_no_network_and_names_each_file(hub: Hub) -> None:
    hub.add("me/llama", MODEL)
    run("model", "me/llama", "--to", "there")
    hub.close()
    assert "every file matches" in run("model", "me/llama", "--to", "there", "--verify").stdout
    assert "there contains main, commit" in refused(
        "model", "me/llama", "--to", "there", "--verify", "--revision", "v2"
    )
    weights = Path("there/model-00001-of-00002.safetensors")
    weights.write_bytes(MODEL[weights.name][:-1] + b"X")  # the same size
    Path("there/config.json").unlink()
    said = run("model", "me/llama", "--to", "there", "--verify", code=1).stderr
    assert f"damaged: {weights}" in said
    assert "missing: there/config.json" in said
    told = run("model", "me/llama", "--to", "there", "--verify", "--json", code=1).stdout
    assert json.loads(told)["problems"] == {weights.name: "damaged", "config.json": "missing"}


def test_a_later_fetch_mends_what_is_damaged_and_keeps_the_rest(hub: Hub) -> None:
    hub.add("me/llama", MODEL)
    run("model", "me/llama", "--to", "there")
    Path("there/config.json").write_bytes(b"X" * len(MODEL["config.json"]))
    hub.requests.clear()
    done = json.loads(run("model", "me/llama", "--to", "there", "--json").stdout)
    assert done["mended"] == done["fetched"] == ["config.json"]
    assert Path("there/config.json").read_bytes() == MODEL["config.json"]
    assert len(hub.requests) == 1


def test_a_whole_folder_is_fetched_again_without_a_network(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("me/llama", MODEL)
    run("model", "me/llama", "--to", "there")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.requests.clear()
    assert "0 fetched, 7 already here" in run("model", "me/llama", "--to", "there").stdout
    assert hub.requests == []


@pytest.mark.parametrize(
    ("more", "stored"),
    [
        ((), {"subset": None}),
        (("--subset", "en"), {"subset": "en"}),
        (("--subset", "en"), {"subset": None, "subsets": ["en"]}),
    ],
)
def test_a_folder_whose_list_has_a_subset_is_fetched_again_without_a_network(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], stored: dict[str, Any]
) -> None:
    """As before several subsets were fetched at once."""
    hub.add("me/texts", DATASET, "dataset")
    run("dataset", "me/texts", *more, "--to", "there")
    path = Path("there/.overland/snapshot.json")
    tree = json.loads(path.read_text())
    tree["requests"] = [{"kind": "dataset", "include": [], **stored}]
    path.write_text(json.dumps(tree))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "0 fetched" in run("dataset", "me/texts", *more, "--to", "there").stdout


def test_files_that_lie_there_already_are_taken_if_they_are_right(hub: Hub) -> None:
    """As after a download by other means."""
    hub.add("me/llama", MODEL)
    Path("there").mkdir()
    Path("there/model-00001-of-00002.safetensors").write_bytes(b"a" * 40_000)
    Path("there/config.json").write_bytes(b"wrong")
    run("model", "me/llama", "--to", "there")
    assert hub.gets("model-00001-of-00002.safetensors") == []
    assert Path("there/config.json").read_bytes() == MODEL["config.json"]


def test_a_folder_stays_at_its_commit(hub: Hub) -> None:
    repo = hub.add("me/llama", MODEL)
    run("tokenizer", "me/llama", "--to", "there")
    first = repo.refs["main"]
    repo.commit({**MODEL, "tokenizer.json": b"{new}"})
    repo.refs["next"] = repo.refs["main"]
    run("model", "me/llama", "--to", "there")  # more files, of the same commit
    assert Path("there/tokenizer.json").read_bytes() == b"{}"
    said = refused("model", "me/llama", "--to", "there", "--revision", "next")
    assert f"there contains commit {first[:12]}" in said
    run("model", "me/llama", "--to", "other", "--revision", "next")
    assert Path("other/tokenizer.json").read_bytes() == b"{new}"
    run("model", "me/llama", "--to", "there", "--revision", first)


def test_files_that_come_later_join_the_list(hub: Hub) -> None:
    hub.add("me/llama", MODEL)
    for name in ("config.json", "tokenizer.json"):
        run("model", "me/llama", "--to", "there", "--include", name)
    for name in ("config.json", "tokenizer.json"):
        (Path("there") / name).unlink()
    said = run("model", "me/llama", "--to", "there", "--verify", code=1).stderr
    assert "config.json" in said
    assert "tokenizer.json" in said


def test_a_damaged_list_is_said(hub: Hub) -> None:
    hub.add("me/llama", MODEL)
    for text in ("{", "[]", '{"version": 1}', '{"version": 1, "files": {"a": 1}}'):
        Path("there/.overland").mkdir(parents=True, exist_ok=True)
        Path("there/.overland/snapshot.json").write_text(text)
        assert "snapshot.json is damaged" in refused("model", "me/llama", "--to", "there")


def test_a_folder_holds_one_repository(hub: Hub) -> None:
    hub.add("me/llama", MODEL)
    hub.add("you/llama", MODEL)
    run("model", "me/llama")
    assert "contains the model me/llama" in refused("model", "you/llama")


def test_a_name_that_leads_out_of_the_folder_is_refused(hub: Hub) -> None:
    names = ("../evil.txt", "/evil.txt", ".overland/snapshot.json", ".Overland/lock")
    for name in (*names, "a/../../evil", "a//b", "./a", "a\nb", "a\x1b[2J", "a\\b"):
        hub.add("me/evil", {name: b"x"}, "dataset")
        assert "is not allowed" in refused("dataset", "me/evil", "--to", "there")
    assert not Path("evil.txt").exists()
    assert not Path("there").exists()


WEIGHTS = "model-00001-of-00002.safetensors"


@pytest.mark.parametrize(
    ("file", "claim"),
    [
        (WEIGHTS, {"lfs": {"oid": "../../../../evil", "size": 40_000, "pointerSize": 1}}),
        (WEIGHTS, {"lfs": {"oid": "/" + "a" * 63, "size": 40_000, "pointerSize": 1}}),
        (WEIGHTS, {"lfs": {"oid": "a" * 64 + "\n", "size": 40_000, "pointerSize": 1}}),
        (WEIGHTS, {"lfs": {"oid": "a" * 40, "size": 40_000, "pointerSize": 1}}),
        (WEIGHTS, {"lfs": {"oid": "a" * 64, "size": -1, "pointerSize": 1}}),
        (WEIGHTS, {"lfs": {"oid": "a" * 64, "size": 2**80, "pointerSize": 1}}),
        (WEIGHTS, {"lfs": {"oid": "a" * 64, "size": "1", "pointerSize": 1}}),
        (WEIGHTS, {"lfs": {}}),
        ("config.json", {"oid": "../../../../evil"}),
        ("config.json", {"oid": "a" * 39}),
        ("config.json", {"oid": None}),
        ("config.json", {"size": None}),
        ("config.json", {"size": -5}),
    ],
)
def test_what_a_hub_claims_must_be_possible(hub: Hub, file: str, claim: dict[str, object]) -> None:
    hub.add("me/llama", MODEL)
    hub.claims[file] = claim
    before = set(Path.cwd().parent.rglob("*"))
    assert "did not respond like a Hub about me/llama" in refused("model", "me/llama")
    assert set(Path.cwd().parent.rglob("*")) == before


def test_a_list_that_never_ends_is_not_followed(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same files again and again, and with new ones."""
    commit = hub.add("me/llama", MODEL).refs["main"]
    tree = f"{hub.url}/api/models/me/llama/tree/{commit}"
    hub.list_goes_on = lambda number: f"{tree}?cursor=0&number={number}"
    assert "does not end" in refused("model", "me/llama")
    assert len(hub.requests) < 10
    hub.add("me/many", {f"{i}.txt": b"x" for i in range(100)})
    monkeypatch.setattr("overland.apps.hub.repo.MOST_PAGES", 5)
    hub.list_goes_on = None
    hub.requests.clear()
    assert "does not end" in refused("model", "me/many")
    assert len(hub.requests) < 10
    monkeypatch.setattr("overland.apps.hub.repo.LARGEST_PAGE", 100)
    assert "does not finish its list" in refused("model", "me/many")


def test_a_list_does_not_carry_the_token_to_another_host(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.add("me/llama", MODEL)
    hub.list_goes_on = lambda number: f"{hub.content_url}/stolen/{number}"
    assert "on another host" in refused("model", "me/llama")
    assert not any("stolen" in one.path for one in hub.requests)


@pytest.mark.parametrize("answer", [{"x": 1}, [1], [{"path": "a"}], "text", None, 7])
@pytest.mark.parametrize("about", ["/me/llama", "/tree"])
def test_answers_of_another_shape_are_one_sentence(hub: Hub, answer: Any, about: str) -> None:
    repo = hub.add("me/llama", MODEL)
    hub.answers = {f"/tree/{repo.refs['main']}" if about == "/tree" else about: answer}
    assert "did not respond like a Hub about me/llama" in refused("model", "me/llama")


def test_no_byte_is_written_past_the_announced_size(hub: Hub) -> None:
    for ranges in (True, False):
        hub.add("me/llama", MODEL)
        hub.no_ranges = not ranges
        hub.endless = {WEIGHTS}
        run("model", "me/llama", "--to", f"there-{ranges}")
        assert (Path(f"there-{ranges}") / WEIGHTS).read_bytes() == MODEL[WEIGHTS]


def test_a_list_that_came_with_a_folder_is_no_more_trusted_than_a_hub(hub: Hub) -> None:
    hub.add("me/llama", MODEL)
    run("model", "me/llama", "--to", "there")
    listed = Path("there/.overland/snapshot.json")
    tree = json.loads(listed.read_text())
    for change in (
        {"files": {"config.json": [23, "sha256:../../../evil"]}},
        {"files": {"config.json": [-1, "git:" + "a" * 40]}},
        {"commit": "../../x"},
    ):
        listed.write_text(json.dumps(tree | change))
        assert "is damaged" in refused("model", "me/llama", "--to", "there")


def test_a_repository_that_names_blobs_by_sha256_is_checked_by_it(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"hello")
    digest = hashlib.sha256(b"blob 5\0hello").hexdigest()
    assert HubFile(5, f"git:{digest}").problem(tmp_path / "a") is None
    assert HubFile(5, f"git:{digest[::-1]}").problem(tmp_path / "a") == "damaged"


# told


def test_what_is_not_there_is_said_and_leaves_nothing(hub: Hub) -> None:
    hub.add("me/llama", MODEL)
    hub.add("me/texts", DATASET, "dataset")
    assert f"there is no model me/lama at {hub.url}, or it is private" in refused(
        "model", "me/lama"
    )
    assert "has no revision 'v2'; it has main" in refused("model", "me/llama", "--revision", "v2")
    said = refused("model", "me/llama", "--include", "*.gguf")
    assert "--include '*.gguf' matches none of the 12 files in me/llama" in said
    said = refused("dataset", "me/texts", "--subset", "eng")
    assert "me/texts has no subset 'eng'; did you mean 'en'?; it has en, fr" in said
    assert "is not a valid repository name" in refused("model", "a/b/c")
    assert "--subset is for datasets" in refused("model", "me/llama", "--subset", "en")
    assert "nothing to verify" in refused("model", "me/llama", "--verify")
    assert os.listdir() in ([], ["hf_home"])


@pytest.mark.parametrize("token", ["", TOKEN])
def test_a_gated_model_names_its_page_and_the_variable(
    hub: Hub, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("me/llama", MODEL, gated=True)
    monkeypatch.setenv("HF_TOKEN", token)
    said = refused("model", "me/llama", "--to", "there")
    assert f"{hub.url}/me/llama" in said
    assert "HF_TOKEN" in said


def test_a_private_model_needs_the_token_of_the_environment(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("me/secret", MODEL, private=True)
    (tmp_path / "hf_home").mkdir()
    (tmp_path / "hf_home" / "token").write_text(TOKEN)  # a login's, which is not ours to use
    assert "HF_TOKEN is not set" in refused("model", "me/secret")
    sent = {name.lower() for one in hub.requests for name in one.headers}
    assert "range" not in sent
    assert "authorization" not in sent
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    said = run("model", "me/secret", "--to", "there")
    assert TOKEN not in said.output
    assert not any(TOKEN.encode() in path.read_bytes() for path in Path("there").rglob("*.json"))
    monkeypatch.setenv("HF_TOKEN", "hf_some-other-token")
    said = refused("model", "me/secret", "--to", "other")
    assert "rejected the token in HF_TOKEN" in said
    assert "hf_some-other-token" not in said


def test_no_network_and_no_leave_to_use_it(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE is set" in refused("model", "me/llama")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    hub.portal = True
    assert "did not respond like a Hub" in refused("model", "me/llama")
    hub.close()
    assert f"cannot connect to {hub.url}" in refused("model", "me/llama")


def test_a_disk_that_is_too_small_is_said_before_the_first_byte(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("me/llama", MODEL)
    small = SimpleNamespace(free=50_000)
    monkeypatch.setattr(fetching.shutil, "disk_usage", lambda path: small)
    assert "there has only 50.0 kB free: free some space" in refused(
        "model", "me/llama", "--to", "there"
    )
    assert hub.gets("config.json") == []


def test_a_disk_that_fills_up_is_said_and_what_came_is_kept(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("me/llama", MODEL | {"model-00001-of-00002.safetensors": bytes(50_000_000)})

    def full(path: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", full)
    monkeypatch.setattr(fetching, "write_snapshot", lambda folder, snapshot: None)
    assert "is full; downloaded data is kept" in refused("model", "me/llama", "--to", "there")


def test_lines_elsewhere_than_on_a_terminal_are_few(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("me/llama", MODEL)
    assert run("model", "me/llama", "--to", "there").stderr == ""  # one every ten seconds
    monkeypatch.setattr("overland.apps.progress.LINE_SECONDS", 0)
    said = run("model", "me/llama", "--to", "again").stderr.splitlines()
    assert re.fullmatch(r"fetching: [\d.]+ of [\d.]+ MB", said[-1])
    assert all(line.startswith(("checking: ", "fetching: ")) for line in said)


def test_help_needs_neither_torch_nor_the_client(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys, overland.cli.main;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'huggingface_hub', 'httpx')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
