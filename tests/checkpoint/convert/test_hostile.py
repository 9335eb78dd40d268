"""Malicious files are refused by name; none of their code runs, and nothing is written
elsewhere."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from overland.apps.convert import convert
from overland.apps.convert.formats import FORMATS, Options, open_any
from overland.apps.convert.formats.lazy import digest
from overland.apps.convert.formats.safetensors import read_safetensors
from overland.apps.convert.formats.torch_save import read_torch_file
from overland.apps.convert.verify import verify_hashes
from overland.errors import CheckpointError
from overland.models import DecoderConfig, ModelError, build_model
from overland.models.weights import load_hf

from .samples import fixture, saved, tiny_config, tiny_source

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:Detected an existing checkpoint"
)


class Payload:
    """What a pickle of it does when it is loaded: create a file."""

    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.sentinel}",)


@pytest.fixture
def sentinel(tmp_path: Path) -> Path:
    return tmp_path / "it-ran"


def snapshot(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def assert_refused(source: Path, tmp_path: Path, match: str) -> None:
    """Opening and converting fail with a sentence, and leave no trace."""
    before = snapshot(tmp_path)
    with pytest.raises(CheckpointError, match=match):
        convert(source, tmp_path / "out", "torch")
    assert snapshot(tmp_path) == before
    assert not (tmp_path / "it-ran").exists()


def test_the_payload_works(sentinel: Path) -> None:
    """Or the tests below would prove nothing."""
    pickle.loads(pickle.dumps(Payload(sentinel)))
    assert sentinel.exists()


@pytest.mark.parametrize(
    "name", ["model_state_dict.pt", "optim_state_dict.pt", "iter_state_dict.pt"]
)
def test_payload_in_the_four_files(name: str, tmp_path: Path, sentinel: Path) -> None:
    (tmp_path / "a").mkdir()
    FORMATS["torch"].write(tiny_source(tiny_config()), tmp_path / "a", Options())
    torch.save({"a": torch.ones(2), "x": Payload(sentinel)}, tmp_path / "a" / name)
    assert_refused(tmp_path / "a", tmp_path, rf"{name} names posix\.system")


@pytest.mark.parametrize(
    "name",
    [
        "mp_rank_00_model_states.pt",
        "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
    ],
)
def test_payload_in_deepspeed_files(name: str, tmp_path: Path, sentinel: Path) -> None:
    folder, _ = fixture("deepspeed_z2_tied")
    (tmp_path / "a").mkdir()
    for file in (saved(folder) / "global_step3").iterdir():
        (tmp_path / "a" / file.name).write_bytes(file.read_bytes())
    assert open_any(tmp_path / "a").format == "deepspeed"
    torch.save({"optimizer_state_dict": Payload(sentinel)}, tmp_path / "a" / name)
    assert_refused(tmp_path / "a", tmp_path, r"names posix\.system")


def test_payload_in_meta_and_hf_files(tmp_path: Path, sentinel: Path) -> None:
    for name, extra in (("consolidated.00.pth", "params.json"), ("pytorch_model.bin", "x.json")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / extra).write_text("{}")
        torch.save({"tok_embeddings.weight": Payload(sentinel)}, folder / name)
        assert_refused(folder, tmp_path, r"names posix\.system")


def test_payload_in_dcp_metadata(tmp_path: Path, sentinel: Path) -> None:
    dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=tmp_path / "a", no_dist=True)
    metadata = pickle.loads((tmp_path / "a" / ".metadata").read_bytes())
    metadata.planner_data = Payload(sentinel)
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(metadata))
    assert_refused(tmp_path / "a", tmp_path, r"\.metadata names posix\.system")


def test_payload_in_a_dcp_item(tmp_path: Path, sentinel: Path) -> None:
    """Objects next to tensors are files of torch.save, too."""
    state = {"model": {"w": torch.ones(3)}, "train_state": {"x": Payload(sentinel)}}
    dcp.save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    assert_refused(tmp_path / "a", tmp_path, r"names posix\.system")


@pytest.mark.parametrize(
    "path", ["../secret.distcp", "/etc/passwd", "sub/../../secret.distcp", "..", ""]
)
def test_dcp_paths_stay_in_the_folder(path: str, tmp_path: Path) -> None:
    dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=tmp_path / "a", no_dist=True)
    (tmp_path / "secret.distcp").write_bytes(b"secret")
    metadata = pickle.loads((tmp_path / "a" / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = path
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(metadata))
    assert_refused(tmp_path / "a", tmp_path, "not a plain file name")


def test_dcp_sizes_that_lie(tmp_path: Path) -> None:
    def damaged(change: Callable[[Any], None]) -> Path:
        folder = tmp_path / "a"
        dcp.save({"model": {"w": torch.ones(4, 4)}}, checkpoint_id=folder, no_dist=True)
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        change(metadata)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        return folder

    def entry(metadata: Any) -> Any:
        return metadata.state_dict_metadata["model.w"]

    def huge(metadata: Any) -> None:
        entry(metadata).size = entry(metadata).chunks[0].sizes = torch.Size([10**9, 10**9])

    def outside(metadata: Any) -> None:
        entry(metadata).chunks[0].offsets = torch.Size([1, 0])

    def hole(metadata: Any) -> None:
        entry(metadata).size = torch.Size([5, 4])

    def beyond(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.offset = 10**12

    def other_shape(metadata: Any) -> None:
        entry(metadata).size = entry(metadata).chunks[0].sizes = torch.Size([2, 4])

    for change, match in (
        (huge, "claims more bytes than are stored"),
        (outside, "lies outside"),
        (hole, "missing or overlap"),
        (beyond, "are needed"),
        (other_shape, r"holds \[4, 4\] of torch.float32 at byte"),
    ):
        assert_refused(damaged(change), tmp_path, match)


@pytest.mark.parametrize(
    "file", ["../evil.safetensors", "/etc/passwd", "a/../../x", 7, ["x"], ".."]
)
def test_an_hf_index_stays_in_its_folder(file: Any, tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "evil.safetensors")
    (tmp_path / "a").mkdir()
    index = {"weight_map": {"w": file}}
    (tmp_path / "a" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_refused(tmp_path / "a", tmp_path, "not a plain file name|are inconsistent")


def test_deepspeed_latest_stays_in_its_folder(tmp_path: Path) -> None:
    folder, _ = fixture("deepspeed_z3_tied")
    outside = os.path.relpath(saved(folder) / "global_step3", tmp_path / "a")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "latest").write_text(outside)
    assert_refused(tmp_path / "a", tmp_path, "not a checkpoint in a known format")


def safetensors_file(path: Path, header: Any, data: bytes, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(begin: int, end: int, shape: list[Any], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "data", "length"),
    [
        ({"a": entry(0, 4, [1])}, b"", None),
        ({"a": entry(0, 8, [1])}, b"x" * 8, None),
        ({"a": entry(0, 4, [10**12])}, b"x" * 4, None),
        ({"a": entry(-4, 0, [1])}, b"x" * 4, None),
        ({"a": entry(4, 0, [1])}, b"x" * 4, None),
        ({"a": entry(0, 4, [-1, -1])}, b"x" * 4, None),
        ({"a": entry(0, 4, [1]), "b": entry(2, 6, [1])}, b"x" * 6, None),
        ({"a": entry(0, 4, [1]), "b": entry(0, 4, [1])}, b"x" * 4, None),
        ({"a": entry(0, 4, [1]), "b": entry(8, 12, [1])}, b"x" * 12, None),
        ({"a": entry(0, 4, [1])}, b"x" * 8, None),
        ({"a": entry(0, 4, [1.0])}, b"x" * 4, None),
        ({"a": entry(0, 4, [True])}, b"x" * 4, None),
        ({"a": entry(0, 4, [1], "PICKLE")}, b"x" * 4, None),
        ({"a": "b"}, b"", None),
        ([], b"", None),
        (b"[" * 100_000, b"", None),
        (b"{", b"", None),
        (b"\xff\xfe", b"", None),
        (b'{"a":1,"a":2}', b"", None),
        ({}, b"", 2**63),
        ({}, b"", 200_000_000),
    ],
)
def test_safetensors_headers_that_lie(
    header: Any, data: bytes, length: int | None, tmp_path: Path
) -> None:
    path = safetensors_file(tmp_path / "a.safetensors", header, data, length)
    with pytest.raises(CheckpointError, match=r"a\.safetensors") as refusal:
        read_safetensors(path)
    assert "Error(" not in str(refusal.value)
    assert_refused(path, tmp_path, r"a\.safetensors")


def torch_zip(path: Path, compression: int = zipfile.ZIP_STORED, **records: bytes) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in records.items():
            archive.writestr(f"a/{name.replace('__', '/').replace('_pkl', '.pkl')}", data)
    return path


def pickled_tensor(numel: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    """data.pkl of a file with one tensor, by torch's own pickler, with numbers of our choice."""
    file = io.BytesIO()

    class Pickler(pickle.Pickler):
        def persistent_id(self, item: Any) -> Any:
            if isinstance(item, _Storage):
                return ("storage", torch.FloatStorage, "0", "cpu", numel)
            return None

        def reducer_override(self, item: Any) -> Any:
            if isinstance(item, _Tensor):
                args = (_Storage(), 0, shape, stride, False, {})
                return torch._utils._rebuild_tensor_v2, args
            return NotImplemented

    Pickler(file, 2).dump({"w": _Tensor()})
    return file.getvalue()


class _Storage:
    pass


class _Tensor:
    pass


@pytest.mark.parametrize(
    ("numel", "shape", "stride", "match"),
    [
        (4, (4,), (1,), None),
        (100, (100,), (1,), "100 elements, but it has 16 bytes"),
        (4, (5,), (1,), "more than the 16 bytes"),
        (4, (2,), (4,), "more than the 16 bytes"),
        (4, (10**12,), (0,), "more than the 16 bytes"),
        (4, (2**62, 2**62), (1, 1), "more than the 16 bytes"),
        (4, (-1,), (1,), "impossible shape"),
        (4, (2,), (-1,), "impossible shape"),
        (4, (2, 2), (1,), "impossible shape"),
        (-4, (4,), (1,), "elements"),
    ],
)
def test_storages_smaller_than_their_tensors(
    numel: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    match: str | None,
    tmp_path: Path,
) -> None:
    data = pickled_tensor(numel, shape, stride)
    path = torch_zip(tmp_path / "a.pt", data_pkl=data, data__0=b"x" * 16, version=b"3\n")
    if match is None:
        assert read_torch_file(path)["w"].load().shape == shape
    else:
        assert_refused(path, tmp_path, match)


def test_zip_bombs(tmp_path: Path) -> None:
    pickled = pickled_tensor(10**7, (10**7,), (1,))
    bomb = b"\x00" * (4 * 10**7)
    path = torch_zip(
        tmp_path / "a.pt", zipfile.ZIP_DEFLATED, data_pkl=pickled, data__0=bomb, version=b"3\n"
    )
    assert path.stat().st_size < 100_000
    assert_refused(path, tmp_path, "compressed record")
    path = torch_zip(tmp_path / "b.pt", zipfile.ZIP_BZIP2, data_pkl=pickled, version=b"3\n")
    assert_refused(path, tmp_path, "compressed record")


def test_zip_records_over_each_other(tmp_path: Path) -> None:
    """A thousand names for the same gigabyte would be a terabyte."""
    records = {f"data__{i}": bytes([i]) * 64 for i in range(3)}
    pickled = pickled_tensor(16, (16,), (1,))
    path = torch_zip(tmp_path / "a.pt", data_pkl=pickled, version=b"3\n", **records)
    data = bytearray(path.read_bytes())
    # In the central directory, point the record of data/1 at the header of data/0.
    with zipfile.ZipFile(path) as archive:
        first, second = (archive.getinfo(f"a/data/{i}").header_offset for i in (0, 1))
    place = data.rindex(b"a/data/1") - 4
    assert data[place : place + 4] == struct.pack("<I", second)
    data[place : place + 4] = struct.pack("<I", first)
    path.write_bytes(data)
    assert_refused(path, tmp_path, "overlapping another|not written by torch.save")


def test_files_that_are_something_else(tmp_path: Path, sentinel: Path) -> None:
    cases: dict[str, bytes] = {
        "legacy.pt": pickle.dumps(0x1950A86A20F9469CFC6C) + pickle.dumps(Payload(sentinel)),
        "plain.pt": pickle.dumps(Payload(sentinel)),
        "empty.pt": b"",
        "zip.pt": b"PK\x03\x04" + b"\x00" * 100,
        "text.safetensors": b"hello",
        "none.safetensors": b"",
    }
    for name, data in cases.items():
        (tmp_path / name).write_bytes(data)
        assert_refused(tmp_path / name, tmp_path, name)
    torch.save(torch.ones(3), tmp_path / "tensor.pt")
    assert_refused(tmp_path / "tensor.pt", tmp_path, "expected a state dict")


def test_truncation_of_real_files_is_always_a_sentence(tmp_path: Path) -> None:
    folder, _ = fixture("deepspeed_z3_tied")
    for file in (saved(folder) / "global_step3").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    file = next(tmp_path.glob("*rank_1*optim_states.pt"))
    data = file.read_bytes()
    for end in range(0, len(data), len(data) // 23):
        file.write_bytes(data[:end])
        with pytest.raises(CheckpointError):
            open_any(tmp_path)
    file.unlink()
    with pytest.raises(CheckpointError, match="saved by 2 ranks"):
        open_any(tmp_path)


def test_verification_finds_a_flipped_bit_of_any_tensor(tmp_path: Path) -> None:
    source = tiny_source(tiny_config(), optimizer=False)
    sent = {
        name: (lazy.shape, lazy.dtype, digest(lazy.load())) for name, lazy in source.tensors.items()
    }
    FORMATS["hf"].write(source, tmp_path, Options())
    verify_hashes(open_any(tmp_path), sent, lambda size: None)
    (tmp_path / "checksums.json").unlink()  # which would tell it before
    file = tmp_path / "model.safetensors"
    for name, stored in read_safetensors(file).items():
        with file.open("r+b") as opened:
            opened.seek(stored.offset + stored.nbytes - 1)
            byte = opened.read(1)[0]
            opened.seek(-1, os.SEEK_CUR)
            opened.write(bytes([byte ^ 1]))
        with pytest.raises(CheckpointError, match=rf"model\.{name} reads back differently"):
            verify_hashes(open_any(tmp_path), sent, lambda size: None)
        with file.open("r+b") as opened:
            opened.seek(stored.offset + stored.nbytes - 1)
            opened.write(bytes([byte]))


def test_boxes_of_a_dcp_tensor_that_overlap_are_refused(tmp_path: Path) -> None:
    """Two boxes over each other and a hole of the same size: the hole would be old memory."""
    folder = tmp_path / "dcp"
    dcp.save({"model": {"x": torch.arange(16.0).view(4, 4)}}, checkpoint_id=folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    entry = metadata.state_dict_metadata["model.x"]
    (place,) = metadata.storage_data.values()
    boxes = [ChunkStorageMetadata(torch.Size((row, 0)), torch.Size((2, 4))) for row in (0, 1)]
    entry.chunks = boxes
    metadata.storage_data = {MetadataIndex("model.x", box.offsets): place for box in boxes}
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="missing or overlap"):
        open_any(folder)


class Doubled:
    """A path whose one part is a tuple of itself twice, thirty times over."""

    def __reduce__(self) -> Any:
        part: Any = "a"
        for _ in range(30):
            part = (part, part)
        return PosixPath, (part,)


def test_a_pickle_of_a_few_bytes_cannot_fill_the_memory(tmp_path: Path) -> None:
    pickled = pickle.dumps({"x": Doubled()}, protocol=2)
    assert len(pickled) < 500
    path = torch_zip(tmp_path / "model.pt", data_pkl=pickled)
    with pytest.raises(CheckpointError):
        open_any(path)


def test_weights_to_start_from_stay_in_their_folder(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "secret.safetensors")
    index = {"weight_map": {"model.norm.weight": "../secret.safetensors"}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="not a plain file name in the same folder"):
        load_hf(build_model(DecoderConfig.from_hf(tiny_config())), tmp_path / "model")


def test_a_target_inside_its_source_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "a"
    source.mkdir()
    FORMATS["torch"].write(tiny_source(tiny_config()), source, Options())
    (tmp_path / "link").symlink_to(source)
    before = snapshot(tmp_path)
    inside = (source / "out", source, tmp_path / "link" / "out", tmp_path / "link", tmp_path)
    for target in (*inside, source / "model_state_dict.pt" / "out", source / ".." / "a" / "out"):
        with pytest.raises(CheckpointError, match="choose a target outside of it"):
            convert(source, target, "dcp")
    with pytest.raises(CheckpointError, match="choose a target outside of it"):
        convert(tmp_path / "link", source / "out", "dcp")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_a_linked_file_is_not_copied_into_the_target(name: str, tmp_path: Path) -> None:
    source = tmp_path / "a"
    source.mkdir()
    FORMATS["hf"].write(tiny_source(tiny_config(), optimizer=False), source, Options())
    (tmp_path / "private.json").write_text('{"password": 1}')
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to(tmp_path / "private.json")
    assert_refused(source, tmp_path, f"{name} is a link that leads out of its folder")
    (source / name).unlink()
    (source / "real.json").write_text(json.dumps(tiny_config()))
    (source / name).symlink_to("real.json")
    convert(source, tmp_path / "out", "hf")
    assert not (tmp_path / "out" / name).is_symlink()
