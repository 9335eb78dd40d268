"""Images are read in place, each once per epoch, on any number of ranks; hostile files are
refused."""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from overland.config.schema import (
    Data,
    DataSource,
    Images,
    JobConfig,
    Model,
    Training,
    Validation,
)
from overland.data.arrays import empty_array, require_fields
from overland.data.batch import load_batch
from overland.data.corpora import Preparer
from overland.data.holdout import check_held_out
from overland.data.prepare import Dataset, training_data
from overland.data.registry import MADE
from overland.data.sources.image_files import ArrayList, is_array_list
from overland.data.wanted import WantedSource, sources_of
from overland.errors import DataError
from overland.training.saving import digests
from overland.training.step import instance_norm

TAKEN = {"pixel_values": ("float32", (1, 32, 32))}


def images(folder: Path, count: int = 6, shape: tuple[int, ...] = (32, 32)) -> list[np.ndarray]:
    """Images of 16 bits in files of their own, listed in train.csv."""
    draw = np.random.default_rng(1)
    made = [draw.integers(0, 60_000, shape, np.uint16) for _ in range(count)]
    for number, image in enumerate(made):
        np.save(folder / f"{number}.npy", image)
    (folder / "train.csv").write_text("\n".join(f"{n}.npy" for n in range(count)) + "\n")
    return made


def job(folder: Path, **changes: Any) -> JobConfig:
    sections: dict[str, Any] = {
        "model": Model(name="vit_mae", flavor="debug", overrides={"num_channels": 1}),
        "training": Training(dataset_path=str(folder / "train.csv")),
        "data": Data(folder=str(folder / "data")),
    }
    return JobConfig(**{**sections, **changes})


def opened(config: JobConfig, rows: int = 4) -> Dataset:
    return training_data(config, rows, None, Preparer())


def test_every_image_comes_once_in_an_epoch_whatever_the_ranks(tmp_path: Path) -> None:
    made = images(tmp_path)
    rows = opened(job(tmp_path)).rows
    whole = [load_batch(rows, batch) for batch in range(3)]  # two epochs of six
    pixels = torch.cat([batch["pixel_values"] for batch in whole])
    assert pixels.dtype == torch.uint16
    numbers = torch.cat([batch["sample_B"] for batch in whole])
    epochs = torch.cat([batch["epoch_B"] for batch in whole])
    assert epochs.tolist() == [0] * 6 + [1] * 6
    for epoch in (0, 1):
        assert sorted(numbers[epochs == epoch].tolist()) == list(range(6))
    assert numbers[:6].tolist() != numbers[6:].tolist() != list(range(6))
    for number, image in zip(numbers.tolist(), pixels, strict=True):
        assert np.array_equal(image.numpy()[0], made[number])
    for parts in (2, 4):
        shares = [load_batch(rows, 1, part, parts) for part in range(parts)]
        assert torch.equal(torch.cat([one["pixel_values"] for one in shares]), pixels[4:8])
    assert len({*digests(whole[0]).tolist()}) == 4
    assert rows.position(2) == (1, 2, 6)


def test_the_last_batch_of_epochs_is_padded_or_dropped(tmp_path: Path) -> None:
    images(tmp_path)
    path = str(tmp_path / "train.csv")
    padded = opened(job(tmp_path, training=Training(dataset_path=path, epochs=1.0))).rows
    assert padded.num_batches(1.0) == 2
    assert padded.num_batches(1.0, drop=True) == 1
    assert load_batch(padded, 1)["weight_B"].tolist() == [1, 1, 0, 0]


FORMS: dict[str, Callable[[Path, np.ndarray], None]] = {
    "a.npy": np.save,
    "a.npz": lambda path, image: np.savez(path, pixel_values=image, label=np.arange(3)),
    "packed.npz": lambda path, image: np.savez_compressed(path, image),
    "a.safetensors": lambda path, image: save_file({"x": image}, path),
    "big.npy": lambda path, image: np.save(path, image.astype(">u2")),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_file_gives_its_images(name: str, tmp_path: Path) -> None:
    made = np.random.default_rng(0).integers(0, 60_000, (3, 5, 7), np.uint16)
    FORMS[name](tmp_path / name, made)
    (tmp_path / "list.csv").write_text(f"label,path\n3,{tmp_path / name}\n")
    source = ArrayList(tmp_path / "list.csv", pad=(8, 8))
    assert (len(source), source.shape) == (3, (1, 8, 8))
    for number in range(3):
        image = np.empty(source.shape, source.dtype_of_all)
        source.fill(number, image)
        assert image.dtype == np.uint16
        assert np.array_equal(image[0, 1:6, :7], made[number])
        assert image.sum() == made[number].sum()  # all around it is zero


def test_dimensions_tell_channels_from_images(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3, 4, 4), np.uint8))
    (tmp_path / "list.csv").write_text("path\na.npy\n")
    assert len(ArrayList(tmp_path / "list.csv", channels=3)) == 1
    assert len(ArrayList(tmp_path / "list.csv", channels=1)) == 3
    np.save(tmp_path / "a.npy", np.zeros((5, 3, 4, 6), np.uint8))
    source = ArrayList(tmp_path / "list.csv", channels=3)
    assert (len(source), source.shape) == (5, (3, 4, 6))


@pytest.mark.parametrize("shape", [(30, 28, 1), (30, 28, 3), (5, 30, 28, 3)])
def test_channels_in_the_last_place_are_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    """They would be read as many images that are one or three pixels wide."""
    np.save(tmp_path / "a.npy", np.zeros(shape, np.uint8))
    (tmp_path / "list.csv").write_text("path\na.npy\n")
    for channels in (1, 3):
        with pytest.raises(
            DataError, match=r"a\.npy .* which looks channels-last: save it channels-"
        ):
            ArrayList(tmp_path / "list.csv", channels=channels, pad=(32, 32))


def pickled(path: Path) -> None:
    np.save(path, np.array([{"a": 1}], object), allow_pickle=True)


def cut_short(path: Path) -> None:
    np.save(path, np.zeros((32, 32), np.uint16))
    path.write_bytes(path.read_bytes()[:-5])


def huge_header(path: Path) -> None:
    path.write_bytes(b"\x93NUMPY\x02\x00" + struct.pack("<I", 1 << 31) + b"x" * 100)


def huge_shape(path: Path) -> None:
    text = b"{'descr': '<u2', 'fortran_order': False, 'shape': (9999999999, 9999999999)}\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text)


def by_columns(path: Path) -> None:
    np.save(path, np.asfortranarray(np.zeros((4, 6), np.uint16)))


def no_numbers(path: Path) -> None:
    np.save(path, np.array([["a", "b"]]))


def code_in_header(path: Path) -> None:
    text = b"__import__('os').system('touch ran')\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text)


HOSTILE = {
    pickled: "contains Python objects",
    cut_short: "is truncated",
    huge_header: "its header has more than 10,000 bytes",
    huge_shape: "is truncated",
    by_columns: "is in Fortran order",
    no_numbers: "contains <U1 values; expected integers or floats",
    code_in_header: "is not an array, or is truncated",
    lambda path: path.write_bytes(b""): "a.npy is empty",
    lambda path: np.save(path, np.zeros((0, 4), np.uint8)): "a.npy is empty",
    lambda path: np.save(path, np.zeros(7)): "has an array of 7; expected H × W",
    lambda path: None: "cannot be read: No such file",
}


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_hostile_arrays_are_one_sentence_with_the_file(number: int, tmp_path: Path) -> None:
    make, says = list(HOSTILE.items())[number]
    make(tmp_path / "a.npy")
    (tmp_path / "list.csv").write_text("path\na.npy\n")
    with pytest.raises(DataError) as caught:
        ArrayList(tmp_path / "list.csv")
    assert says in str(caught.value)
    assert str(tmp_path / "a.npy") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not Path("ran").exists()


def tensors(path: Path, header: Any, data: bytes = b"\0" * 8, length: int | None = None) -> None:
    text = json.dumps(header).encode()
    size = len(text) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ({"x": {"dtype": "U16", "shape": [2, 2], "data_offsets": [0, 99]}}, "99 bytes for x"),
        ({"x": {"dtype": "U16", "shape": [2, 2], "data_offsets": [8, 16]}}, "is truncated"),
        ({"x": {"dtype": "U16", "shape": [-2, 2], "data_offsets": [0, 8]}}, "is not an array"),
        ({"x": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}}, "stores x as 'BF16'"),
        ({"x": 3}, "is not an array"),
        ([], "is not an array"),
        ({}, "contains no array"),
        ({"x": {}, "y": {}}, "several arrays ('x' and 'y'): rename the one with the images"),
    ],
)
def test_hostile_safetensors_are_one_sentence(header: Any, says: str, tmp_path: Path) -> None:
    tensors(tmp_path / "a.safetensors", header)
    (tmp_path / "list.csv").write_text("a.safetensors\n")
    with pytest.raises(DataError) as caught:
        ArrayList(tmp_path / "list.csv")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    tensors(tmp_path / "a.safetensors", {}, length=1 << 60)
    with pytest.raises(DataError, match="its header claims"):
        ArrayList(tmp_path / "list.csv")


def test_a_zip_that_is_none_or_lies_about_its_size_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("a.npz\n")
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(DataError, match=r"a\.npz is not an array, or is truncated"):
        ArrayList(tmp_path / "list.csv")
    text = b"{'descr': '<u2', 'fortran_order': False, 'shape': (1000, 1000)}\n"
    body = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", body)
    with pytest.raises(DataError, match=r"x\.npy has .* bytes, but its array needs 2,000"):
        ArrayList(tmp_path / "list.csv")


def test_images_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((4, 6), np.uint16))
    np.save(tmp_path / "b.npy", np.zeros((6, 4), np.uint16))
    path = tmp_path / "list.csv"
    path.write_text("path\na.npy\nb.npy\n")
    with pytest.raises(DataError, match=r"b\.npy has an image of 1 × 6 × 4.*set images\.pad"):
        ArrayList(path)
    with pytest.raises(DataError, match=r"b\.npy has an image of 1 × 6 × 4, which cannot be pad"):
        ArrayList(path, pad=(4, 6))
    assert ArrayList(path, pad=(6, 6)).shape == (1, 6, 6)
    np.save(tmp_path / "b.npy", np.zeros((4, 6), np.float32))
    with pytest.raises(DataError, match=r"b\.npy contains float32 but a\.npy contains uint16"):
        ArrayList(path)
    path.write_text("path\na.npy\na.npy\n")
    with pytest.raises(DataError, match=r"lists a\.npy more than once"):
        ArrayList(path)
    path.write_text("path\na.npy\nnotes.txt\n")
    assert not is_array_list(path)
    with pytest.raises(DataError, match=r"list\.csv:3: expected a .npy, .npz or .safetensors file"):
        ArrayList(path, column="path")
    with pytest.raises(DataError, match="has no column 'where'"):
        ArrayList(path, column="where")


def test_bad_files_are_skipped_and_counted_where_that_is_asked_for(tmp_path: Path) -> None:
    images(tmp_path)
    (tmp_path / "2.npy").write_bytes(b"")
    with pytest.raises(DataError, match=r"2\.npy is empty"):
        opened(job(tmp_path))
    data = Data(folder=str(tmp_path), bad_documents="skip")
    dataset = opened(job(tmp_path, data=data))
    assert dataset.num_skipped == 1
    assert dataset.rows.num_batches(1.0) == 2  # of five


def test_a_file_that_is_cut_short_later_is_an_error_with_its_name(tmp_path: Path) -> None:
    images(tmp_path)
    rows = opened(job(tmp_path), rows=6).rows
    (tmp_path / "3.npy").write_bytes((tmp_path / "3.npy").read_bytes()[:500])
    with pytest.raises(DataError, match=r"3\.npy is truncated: it ends at byte 500"):
        load_batch(rows, 0)


def test_changed_files_are_seen_by_the_fingerprint(tmp_path: Path) -> None:
    images(tmp_path)
    before = opened(job(tmp_path))
    np.save(tmp_path / "3.npy", np.zeros((32, 32), np.uint16))
    after = opened(job(tmp_path))
    with pytest.raises(DataError, match=r"train\.csv is not what this run was trained on"):
        after.continued(before.plan.to_json(), 1)


def test_made_images_are_a_function_of_seed_and_number(tmp_path: Path) -> None:
    settings = Images(shape=[1, 30, 28], pad=[32, 32], count=5)
    config = job(tmp_path, training=Training(dataset="random"), images=settings)
    batch = load_batch(opened(config, rows=5).rows, 0)
    again = load_batch(opened(config, rows=5).rows, 0)
    assert torch.equal(batch["pixel_values"], again["pixel_values"])
    inside = batch["pixel_values"][:, :, 1:31, 2:30]
    assert (inside != 0).all()
    assert inside.numel() == batch["pixel_values"].count_nonzero()
    assert abs(inside.std() - 1) < 0.05
    other = WantedSource(config, "training", "another", DataSource(dataset="random")).made_images()
    assert other is not None
    one = np.empty((1, 32, 32), np.float32)
    other.fill(0, one)
    assert not any(np.array_equal(one, image) for image in batch["pixel_values"].numpy())


def test_lists_that_are_not_there_become_made_images_only_when_asked_for(tmp_path: Path) -> None:
    config = job(tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        opened(config)
    said: list[str] = []
    asked = job(tmp_path, images=Images(if_missing="random", count=7))
    dataset = training_data(asked, 4, None, Preparer(report=said.append))
    assert len(dataset.rows.corpora["train.csv"]) == 7  # type: ignore[arg-type]
    (note,) = said
    assert "train.csv does not exist, so the model is trained on 7 random images of 1 × 32" in note
    assert 'set images.if_missing = "error" to stop instead' in note
    images(tmp_path)
    assert sources_of(asked)["train.csv"].asked.path is not None


def check_fields(config: JobConfig, model: str, casts: bool) -> None:
    require_fields("train.csv", opened(config).rows.arrays, TAKEN, model, casts)


def test_what_the_model_does_not_take_is_refused(tmp_path: Path) -> None:
    images(tmp_path, shape=(30, 32))
    with pytest.raises(DataError, match=r"train\.csv has pixel_values \(uint16 1 × 30 × 32\)"):
        check_fields(job(tmp_path), "vit_mae debug", casts=True)
    padded = job(tmp_path, images=Images(pad=[32, 32]))
    check_fields(padded, "vit_mae debug", casts=True)
    with pytest.raises(DataError, match=r"takes pixel_values \(float32 1 × 32 × 32\)"):
        check_fields(padded, "another model", casts=False)
    held_out = job(tmp_path, data=Data(folder=str(tmp_path), holdout=0.1))
    with pytest.raises(DataError, match=r"data\.holdout holds out documents of text"):
        sources_of(held_out)["train.csv"].open_images()


def test_a_list_without_files_or_of_what_is_trained_on_says_so(tmp_path: Path) -> None:
    images(tmp_path)
    same = Validation(enable=True, dataset_path=str(tmp_path / "train.csv"))
    with pytest.raises(DataError, match=r"also training data: choose other"):  # no holdout
        check_held_out(job(tmp_path, validation=same))
    for text in ("path\n", "text,label\nhello,1\n"):
        (tmp_path / "train.csv").write_text(text)
        with pytest.raises(DataError, match=r"train\.csv lists no \.npy, \.npz or \.safetensors"):
            opened(job(tmp_path))


def test_instance_norm_is_per_channel_and_image() -> None:
    pixels = torch.randint(0, 60_000, (2, 3, 8, 8)).to(torch.uint16)
    found = instance_norm(pixels)
    assert found.dtype == torch.float32
    assert found.mean(dim=(-2, -1)).abs().max() < 1e-5
    assert (found.var(dim=(-2, -1), correction=0) - 1).abs().max() < 1e-4
    assert instance_norm(torch.full((1, 1, 4, 4), 7.0)).abs().max() == 0


def test_memory_of_a_batch_is_used_again_only_when_nobody_holds_it() -> None:
    shape = (2, 1 << 20)
    first = empty_array(shape, np.uint8)
    place = first.__array_interface__["data"][0]
    row = torch.from_numpy(first)[1]
    del first
    other = empty_array(shape, np.uint8)
    assert other.__array_interface__["data"][0] != place  # a row of a tensor still holds it
    del row
    again = empty_array(shape, np.uint8)
    assert again.__array_interface__["data"][0] == place


def test_shapes_are_functions_of_their_number_and_none_is_held_out_twice(tmp_path: Path) -> None:
    config = job(tmp_path, training=Training(dataset="shapes"), images=Images(count=8))
    trained, held = (
        WantedSource(config, "training", name, DataSource()).made_images() for name in MADE[1:]
    )
    assert trained is not None
    assert held is not None
    found = []
    for source in (trained, held, trained):
        pixels = np.empty((8, 1, 32, 32), np.float32)
        for number, image in enumerate(pixels):
            source.fill(number, image)
        found.append(pixels)
    assert np.array_equal(found[0], found[2])
    assert len({image.tobytes() for image in np.concatenate(found[:2])}) == 16
    assert trained.fingerprint != held.fingerprint
    words = job(tmp_path, model=Model(), training=Training(dataset="shapes"))
    with pytest.raises(DataError, match="shapes are images, but llama3 does not take images"):
        opened(words)
