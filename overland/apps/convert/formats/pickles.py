"""Reads pickles without running them, within limits on their depth, size and cost;
`safe_globals.py` decides which names they may use.

A pickle is a program for a small stack machine, and Python's own machine lets that program import
and call anything. This one is given each opcode with its argument by `pickletools`, which only
reads, and knows only the opcodes that data needs. A name in a pickle is looked up
in a table (`safe_globals.py` has the one for checkpoints) and refused if the table lacks it; only a
`Maker` from that table can be called, and only stand-ins accept a state. So nothing that a file
names is ever imported, and a file cannot change any Python object of ours.

Data can do harm without running: a value that refers to another one over and over grows to any
size, and Python hashes, compares and prints nested values by recursion in C. So the cost of reading
is bounded by the length of the pickle, keys are flat, and the result is neither deep nor large even
when everything shared in it is expanded.
"""

from __future__ import annotations

import itertools
import pickletools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from overland.errors import CheckpointError
from overland.files import NOT_AS_EXPECTED

Names = Mapping[tuple[str, str], Any]
Persistent = Callable[[Any], Any]


@dataclass(frozen=True)
class Maker:
    """Stands for a class or function of the table; calling it returns the result of `make`."""

    name: str
    make: Callable[..., Any]


@dataclass(slots=True, eq=False, repr=False)
class StandIn:
    """An object of a known class as inert data: its class, arguments and state."""

    kind: str
    args: tuple[Any, ...] = ()
    state: Any = None

    def get(self, field: str, default: Any = None) -> Any:
        return self.state.get(field, default) if isinstance(self.state, dict) else default

    def __repr__(self) -> str:
        return f"<{self.kind}>"


def stand_in(kind: str) -> Maker:
    return Maker(kind, lambda *args: StandIn(kind, args))


def load_pickle(data: bytes, where: str, names: Names, persistent: Persistent | None = None) -> Any:
    """Returns the object in `data`; `where` names it in errors. `persistent` resolves keys that the
    pickle refers to: the storages of torch's files."""
    return _Machine(data, where, names, persistent).run()


# Objects created, in units of about 100 bytes of memory, and elements copied by makers, per byte of
# the pickle. Files of torch, DeepSpeed and DCP need less than 0.5.
COST_PER_BYTE, COST_OF_ANY = 1, 2**16
# The same for the result with everything shared expanded, as converting or printing it does.
EXTENT_PER_BYTE, EXTENT_OF_ANY = 64, 2**20
MAX_DEPTH = 100
MAX_INTEGER_BYTES = 1024


class _Machine:
    def __init__(
        self, data: bytes, where: str, names: Names, persistent: Persistent | None
    ) -> None:
        self.data, self.where, self.names, self.persistent = data, where, names, persistent
        self.at: int | None = 0
        self.argument: Any = None
        """What follows the current opcode: a number, a text, bytes, or the names of a class."""
        self.stack: list[Any] = []
        self.marked: list[list[Any]] = []
        """What was on the stack at each mark; the stack itself begins at the last one."""
        self.memo: dict[int, Any] = {}
        self.budget = COST_PER_BYTE * len(data) + COST_OF_ANY

    def run(self) -> Any:
        opcodes = pickletools.genops(self.data)
        try:
            for opcode, self.argument, self.at in opcodes:
                if opcode.name not in _ACTIONS:
                    raise self.refusal(f"has opcode {opcode.name}, which plain data does not need")
                _ACTIONS[opcode.name](self)
            (value,) = self.stack
            self.check_extent(value)
            return value
        except NOT_AS_EXPECTED as error:  # in our code, or in a maker
            raise CheckpointError(
                f"{self.where} is not a readable pickle: {type(error).__name__} "
                f"at byte {self.at}; the file is damaged"
            ) from None

    def refusal(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.where} {why}; nothing was run")

    def spend(self, cost: int) -> None:
        self.budget -= cost
        if self.budget < 0:
            raise self.refusal(
                f"would grow far beyond its {len(self.data)} bytes, like a file designed to "
                "exhaust memory"
            )

    def check_extent(self, value: Any) -> None:
        """Raises for results that cannot be traversed safely: too deep, cyclic, or with values
        shared so often that expanding them never ends."""
        limit = EXTENT_PER_BYTE * len(self.data) + EXTENT_OF_ANY
        extents: dict[int, int] = {}  # by identity; 0 while in progress

        def extent_of(value: Any, depth: int) -> int:
            if isinstance(value, (str, bytes)):
                return 1 + len(value) // 16
            if not isinstance(value, _CONTAINERS):
                return 1
            if known := extents.get(id(value)):
                return known
            if id(value) in extents or depth > MAX_DEPTH:
                raise self.refusal(f"holds values nested more than {MAX_DEPTH} deep or in a cycle")
            extents[id(value)] = 0
            extent = 1
            for child in _inside(value):
                extent += extent_of(child, depth + 1)
                if extent > limit:
                    raise self.refusal(
                        f"refers to the same values so often that its {len(self.data)} bytes would "
                        "be endless when expanded"
                    )
            extents[id(value)] = extent
            return extent

        extent_of(value, 0)

    def mark(self) -> None:
        self.marked.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.marked.pop()
        return items

    def named(self, module: Any, name: Any) -> Any:
        # Only strings are looked up: hashing a nested tuple can take forever, or crash.
        is_name = type(module) is type(name) is str
        if not is_name or (module, name) not in self.names:
            shown = f"{module:.100}.{name:.100}" if is_name else "something"
            raise self.refusal(f"names {shown}, which is not on the list of known classes")
        return self.names[module, name]

    def call(self, function: Any, args: Any) -> Any:
        if not isinstance(function, Maker) or not isinstance(args, tuple):
            raise self.refusal(f"calls {type(function).__name__} with {type(args).__name__}")
        self.spend(4 + len(args) + sum(len(one) for one in args if isinstance(one, _SIZED)))
        return function.make(*args)


Action = Callable[[_Machine], Any]


def _push(value: Callable[[_Machine], Any], cost: int = 0) -> Action:
    """Pushes a value; a new object costs memory."""

    def action(machine: _Machine) -> None:
        machine.spend(cost)
        pushed = value(machine)  # which may change what the stack is
        machine.stack.append(pushed)

    return action


def _collect(kind: Callable[[list[Any]], Any], cost: int = 1) -> Action:
    return _push(lambda machine: kind(machine.since_mark()), cost)


_CONTAINERS = (dict, list, tuple, set, frozenset, StandIn)
_SIZED = (str, bytes, dict, list, tuple, set, frozenset)


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        return itertools.chain(value, value.values())
    if isinstance(value, StandIn):
        return iter((value.args, value.state))
    return iter(value if isinstance(value, (list, tuple, set, frozenset)) else ())


_PLAIN = (str, int, float, bytes, type(None))
MAX_ODD_KEYS = 1000


def as_keys(values: Iterable[Any], already: int = 0) -> list[Any]:
    """Returns values that may be keys, or members of a set that already has `already` members;
    raises for others. Hashes of strings are salted, and small numbers are their own hashes; other
    numbers, and tuples, can be chosen to collide, which makes a large dict as slow as a list."""
    keys = list(values)
    for key in keys:
        if isinstance(key, (str, bytes, StandIn)) or key is None:
            continue
        if isinstance(key, int) and -(2**32) < key < 2**32:
            continue
        flat = key if isinstance(key, tuple) and len(key) <= 64 else (key,)
        if already + len(keys) > MAX_ODD_KEYS or not all(isinstance(one, _PLAIN) for one in flat):
            raise TypeError
    return keys


def as_dict(pairs: Any = ()) -> dict[Any, Any]:
    """Returns a dict of pairs, or of those in another dict."""
    pairs = pairs.items() if isinstance(pairs, dict) else pairs
    return _pairs([one for key, value in pairs for one in (key, value)])


def _pairs(items: list[Any], already: int = 0) -> dict[Any, Any]:
    return dict(zip(as_keys(items[::2], already), items[1::2], strict=True))


def _extend(machine: _Machine, kind: type[Any], items: list[Any]) -> None:
    """Adds items to the list, dict or set on top of the stack."""
    target = machine.stack[-1]
    if not isinstance(target, kind):
        raise TypeError
    if isinstance(target, list):
        target.extend(items)
    elif isinstance(target, dict):
        target.update(_pairs(items, len(target)))
    else:
        target.update(as_keys(items, len(target)))


def _last(machine: _Machine, count: int) -> list[Any]:
    if len(machine.stack) < count:
        raise IndexError
    items = machine.stack[-count:]
    del machine.stack[-count:]
    return items


def _remember(machine: _Machine, place: int) -> None:
    machine.spend(1)
    machine.memo[place] = machine.stack[-1]


def _persistent(machine: _Machine) -> Any:
    (key,) = _last(machine, 1)
    if machine.persistent is None:
        raise machine.refusal("refers to data outside itself")
    return machine.persistent(key)


def _build(machine: _Machine) -> None:
    (state,) = _last(machine, 1)
    built = machine.stack[-1]
    if isinstance(built, StandIn):
        built.state = state
    elif not isinstance(built, OrderedDict):  # the _metadata of a state_dict is not needed
        raise machine.refusal(f"gives a state to {type(built).__name__}")


def _reduce(machine: _Machine) -> Any:
    function, args = _last(machine, 2)
    return machine.call(function, args)


def _new_with_keywords(machine: _Machine) -> Any:
    function, args, keywords = _last(machine, 3)
    if keywords != {}:
        raise machine.refusal("makes an object with keyword arguments")
    return machine.call(function, args)


def _argument(machine: _Machine) -> Any:
    value = machine.argument
    if isinstance(value, int) and value.bit_length() > 8 * MAX_INTEGER_BYTES:
        raise ValueError
    return bytes(value) if isinstance(value, bytearray) else value


def _check_protocol(machine: _Machine) -> None:
    if machine.argument > 5:
        raise machine.refusal(f"has pickle protocol {machine.argument}, but 5 is the newest known")


VALUES = (
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT BINUNICODE SHORT_BINUNICODE "
    "BINUNICODE8 BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8"
)
_ACTIONS: dict[str, Action] = {
    **dict.fromkeys(VALUES.split(), _push(_argument)),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), lambda m: _remember(m, m.argument)),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _push(lambda m: m.memo[m.argument])),
    "MEMOIZE": lambda m: _remember(m, len(m.memo)),
    "PROTO": _check_protocol,
    "FRAME": lambda m: None,  # only a hint for streams
    "STOP": lambda m: None,
    "MARK": lambda m: m.mark(),
    "POP": lambda m: m.stack.pop(),
    "POP_MARK": lambda m: m.since_mark(),
    "DUP": _push(lambda m: m.stack[-1]),
    "NONE": _push(lambda m: None),
    "NEWTRUE": _push(lambda m: True),
    "NEWFALSE": _push(lambda m: False),
    "EMPTY_LIST": _push(lambda m: [], 1),
    "EMPTY_DICT": _push(lambda m: {}, 1),
    "EMPTY_SET": _push(lambda m: set(), 3),
    "EMPTY_TUPLE": _push(lambda m: ()),
    "TUPLE1": _push(lambda m: tuple(_last(m, 1)), 1),
    "TUPLE2": _push(lambda m: tuple(_last(m, 2)), 1),
    "TUPLE3": _push(lambda m: tuple(_last(m, 3)), 1),
    "TUPLE": _collect(tuple),
    "LIST": _collect(list),
    "DICT": _collect(_pairs),
    "FROZENSET": _collect(lambda items: frozenset(as_keys(items)), 3),
    "APPEND": lambda m: _extend(m, list, _last(m, 1)),
    "APPENDS": lambda m: _extend(m, list, m.since_mark()),
    "SETITEM": lambda m: _extend(m, dict, _last(m, 2)),
    "SETITEMS": lambda m: _extend(m, dict, m.since_mark()),
    "ADDITEMS": lambda m: _extend(m, set, m.since_mark()),
    "GLOBAL": _push(lambda m: m.named(*m.argument.split(" ", 1))),
    "STACK_GLOBAL": _push(lambda m: m.named(*_last(m, 2))),
    "REDUCE": _push(_reduce),
    "NEWOBJ": _push(_reduce),
    "NEWOBJ_EX": _push(_new_with_keywords),
    "BUILD": _build,
    "BINPERSID": _push(_persistent),
}
