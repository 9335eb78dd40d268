import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from overland.apps.ledger import read_ledger
from overland.data.batch import Batch
from overland.errors import DataError
from overland.training.ledger import Ledger
from overland.training.saving import digests

FIELDS = ("tokens_BS", "labels_BS", "positions_BS", "documents_BS")


def batch(seed: int = 0) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    return Batch({name: torch.randint(100, (4, 16), generator=draw) for name in FIELDS})


@pytest.mark.parametrize("field", FIELDS)
def test_every_change_of_a_row_shows_in_its_digest_alone(field: str) -> None:
    whole = digests(batch())
    changed = batch()
    changed[field][2, 7] += 1
    assert (digests(changed) != whole).tolist() == [False, False, True, False]


def test_two_tokens_in_each_others_place_show() -> None:
    swapped = batch()
    row = swapped["tokens_BS"][1]
    assert row[3] != row[4]
    row[3], row[4] = row[4].clone(), row[3].clone()
    assert (digests(swapped) != digests(batch())).tolist() == [False, True, False, False]


def test_digests_of_a_share_are_those_of_the_whole() -> None:
    parts = list(batch().split(1))
    assert torch.equal(torch.cat([digests(part) for part in parts]), digests(batch()))


def test_numbers_and_weights_of_rows_leave_the_digests_of_tokens_as_they_were() -> None:
    more = batch().replace(sample_B=torch.arange(4), epoch_B=torch.ones(4), weight_B=torch.ones(4))
    assert torch.equal(digests(more), digests(batch()))


def test_digests_are_of_the_bytes_of_any_array() -> None:
    draw = torch.Generator().manual_seed(0)
    fields = {
        "pixels": torch.rand(3, 3, 5, 7, generator=draw),  # 420 bytes a row: no whole words
        "mask": torch.rand(3, 11, generator=draw) > 0.5,
        "half": torch.rand(3, 4, generator=draw).bfloat16(),
        "sample_B": torch.arange(3),
    }
    whole = digests(Batch(fields))
    for name, values in fields.items():
        changed = {**fields, name: values.clone()}
        last = changed[name][1].view(-1)[-1]
        last.copy_(~last if values.dtype == torch.bool else last + 1)
        assert (digests(Batch(changed)) != whole).tolist() == [False, True, False]
    negative = digests(Batch({"x": -torch.zeros(3, 2)}))
    assert (negative != digests(Batch({"x": torch.zeros(3, 2)}))).all()
    as_words = {"x": fields["half"].view(torch.int64)}
    assert torch.equal(digests(Batch(as_words)), digests(Batch({"x": fields["half"]})))


def rows(step: int, count: int) -> np.ndarray:
    return np.arange(count * 3).reshape(count, 3) + 100 * step


def test_what_a_later_session_did_again_replaces_what_was_lost(tmp_path: Path) -> None:
    path = tmp_path / "run" / "ledger.bin"
    first = Ledger(path)
    first.mark(0, 0)
    first.add(1, 0, rows(1, 5))
    second = Ledger(path)
    second.mark(3, 3)  # resumed from the checkpoint of step 3
    assert list(read_ledger(path).fed) == [1, 2, 3], "what was undone does not count"
    second.add(4, 3, rows(70, 1))
    history = read_ledger(path)
    assert history.start == 0
    assert list(history.fed) == [1, 2, 3, 4]
    assert history.fed[4].digests.tolist() == rows(70, 1)[0].tolist()
    assert [fed.batch for fed in history.fed.values()] == [0, 1, 2, 3]


def test_a_record_torn_by_a_kill_costs_itself_alone(tmp_path: Path) -> None:
    path = tmp_path / "ledger.bin"
    ledger = Ledger(path)
    ledger.mark(0, 0)
    ledger.add(1, 0, rows(1, 4))
    ledger.add(5, 4, rows(5, 4))
    path.write_bytes(path.read_bytes()[:-5])
    assert list(read_ledger(path).fed) == [1, 2, 3, 4]
    Ledger(path).add(5, 4, rows(9, 1))
    assert list(read_ledger(path).fed) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("seed", range(20))
def test_a_flipped_bit_costs_one_record_at_most(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "ledger.bin"
    ledger = Ledger(path)
    ledger.mark(0, 0)
    for step in range(1, 21, 2):
        ledger.add(step, step - 1, rows(step, 2))
    data = bytearray(path.read_bytes())
    data[np.random.default_rng(seed).integers(40, len(data))] ^= 1 << (seed % 8)
    path.write_bytes(data)
    found = read_ledger(path).fed
    assert len(found) == 18
    assert all(fed.digests.tolist() == rows(step - (step + 1) % 2, 2)[(step + 1) % 2].tolist()
               for step, fed in found.items())  # fmt: skip


def test_what_a_full_disk_does_not_take_is_written_later(tmp_path: Path) -> None:
    path = tmp_path / "ledger.bin"
    ledger = Ledger(path)
    ledger.mark(0, 0)
    assert ledger.add(1, 0, rows(1, 2)) == ""
    path.rename(tmp_path / "written")
    path.symlink_to("/dev/full")
    assert "No space left on device" in ledger.add(3, 2, rows(3, 1))
    assert "No space left on device" in ledger.sync()
    path.unlink()
    (tmp_path / "written").rename(path)
    assert ledger.add(4, 3, rows(4, 1)) == ledger.sync() == ""
    assert list(read_ledger(path).fed) == [1, 2, 3, 4]
    assert not ledger.kept


def test_what_did_not_reach_the_disk_for_certain_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a sync has failed, the next one succeeds although the bytes are lost."""
    path = tmp_path / "ledger.bin"
    ledger = Ledger(path)
    ledger.mark(0, 0)
    ledger.add(1, 0, rows(1, 2))

    def fails(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        assert "Input/output error" in ledger.sync()
    path.write_bytes(b"")
    assert ledger.sync() == ""
    assert list(read_ledger(path).fed) == [1, 2]


def test_records_are_synced_before_they_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("overland.training.ledger.KEPT_BYTES", 500)
    ledger = Ledger(tmp_path / "ledger.bin")
    for step in range(1, 100):
        ledger.add(step, step - 1, rows(step, 1))
        assert sum(map(len, ledger.kept)) <= 500
    assert list(read_ledger(ledger.path).fed) == list(range(1, 100))


def test_what_the_spike_guard_leaves_out_is_marked(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.bin")
    ledger.mark(0, 0)
    ledger.add(1, 0, rows(1, 6))
    ledger.mark(4, 6, leaves_out=True)
    ledger.add(5, 6, rows(5, 1))
    history = read_ledger(ledger.path)
    assert history.marks[4].leaves_out
    assert not history.marks[0].leaves_out
    assert [fed.batch for fed in history.fed.values()] == [0, 1, 2, 3, 6]


def test_a_run_without_a_ledger_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"ledger\.bin does not exist"):
        read_ledger(tmp_path / "ledger.bin")
