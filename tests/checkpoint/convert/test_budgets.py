"""Small files that would exhaust memory, hang or crash the reader are refused, whatever opens
them."""

from __future__ import annotations

import pickle
import struct
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from overland.apps.convert.formats import open_any
from overland.apps.convert.formats.pickles import load_pickle
from overland.apps.convert.formats.safe_globals import SAFE_GLOBALS
from overland.apps.convert.formats.torch_save import read_torch_file
from tests.limited import limited


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


# Every program makes a list and appends to it, so that nothing stays on the stack: memo 0 is the
# value in question, memo 1 a function.
DEEP = b")" + b"\x85" * 400_000 + b"q\x00a"
SHARED = text("a") + b"q\x00a" + b"h\x00h\x00\x86q\x00a" * 40
STORAGE = b"(" + text("storage") + name("torch", "FloatStorage")
REBUILD = name("torch._utils", "_rebuild_tensor_v2")


def fed_back(function: bytes) -> bytes:
    return text("a" * 64) + b"q\x00a" + (function + b"h\x00h\x00\x86Rq\x00a") * 40


def over_and_over(function: bytes, value: bytes, more: bytes = b"\x85") -> bytes:
    call = b"h\x01h\x00" + more + b"R"
    return value + b"q\x00a" + function + b"q\x01a(" + call * 20_000 + b"e"


def numbers(count: int) -> bytes:
    return b"](" + b"".join(b"J" + struct.pack("<i", i) for i in range(count)) + b"e"


def alike(count: int) -> bytes:
    """Keys whose hashes are all 0: each is compared with all before it."""
    modulus = 2**61 - 1
    keys = ((i * modulus).to_bytes(12, "little") for i in range(count))
    return b"}(" + b"".join(b"\x8a\x0c" + key + b"N" for key in keys) + b"ua"


PROGRAMS = {
    "a deep tuple as the name of a class": DEEP + b"h\x00\x8c\x01x\x93a",
    "a deep tuple as the module of a class": DEEP + b"\x8c\x01xh\x00\x93a",
    "a deep tuple as a key": DEEP + b"}h\x00Nsa",
    "a deep tuple in a set": DEEP + b"\x8f(h\x00\x90a",
    "a deep value": DEEP,
    "a list that holds itself": b"]q\x00h\x00aa",
    "a shared tuple as the name of a class": SHARED + b"h\x00\x8c\x01x\x93a",
    "a shared tuple as a key": SHARED + b"}h\x00Nsa",
    "a shared tuple as the name of a storage": SHARED
    + STORAGE + b"h\x00" + text("cpu") + b"K\x04tQa",
    "a shared tuple as the device of a storage": SHARED
    + STORAGE + text("0") + b"h\x00K\x04tQa",
    "a shared tuple as a storage": SHARED + b"h\x00Qa",
    "a shared tuple as a layout": SHARED
    + name("torch.serialization", "_get_layout") + b"h\x00\x85Ra",
    "a shared tuple as a value": SHARED,
    "a shared tuple in a stand-in": SHARED + name("numpy", "dtype") + b"h\x00\x85Ra",
    "torch.device fed back": fed_back(name("torch", "device")),
    "PosixPath fed back": fed_back(name("pathlib", "PosixPath")),
    "list over and over": over_and_over(name("builtins", "list"), numbers(20_000)),
    "set over and over": over_and_over(name("builtins", "set"), numbers(20_000)),
    "torch.Size over and over": over_and_over(name("torch", "Size"), numbers(20_000)),
    "OrderedDict over and over": over_and_over(
        name("collections", "OrderedDict"), b"}(" + b"".join(
            b"J" + struct.pack("<i", i) + b"N" for i in range(20_000)
        ) + b"u"
    ),
    "encode over and over": over_and_over(
        name("_codecs", "encode"), text("a" * 100_000), text("latin1") + b"\x86"
    ),
    "list over and over, as a tensor's type": name("builtins", "list") + b"q\x02a"
    + name("torch", "Tensor") + b"q\x03a" + numbers(20_000) + b"q\x00a"
    + name("torch._tensor", "_rebuild_from_type_v2") + b"q\x01a("
    + b"h\x01(h\x02h\x03h\x00\x85NtR" * 20_000 + b"e",
    "a long tuple as a key, over and over": b"(" + b"K\x01" * 50_000 + b"tq\x00a}"
    + b"h\x00Ns" * 50_000 + b"a",
    "a long number as a key, over and over": b"\x8b" + struct.pack("<i", 10**6)
    + b"\x7f" * 10**6 + b"q\x00a}" + b"h\x00Ns" * 50_000 + b"a",
    "numbers that hash alike": alike(60_000),
    "a tensor of many dims, over and over": b"(" + b"K\x01" * 50_000 + b"tq\x00a"
    + STORAGE + text("0") + text("cpu") + b"K\x04tQq\x01a" + REBUILD + b"q\x02a("
    + b"h\x02(h\x01K\x00h\x00h\x00\x89}tR" * 10_000 + b"e",
    "empty sets": b"(" + b"\x8f" * 1_000_000 + b"e",
}  # fmt: skip


def torch_file(path: Path, pickled: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", pickled)
        archive.writestr("a/data/0", b"x" * 16)
    return path


@pytest.mark.parametrize("what", PROGRAMS)
def test_a_pickle_costs_what_its_size_allows(what: str, tmp_path: Path) -> None:
    path = torch_file(tmp_path / "a.pt", b"\x80\x04]" + PROGRAMS[what] + b".")
    ended = limited(lambda: read_torch_file(path))
    assert ended.startswith(f"CheckpointError: {path}"), ended


def test_every_reader_of_pickles_is_bounded(tmp_path: Path) -> None:
    """The same two programs where a user would meet them."""
    crash = b"\x80\x04]" + PROGRAMS["a deep tuple as the name of a class"] + b"."
    endless = b"\x80\x04]" + PROGRAMS["a shared tuple as a value"] + b"."
    for number, program in enumerate((crash, endless)):
        dcp, hf = tmp_path / f"dcp{number}", tmp_path / f"hf{number}"
        dcp.mkdir()
        (dcp / ".metadata").write_bytes(program)
        hf.mkdir()
        (hf / "config.json").write_text("{}")
        torch_file(hf / "pytorch_model.bin", program)
        for folder in (dcp, hf):
            ended = limited(partial(open_any, folder))
            assert ended.startswith("CheckpointError: "), (folder, ended)


def test_what_real_files_hold_is_far_below_the_bounds(tmp_path: Path) -> None:
    """Two thousand parts of a DCP checkpoint; a model and its optimizer; odd keys, a few."""
    weight = "model.layers.0.self_attn.q_proj.weight"
    chunks = [ChunkStorageMetadata(torch.Size((i, 0)), torch.Size((1, 8))) for i in range(2_000)]
    metadata = Metadata(
        {
            weight: TensorStorageMetadata(
                TensorProperties(dtype=torch.float32), torch.Size((2_000, 8)), chunks
            ),
            "step": BytesStorageMetadata(),
        },
        {weight: ("model", weight)},
        {MetadataIndex(weight, chunk.offsets, i): None for i, chunk in enumerate(chunks)},
    )
    load_pickle(pickle.dumps(metadata), "test", SAFE_GLOBALS)
    layers = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(100)))
    adam = torch.optim.AdamW(layers.parameters())
    layers(torch.ones(1, 2)).sum().backward()
    adam.step()
    odd = {(1, "a", 2.5): 1, 2**40: 2, 0.5: 3, True: 4}
    torch.save([layers.state_dict(), adam.state_dict(), odd], tmp_path / "a.pt")
    assert read_torch_file(tmp_path / "a.pt")[2] == odd


def _wait() -> None:
    while True:
        pass


@pytest.mark.parametrize("call", [lambda: b"x" * 2**30, _wait])
def test_the_limits_of_these_tests_hold(call: Callable[[], object]) -> None:
    assert limited(call, seconds=1).startswith(("MemoryError", "died of SIG"))
