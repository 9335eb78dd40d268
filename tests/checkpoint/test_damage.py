"""Any damage to the files of a checkpoint is detected and named."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overland.apps.convert.formats.lazy import is_tiled_by
from overland.apps.proofs.checkpoint import verify
from overland.checkpoint.format import marker, parse_marker
from overland.errors import CheckpointError
from tests.checkpoint.states import copy, like, load, save, some_state

FILE = "rank_00000.safetensors"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    for step in (1, 2):
        save(folder, step)
    return folder / "step_2"


def flip_bit(path: Path, chance: random.Random) -> str:
    return _change(path / FILE, chance, lambda data, at: bytes([data[at] ^ (1 << at % 8)]))


def zero_page(path: Path, chance: random.Random) -> str:
    return _change(path / FILE, chance, lambda data, at: bytes(min(4096, len(data) - at)))


def truncate(path: Path, chance: random.Random) -> str:
    file = path / FILE
    with file.open("r+b") as opened:
        opened.truncate(chance.randint(0, file.stat().st_size - 1))
    return FILE


def extend(path: Path, chance: random.Random) -> str:
    with (path / FILE).open("ab") as file:
        file.write(bytes(chance.randint(1, 100)))
    return FILE


def stale_shard(path: Path, chance: random.Random) -> str:
    """A file of the step before, of the same name and size: old data under new metadata."""
    (path / FILE).write_bytes((path.parent / "step_1" / FILE).read_bytes())
    return FILE


def stale_index(path: Path, chance: random.Random) -> str:
    (path / "index.json").write_bytes((path.parent / "step_1" / "index.json").read_bytes())
    return "index.json"


def missing_file(path: Path, chance: random.Random) -> str:
    name = chance.choice([FILE, "index.json", "COMMITTED"])
    (path / name).unlink()
    return name


def flip_index_bit(path: Path, chance: random.Random) -> str:
    return _change(path / "index.json", chance, lambda data, at: bytes([data[at] ^ 1]))


def flip_marker_bit(path: Path, chance: random.Random) -> str:
    return _change(path / "COMMITTED", chance, lambda data, at: bytes([data[at] ^ (1 << at % 8)]))


Damage = Callable[[Path, random.Random], str]
DAMAGES: list[Damage] = [
    flip_bit, zero_page, truncate, extend, stale_shard, stale_index, missing_file, flip_index_bit,
    flip_marker_bit,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("attempt", range(12))
def test_damage_is_found_and_named(
    good: Path, tmp_path: Path, damage: Damage, attempt: int
) -> None:
    copy(good.parent, tmp_path / "copy")
    path = tmp_path / "copy" / "step_2"
    named = damage(path, random.Random(attempt))
    problems = verify(path)
    assert problems
    assert any(named in problem for problem in problems), problems
    got = like(some_state(2))
    if header_only(path, problems):  # a loader has no use for the header
        return
    with pytest.raises(CheckpointError, match=named):
        load(path, got)


def header_only(path: Path, problems: list[str]) -> bool:
    return all("its header has changed" in problem for problem in problems)


def test_every_bit_of_the_marker_counts(good: Path) -> None:
    """But for blanks, which say nothing."""
    text = (good / "COMMITTED").read_bytes()
    right = parse_marker(text)
    for at in range(len(text)):
        for bit in range(8):
            changed = text[:at] + bytes([text[at] ^ (1 << bit)]) + text[at + 1 :]
            try:
                assert parse_marker(changed) == right
                assert text[at : at + 1].isspace()
            except ValueError:
                continue


def test_every_byte_of_the_four_files_counts(tmp_path: Path) -> None:
    save(tmp_path, 1, type="full", full_format="torch")
    path = tmp_path / "step_1"
    assert verify(path) == []
    for name in ("model_state_dict.pt", "iter_state_dict.pt", "lr_state_dict.pt"):
        data = (path / name).read_bytes()
        for at in [*range(0, len(data), len(data) // 40 + 1), len(data) - 1]:
            changed = bytearray(data)
            changed[at] ^= 16
            (path / name).write_bytes(changed)
            assert any(name in problem for problem in verify(path)), at
        (path / name).write_bytes(data)


@pytest.mark.parametrize(
    ("boxes", "fills"),
    [
        ([((0, 0), (4, 4))], True),
        ([((0, 0), (2, 4)), ((2, 0), (2, 4))], True),
        ([((0, 0), (4, 1)), ((0, 1), (4, 3))], True),
        ([((0, 0), (2, 4)), ((1, 0), (2, 4))], False),
        ([((0, 0), (4, 2)), ((0, 1), (4, 2))], False),
        ([((0, 0), (3, 4)), ((2, 0), (2, 4))], False),
        ([((0, 0), (2, 4))], False),
        ([((0, 0), (2, 2)), ((0, 2), (2, 2)), ((2, 0), (2, 4)), ((4, 0), (0, 4))], True),
        ([((0, 0), (2, 2)), ((0, 2), (2, 2)), ((2, 1), (2, 4))], False),
    ],
)
def test_boxes_that_overlap_or_leave_holes_are_noticed(boxes: list[Any], fills: bool) -> None:
    assert is_tiled_by((4, 4), boxes) == fills


def test_swapped_files_are_found(tmp_path: Path, ranks: object) -> None:
    from overland.apps.proofs.pool import RankPool

    assert isinstance(ranks, RankPool)
    ranks.run(2, save_on_ranks, tmp_path)
    path = tmp_path / "step_1"
    one, two = path / "rank_00000.safetensors", path / "rank_00001.safetensors"
    data = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(data)
    problems = "\n".join(verify(path))
    assert str(one) in problems
    assert str(two) in problems


def save_on_ranks(world: object, folder: Path) -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from overland.checkpoint.store import Store
    from overland.config.schema import Checkpoint as Settings

    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(64.0).view(8, 8)
    store = Store(folder, Settings())
    store.save(1, {"matrix": distribute_tensor(whole, mesh, [Shard(0)])}, {})
    (outcome,) = store.finish()
    assert not outcome.error
    store.close()


def test_an_intact_checkpoint_has_no_problems(good: Path) -> None:
    assert verify(good) == []


def test_bytes_behind_the_marker_are_reported(good: Path, tmp_path: Path) -> None:
    copy(good.parent, tmp_path / "copy")
    marker = tmp_path / "copy" / "step_2" / "COMMITTED"
    marker.write_bytes(marker.read_bytes() + b"\n")
    assert verify(marker.parent) == [f"{marker} has bytes that were not written with it"]


def test_a_file_that_does_not_belong_is_named(good: Path, tmp_path: Path) -> None:
    copy(good.parent, tmp_path / "copy")
    path = tmp_path / "copy" / "step_2"
    (path / "rank_00001.safetensors").write_bytes(b"of another run")
    assert verify(path) == [f"{path}/rank_00001.safetensors does not belong to this checkpoint"]


def _change(path: Path, chance: random.Random, change: Callable[[bytes, int], bytes]) -> str:
    data = path.read_bytes()
    while True:
        at = chance.randint(0, len(data) - 1)
        new = change(data, at)
        if new != data[at : at + len(new)]:
            break
    path.write_bytes(data[:at] + new + data[at + len(new) :])
    return path.name


# Edited with care: every checksum is made right again.


def edited(good: Path, to: Path, change: Callable[[Any], Any], about: Any = None) -> Path:
    copy(good.parent, to)
    path = to / "step_2"
    document = json.loads((path / "index.json").read_bytes())
    changed = change(document)
    text = changed if isinstance(changed, bytes) else json.dumps(document).encode()
    facts = parse_marker((path / "COMMITTED").read_bytes()) | (about or {})
    (path / "index.json").write_bytes(text)
    (path / "COMMITTED").write_bytes(marker(text, facts))
    return path


def put(*keys: Any, value: Any) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = value

    return change


FIVE = dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp"), 1)
PART = ("tensors", "model.matrix", "parts", 0)
EMPTY = {"dtype": "U8", "shape": [0], "parts": []}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put("run", "progress", "step", value=7), "is for step 7, but COMMITTED for step 2"),
        (put("run", "layout", value=FIVE | {"tp": 2}), "its layout does not match: .* tp 2"),
        (put("run", "layout", value=FIVE | {"tp": "2"}), "values that are not numbers"),
        (put("type", value="other"), "has the unknown type 'other'"),
        (put("world_size", value=0), "lists a file of rank 0"),
        (put("tensors", "rng.3.torch", value=EMPTY), "random streams of 1"),
        (put(*PART, 2, value=[1, 0]), "model.matrix: one of its parts lies outside the tensor"),
        (put(*PART, 2, value=[-1, 0]), "model.matrix: one of its parts lies outside the tensor"),
        (put(*PART, 3, value=[96, 41]), "model.matrix: one of its parts lies outside the tensor"),
        (put(*PART, 3, value=[95, 40]), "model.matrix do not add up to the whole"),
        (put(*PART, 3, value=["96", 40]), "model.matrix: one of its parts lies outside the tensor"),
        (put(*PART, 1, value=10**15), "model.matrix: one of its parts lies outside its file"),
        (put(*PART, 1, value=-8), "model.matrix: one of its parts lies outside its file"),
        (put(*PART, 1, value="0"), "model.matrix: one of its parts lies outside its file"),
        (put(*PART, 4, value=[]), "model.matrix: one of its parts lacks checksums"),
        (put(*PART, 4, value=None), "model.matrix: one of its parts lacks checksums"),
    ],
)  # fmt: skip
def test_an_edit_with_right_checksums_contradicts_something_else(
    good: Path, tmp_path: Path, change: Callable[[Any], None], said: str
) -> None:
    problems = verify(edited(good, tmp_path / "copy", change))
    assert any(re.search(said, problem) for problem in problems), problems


def test_parts_that_an_edit_swapped_are_found_by_their_own_files(
    good: Path, tmp_path: Path
) -> None:
    """Two tensors of one shape, each under the other's name, with the other's checksums."""

    def swap(document: Any) -> None:
        tensors = document["tensors"]
        tensors["model.other"] = tensors.pop("model.matrix")

    (problem,) = verify(edited(good, tmp_path / "copy", swap))
    assert "rank_00000.safetensors does not hold what index.json lists" in problem


def test_a_step_that_an_edit_changed_is_found_by_the_folder(good: Path, tmp_path: Path) -> None:
    path = edited(good, tmp_path / "copy", lambda document: None, {"step": 3})
    assert "holds step 3, which its name contradicts" in verify(path)[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda document: b"[]",
        lambda document: b"null",
        lambda document: b"[" * 100_000,
        lambda document: b'{"format": ' + b"9" * 5000 + b"}",
        put("tensors", value=[1, 2]),
        put("tensors", value={"a": 7}),
        put("tensors", value={"a": {"dtype": "F32", "shape": 3, "parts": []}}),
        put("tensors", "model.matrix", "shape", value=[10**9, 10**9]),
        put("tensors", "model.matrix", "shape", value=[2**63] * 60_000),
        put("tensors", "model.matrix", "shape", value=["96", 40]),
        put("files", value=7),
        put("files", value=[["a", "1", 2, 3, []]]),
        put("files", 0, 0, value="../x"),
        put("run", value=[]),
        put("world_size", value="1"),
        put("version", value="2"),
    ],
)  # fmt: skip
def test_an_index_of_another_structure_is_one_sentence(
    good: Path, tmp_path: Path, change: Callable[[Any], Any]
) -> None:
    path = edited(good, tmp_path / "copy", change)
    with pytest.raises(CheckpointError, match=re.escape(f"{path / 'index.json'} ")):
        load(path, like(some_state(2)))
    assert len(verify(path)) == 1
