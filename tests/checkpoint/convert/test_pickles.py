"""The pickle machine reads data as Python's does, and nothing but data."""

from __future__ import annotations

import contextlib
import pickle
from collections import OrderedDict, defaultdict

import pytest

from overland.apps.convert.formats.pickles import load_pickle
from overland.apps.convert.formats.safe_globals import SAFE_GLOBALS
from overland.errors import CheckpointError

DATA = [
    None, True, False, 0, -1, 255, 65536, -(2**40), 2**70, -(2**2000), 1.5, float("inf"), "", "ü\n",
    "x" * 300, b"", b"\x00\xff" * 200, [], [1, [2, [3]]], (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4),
    {}, {"a": {"b": (1, None)}, 3: "c"}, set(), {1, 2}, frozenset({"a"}), bytearray(b"abc"),
    OrderedDict([("z", 1), ("a", [2])]), 1 + 2j, list(range(3000)),
    {i: str(i) for i in range(3000)},
]  # fmt: skip


@pytest.mark.parametrize("protocol", range(1, 6))
def test_plain_data_is_read_as_python_reads_it(protocol: int) -> None:
    for value in DATA:
        read = load_pickle(pickle.dumps(value, protocol), "test", SAFE_GLOBALS)
        assert read == value, value
        assert type(read) is (bytes if isinstance(value, bytearray) else type(value))
    shared = [1]
    first, second = load_pickle(pickle.dumps([shared, shared], protocol), "test", SAFE_GLOBALS)
    assert first is second
    counted = defaultdict(list, {"a": [1]})
    assert load_pickle(pickle.dumps(counted, protocol), "test", SAFE_GLOBALS) == {"a": [1]}


def test_every_cut_is_an_error_and_not_a_crash() -> None:
    data = pickle.dumps({"a": [1, (2, "three")], "b": OrderedDict(x=1.5)}, 4)
    for end in range(len(data)):
        with pytest.raises(CheckpointError):
            load_pickle(data[:end], "test", SAFE_GLOBALS)


def test_every_changed_byte_is_read_or_refused() -> None:
    data = bytearray(pickle.dumps({"a": [1, (2, "three")], "b": OrderedDict(x=1.5)}, 2))
    for place in range(len(data)):
        for value in range(0, 256, 5):
            changed = bytearray(data)
            changed[place] = value
            with contextlib.suppress(CheckpointError):
                load_pickle(bytes(changed), "test", SAFE_GLOBALS)


@pytest.mark.parametrize(
    "program",
    [
        b"\x80\x02cos\nsystem\nU\x04true\x85R.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
        b"\x80\x02cbuiltins\neval\nU\x011\x85R.",
        b"\x80\x02ctorch.hub\nload\n.",
        b"\x80\x02(U\x02id\nios\nsystem\n.",  # INST
        b"\x80\x02(cos\nsystem\nU\x02ido.",  # OBJ
        b"\x80\x02\x82\x01.",  # EXT1
        b"\x80\x02Pkey\n.",  # PERSID
        b"\x80\x02U\x01aQ.",  # BINPERSID, and nothing outside to refer to
        b"\x80\x04\x8c\x08builtins\x8c\x04list\x93}\x8c\x04evil\x8c\x01xsb.",  # BUILD on a Maker
        b"\x80\x02]}b.",  # BUILD on a list
        b"\x80\x02)\x8c\x01a\x86R.",  # REDUCE of what is no function
        b"\x80\x02cbuiltins\nset\n]R.",  # arguments that are no tuple
    ],
)
def test_programs_are_refused(program: bytes) -> None:
    with pytest.raises(
        CheckpointError, match=r"nothing was run|cannot be read|can be read|is not a readable"
    ):
        load_pickle(program, "test", SAFE_GLOBALS)


def test_a_refusal_names_file_and_class() -> None:
    with pytest.raises(CheckpointError) as error:
        load_pickle(b"\x80\x02cos\nsystem\nU\x04true\x85R.", "model.pt", SAFE_GLOBALS)
    assert str(error.value) == (
        "model.pt names os.system, which is not on the list of known classes; nothing was run"
    )


def test_a_memo_number_costs_no_memory() -> None:
    """Python's own machine makes room for all numbers below it: 64 GB for these ten bytes."""
    assert load_pickle(b"\x80\x02Nr\xff\xff\xff\xff.", "test", SAFE_GLOBALS) is None


def test_depth_is_no_crash() -> None:
    as_key = b"\x80\x02})" + b"\x85" * 200_000 + b"Ns."
    with pytest.raises(CheckpointError):
        load_pickle(as_key, "test", SAFE_GLOBALS)
