"""Saving while training continues: what is kept, what is reported, and what waits for what."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from overland.apps.proofs.checkpoint import verify
from overland.apps.proofs.pool import RankPool
from overland.checkpoint import write
from overland.checkpoint.folder import list_checkpoints
from overland.checkpoint.format import marker
from overland.checkpoint.plan import PackedTensor
from overland.checkpoint.read import fill, open_checkpoint
from overland.checkpoint.store import Store
from overland.config.schema import Checkpoint as Settings
from overland.errors import CheckpointError
from overland.files import Disk, reserve
from overland.kernels.bfloat16 import join, split
from overland.run_folder import LATEST
from overland.world import World
from overland.world.heartbeat import Heartbeat, Transfer, read_signs
from tests.checkpoint.states import FullDisk, like, load, save, some_state


class SlowDisk(Disk):
    """Holds every write until it is let go."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.writing = threading.Event()

    def write_at(self, descriptor: int, data: memoryview, offset: int, path: Path) -> None:
        self.writing.set()
        assert self.go_on.wait(60)
        super().write_at(descriptor, data, offset, path)


def loads_as(folder: Path, step: int, state: dict[str, torch.Tensor] | None = None) -> None:
    got = like(state or some_state(step))
    load(folder / f"step_{step}", got)
    for name, tensor in (state or some_state(step)).items():
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("mode", ["async", "disabled"])
@pytest.mark.parametrize("kind", ["shard", "full", "local"])
def test_what_was_saved_is_loaded(tmp_path: Path, kind: str, mode: str) -> None:
    save(tmp_path, 3, type=kind, async_mode=mode)
    if kind != "local":
        loads_as(tmp_path, 3)
    assert verify(tmp_path / "step_3") == []
    assert os.readlink(tmp_path / LATEST) == "step_3"


def test_files_are_plain_safetensors(tmp_path: Path) -> None:
    save(tmp_path, 3)
    tensors = load_file(tmp_path / "step_3" / "rank_00000.safetensors")
    expected = {name: tensor for name, tensor in some_state(3).items() if tensor.numel()}
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


def test_the_state_may_change_while_a_save_is_written(tmp_path: Path) -> None:
    disk, state = SlowDisk(), some_state(5)
    store = Store(tmp_path, Settings(), disk=disk)
    store.save(5, state, {"progress": {"step": 5}})
    assert disk.writing.wait(60)
    store.wait_on_device()
    for tensor in state.values():  # the next update
        tensor.fill_(1)
    assert store.poll() == []
    disk.go_on.set()
    (outcome,) = store.finish()
    assert not outcome.error
    loads_as(tmp_path, 5)
    store.close()


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    disk = SlowDisk()
    store = Store(tmp_path, Settings(), disk=disk)
    store.save(1, some_state(1), {})
    second = threading.Thread(target=store.save, args=(2, some_state(2), {}))
    second.start()
    second.join(0.3)
    assert second.is_alive()
    assert not (tmp_path / ".step_2.tmp").exists()
    disk.go_on.set()
    second.join()
    assert [outcome.path.name for outcome in store.finish()] == ["step_1", "step_2"]
    loads_as(tmp_path, 2)
    store.close()


@pytest.mark.parametrize(
    "settings",
    [{"async_mode": "async"}, {"async_mode": "disabled"}, {"type": "full"}],
    ids=["async", "sync", "full"],
)
def test_a_full_disk_is_told_and_destroys_nothing(tmp_path: Path, settings: dict[str, Any]) -> None:
    save(tmp_path, 1, keep_latest_k=1)
    size = sum(path.stat().st_size for path in (tmp_path / "step_1").iterdir())
    for room in (0, 1000, size - 10_000, size - 100):
        outcome = save(tmp_path, 2, FullDisk(room), keep_latest_k=1, **settings)
        assert os.strerror(errno.ENOSPC) in outcome.error
        loads_as(tmp_path, 1)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_1"]
    assert not save(tmp_path, 2, keep_latest_k=1).error
    assert [found.step for found in list_checkpoints(tmp_path)] == [2]


def test_the_systems_own_limit_is_told(tmp_path: Path) -> None:
    """A real refusal of the kernel's, in a process that may not write large files."""
    save(tmp_path, 1)
    program = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from tests.checkpoint.states import save\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "print(save(Path(sys.argv[1]), 2).error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert os.strerror(errno.EFBIG) in done.stdout
    loads_as(tmp_path, 1)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"keep_latest_k": 2}, [9, 10]),
        ({"keep_latest_k": 0}, list(range(1, 11))),
        ({"keep_latest_k": 1, "keep_every": 4}, [4, 8, 10]),
        ({"keep_latest_k": 1, "keep_best": 2}, [3, 7, 10]),
        ({"keep_latest_k": 2, "keep_every": 5, "keep_best": 1}, [3, 5, 9, 10]),
    ],
)
def test_what_is_kept(tmp_path: Path, settings: dict[str, Any], kept: list[int]) -> None:
    losses = {3: 0.5, 7: 0.7}
    store = Store(tmp_path, Settings.model_validate(settings))
    for step in range(1, 11):
        store.save(step, {"x": torch.ones(3)}, {}, measured=(losses.get(step, 2.0 + step), ""))
    assert not any(outcome.error for outcome in store.finish())
    assert [found.step for found in list_checkpoints(tmp_path)] == kept
    assert sorted(tmp_path.glob(".step*")) == []
    store.close()


class StubbornDisk(Disk):
    """Lets nothing be removed."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def remove(self, path: Path) -> None:
        raise self.error


@pytest.mark.parametrize(
    "error", [PermissionError(errno.EACCES, "Permission denied", "step_1"), ValueError("odd")]
)
def test_an_old_checkpoint_that_cannot_be_deleted_does_not_spoil_the_new_one(
    tmp_path: Path, error: Exception
) -> None:
    save(tmp_path, 1, keep_latest_k=1)
    outcome = save(tmp_path, 2, StubbornDisk(error), keep_latest_k=1)
    assert not outcome.error
    assert outcome.note.endswith(("step_1: Permission denied", "odd"))
    loads_as(tmp_path, 2)
    assert os.readlink(tmp_path / LATEST) == "step_2"


def test_what_a_killed_session_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for name in (".step_2.tmp", ".step_0.deleted", "mine", "step_7"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("something")
    save(tmp_path, 3)
    (tmp_path / "step_3" / "COMMITTED").unlink()  # a deletion that was cut off
    save(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest", "mine", "step_1", "step_2", "step_7",
    ]  # fmt: skip


def test_saving_a_step_again_keeps_the_earlier_one_aside(tmp_path: Path) -> None:
    save(tmp_path, 1)
    before = (tmp_path / "step_1" / "index.json").read_bytes()
    save(tmp_path, 1)
    assert (tmp_path / "step_1.set-aside" / "index.json").read_bytes() == before
    loads_as(tmp_path, 1)


def test_a_tensor_in_another_form_is_saved_as_what_it_stands_for(tmp_path: Path) -> None:
    whole = torch.randn(40, 30)
    packed = PackedTensor(whole, torch.float32, split(whole), join)
    for mode in ("async", "disabled"):
        store = Store(tmp_path / mode, Settings.model_validate({"async_mode": mode}))
        store.save(1, {"x": packed}, {})
        assert not store.finish()[0].error
        loads_as(tmp_path / mode, 1, {"x": whole})
        store.close()


def test_without_memory_for_a_copy_training_waits_and_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("overland.checkpoint.snapshot.available_memory", lambda: 1000.0)
    store = Store(tmp_path, Settings())
    store.save(1, some_state(1), {"progress": {"step": 1}})
    (outcome,) = store.poll()
    assert not outcome.error
    assert "training will wait while checkpoints are written" in store.notes[0]
    loads_as(tmp_path, 1)


def test_a_system_that_refuses_the_memory_is_worked_around(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr("overland.checkpoint.snapshot.mmap.mmap", refuse)
    store = Store(tmp_path, Settings())
    store.save(1, some_state(1), {"progress": {"step": 1}})
    assert not store.is_async
    assert not store.poll()[0].error
    loads_as(tmp_path, 1)


def ways_of_saving(world: World, folder: Path) -> bool:
    """Rank 0, which writes all of this state, has no memory for a copy."""
    import overland.checkpoint.snapshot as snapshot

    kept = snapshot.available_memory
    if world.rank == 0:
        snapshot.available_memory = lambda: 1000.0
    try:
        store = Store(folder, Settings())
        store.prepare(some_state(1))
        return store.is_async
    finally:
        snapshot.available_memory = kept


def test_ranks_agree_on_whether_training_waits(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, ways_of_saving, tmp_path) == [False, False]


class HangingDisk(SlowDisk):
    """Hangs when it first writes numbers, until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.has_written = threading.Event()

    def write_at(self, descriptor: int, data: memoryview, offset: int, path: Path) -> None:
        if offset and not self.writing.is_set():
            super().write_at(descriptor, data, offset, path)
            self.has_written.set()
        else:
            Disk.write_at(self, descriptor, data, offset, path)


def a_save_that_hangs_on_one_rank(world: World, folder: Path) -> list[str]:
    """Rank 1's disk hangs in the first save. It answers in the next, of the same step, and one
    more; when both are done, the first one's thread continues."""
    disk = HangingDisk() if world.rank == 1 else Disk()
    store = Store(folder, Settings(), disk=disk, stall_seconds=2.0)
    errors = []
    for attempt, step in enumerate([1, 1, 2]):
        value = 10 * attempt + world.rank
        store.save(step, {f"rank_{world.rank}": torch.full((50_000,), float(value))}, {})
        errors += [outcome.error for outcome in store.finish()]
    if isinstance(disk, HangingDisk):
        disk.go_on.set()
        assert disk.has_written.wait(60)
    store.close()
    return errors


def test_a_save_in_which_no_byte_moves_is_given_up_by_all_ranks(
    ranks: RankPool, tmp_path: Path
) -> None:
    for first, *later in ranks.run(3, a_save_that_hangs_on_one_rank, tmp_path):
        assert re.match(r"rank 1 on \S+ has neither read nor written a byte for \d+ s", first)
        assert later == ["", ""]
    assert verify(tmp_path / "step_1") == []
    got = {f"rank_{rank}": torch.empty(50_000) for rank in range(3)}
    load(tmp_path / "step_1", got)
    assert [tensor.unique().tolist() for tensor in got.values()] == [[10.0], [11.0], [12.0]]


class Crawling(Disk):
    """Takes its time for every write, but writes."""

    def write_at(self, descriptor: int, data: memoryview, offset: int, path: Path) -> None:
        time.sleep(0.1)
        super().write_at(descriptor, data, offset, path)


def test_a_slow_save_may_take_longer_than_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "PIECE", 10_000)  # about forty writes, in parts and put together
    settings = Settings.model_validate({"type": "full", "async_mode": "disabled"})
    store = Store(tmp_path, settings, disk=Crawling(), stall_seconds=2.0)
    store.save(3, some_state(3), {"progress": {"step": 3}})
    (outcome,) = store.finish()
    assert not outcome.error
    assert outcome.seconds > 3.0
    loads_as(tmp_path, 3)


def test_what_is_written_and_read_is_counted(tmp_path: Path) -> None:
    beats = tmp_path / "beats"
    beats.mkdir()
    beat = Heartbeat(0, beats)
    disk, state = SlowDisk(), {"x": torch.zeros(5_000_000)}
    store = Store(tmp_path / "saves", Settings(), disk=disk, beat=beat)
    store.save(1, state, {})
    assert disk.writing.wait(60)
    [sign] = read_signs(beats)
    assert (sign.transfer, sign.num_bytes, sign.total_bytes // 10**6) == (Transfer.MOVING, 0, 20)
    disk.go_on.set()
    store.finish()
    store.close()
    [sign] = read_signs(beats)
    assert sign.transfer is Transfer.NONE
    assert sign.num_bytes == sign.total_bytes
    beat.pulse.begin()
    with open_checkpoint(tmp_path / "saves" / "step_1", beat.pulse.moved) as checkpoint:
        fill(checkpoint, state)
    [sign] = read_signs(beats)
    assert sign.num_bytes == 20_000_000


def test_the_one_just_written_is_never_deleted(tmp_path: Path) -> None:
    for step in (6, 8, 4):  # the run went back, and its earlier steps were left there
        assert not save(tmp_path, step, keep_latest_k=2).error
    assert (tmp_path / "step_4").is_dir()
    assert os.readlink(tmp_path / LATEST) == "step_4"


def test_tensors_larger_than_a_block_are_read_in_any_slice(tmp_path: Path) -> None:
    whole = torch.arange(10_000_000, dtype=torch.int32).view(10_000, 1000)
    store = Store(tmp_path, Settings())
    store.save(1, {"x": whole}, {})
    assert not store.finish()[0].error
    store.close()
    with open_checkpoint(tmp_path / "step_1") as checkpoint:
        assert len(checkpoint.tensors["x"].parts[0].checksums) == 3
        for rows, columns in (((0, 10_000), (0, 1000)), ((4100, 4300), (0, 1000)),
                              ((9_999, 10_000), (999, 1000)), ((100, 9000), (7, 11))):  # fmt: skip
            start, shape = (rows[0], columns[0]), (rows[1] - rows[0], columns[1] - columns[0])
            expected = whole[slice(*rows), slice(*columns)]
            assert torch.equal(checkpoint.read_slice("x", start, shape), expected)


def test_damage_outside_the_slice_does_not_matter_and_inside_does(tmp_path: Path) -> None:
    whole = torch.zeros(10_000_000, dtype=torch.int32)
    store = Store(tmp_path, Settings())
    store.save(1, {"x": whole}, {})
    store.finish()
    store.close()
    file = tmp_path / "step_1" / "rank_00000.safetensors"
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size - 5)
        opened.write(b"\x01")
    with open_checkpoint(tmp_path / "step_1") as checkpoint:
        assert not checkpoint.read_slice("x", (0,), (4_000_000,)).any()
        with pytest.raises(CheckpointError, match=r"rank_00000.safetensors is damaged: bytes"):
            checkpoint.read_slice("x", (9_999_999,), (1,))


def test_an_index_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = tmp_path / "step_1"
    for name in ("../secret", "/etc/passwd", ".."):
        index = json.loads((path / "index.json").read_text())
        index["files"][0][0] = name
        text = json.dumps(index).encode()
        (path / "index.json").write_bytes(text)
        (path / "COMMITTED").write_bytes(marker(text, {"step": 1}))
        with pytest.raises(CheckpointError, match="names a file outside its folder"):
            open_checkpoint(path)


@pytest.mark.parametrize("mode", ["async", "disabled"])
@pytest.mark.parametrize("kind", ["shard", "full", "local"])
def test_a_state_that_is_not_finite_replaces_no_good_one(
    tmp_path: Path, kind: str, mode: str
) -> None:
    """It is kept under another name, nothing points at it, and it pushes nothing out."""
    settings = Settings.model_validate({"type": kind, "async_mode": mode, "keep_latest_k": 1})
    store, state = Store(tmp_path, settings), some_state(1)
    for step, value in ((1, 0.0), (2, float("nan")), (3, float("inf"))):
        state["model.long"][40_000] = value
        store.save(step, state, {"progress": {"step": step}})
    store.close()
    outcomes = store.poll()
    name = "rank_00000/model.long" if kind == "local" else "model.long"
    assert [outcome.not_finite for outcome in outcomes] == [(), (name,), (name,)]
    assert [outcome.path.name for outcome in outcomes][1:] == [
        "step_2.nonfinite", "step_3.nonfinite",
    ]  # fmt: skip
    assert not any(outcome.error for outcome in outcomes)
    assert [one.path.name for one in list_checkpoints(tmp_path)] == ["step_1"]
    assert os.readlink(tmp_path / LATEST) == "step_1"
    for outcome in outcomes:  # whole, for whoever wants to look into it
        assert verify(outcome.path) == []


def test_only_what_is_learned_must_be_finite(tmp_path: Path) -> None:
    """A mask among a model's buffers may hold infinities."""
    store, state = Store(tmp_path, Settings()), some_state(1)
    state["model.mask"] = torch.tensor([0.0, float("-inf")])
    store.save(1, state, {"progress": {"step": 1}}, tested={"model.matrix", "model.long"})
    store.close()
    assert [one.path.name for one in list_checkpoints(tmp_path)] == ["step_1"]


@pytest.mark.parametrize("mode", ["async", "disabled"])
@pytest.mark.parametrize(("number", "not_finite"), [(3.4e38, ()), (float("inf"), ("model.w",))])
def test_a_master_weight_in_two_parts_is_tested(
    tmp_path: Path, mode: str, number: float, not_finite: tuple[str, ...]
) -> None:
    """As a whole: the largest numbers of float32 are infinite in bfloat16."""
    wide = torch.ones(300)
    wide[7] = number
    upper, rest = split(wide)
    assert upper[7].isinf()
    store = Store(tmp_path, Settings.model_validate({"async_mode": mode}))
    store.save(1, {"model.w": PackedTensor(upper, torch.float32, (upper, rest), join)}, {})
    store.close()
    assert store.last is not None
    assert store.last.not_finite == not_finite


@pytest.mark.parametrize("code", [errno.EDQUOT, errno.EOPNOTSUPP])
def test_a_quota_is_named_before_the_first_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """It does not show in what the disk has free. A file system that cannot set room aside says
    nothing of a quota."""

    def refuse(path: Path, num_bytes: int) -> None:
        assert path.parent == tmp_path
        assert num_bytes >= 4_000_000
        raise OSError(code, "no")

    monkeypatch.setattr("overland.checkpoint.folder.reserve", refuse)
    store = Store(tmp_path, Settings())
    store.prepare({"model.w": torch.ones(1_000_000)})
    store.close()
    assert len(store.notes) == (code == errno.EDQUOT)
    assert all("(is there a quota?): saves will fail" in one for one in store.notes)


def test_room_is_set_aside_and_given_back(tmp_path: Path) -> None:
    with suppress(OSError):  # the file system may not be able to
        reserve(tmp_path / "some", 2**20)
    with pytest.raises(OSError, match=r"too large|No space|not supported|not implemented"):
        reserve(tmp_path / "too much", 2**62)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("room", "note"),
    [(0.9, "but a checkpoint needs"), (2.5, "lower checkpoint.keep_latest_k = 3"), (4.5, "")],
)
def test_a_disk_without_room_is_named_before_the_first_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: float, note: str
) -> None:
    """Room for so many checkpoints; three are kept, and a new one is written before one goes."""
    state = {"model.w": torch.ones(1_000_000)}
    free = int(room * 4_000_000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))
    store = Store(tmp_path / "not yet there", Settings.model_validate({"keep_latest_k": 3}))
    store.prepare(state)
    store.close()
    assert len(store.notes) == bool(note)
    assert all(note in one for one in store.notes)
