"""Files from others, read within bounds: whatever they hold, the end is a value or a ValueError.

Python's readers of JSON, TOML and YAML give up with a RecursionError where values are nested too
deep, and read files of any size. YAML names a value once and uses it many times, or inside itself,
so a few lines can stand for more than fits into any memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# An index of a large model's weights has megabytes, a config kilobytes.
LARGEST_JSON = 2**28
LARGEST_CONFIG = 2**22
DEEPEST = 50
MOST_VALUES = 100_000


def read_json(path: Path, most: int = LARGEST_JSON) -> Any:
    """What a JSON file holds. ValueError if it holds none or is too large; OSError as ever."""
    size = path.stat().st_size
    if size > most:
        raise ValueError(f"it has {size:,} bytes, and {most:,} are the most that is read")
    return parse_json(path.read_bytes())


def parse_json(text: bytes | str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its values are nested too deep") from None


def what_is_wrong(error: Exception) -> str:
    """What an error says about a foreign file whose structure is not the one that is read."""
    if isinstance(error, RecursionError):
        return "its values are nested too deep"
    if isinstance(error, KeyError):
        return f"{error} is missing"
    if isinstance(error, ValueError):
        return str(error)
    return "its structure is another"


def check_yaml(node: Any) -> None:
    """ValueError if the document is deep, holds itself, or is large with what it repeats written
    out. `node`: the composed document, in which what has a name is one object."""
    import yaml

    sizes: dict[int, int] = {}  # by identity; 0 while it is being looked at

    def size_of(node: Any, depth: int) -> int:
        if not isinstance(node, yaml.CollectionNode):
            return 1
        if known := sizes.get(id(node)):
            return known
        if id(node) in sizes or depth > DEEPEST:
            raise ValueError(f"its values are nested more than {DEEPEST} deep, or in a loop")
        sizes[id(node)] = 0
        pairs = isinstance(node, yaml.MappingNode)
        inside = [one for pair in node.value for one in pair] if pairs else node.value
        sizes[id(node)] = 1 + sum(size_of(one, depth + 1) for one in inside)
        if sizes[id(node)] > MOST_VALUES:
            raise ValueError(f"it holds more than {MOST_VALUES:,} values")
        return sizes[id(node)]

    size_of(node, 0)


def parse_yaml(text: str) -> Any:
    """What YAML of others holds, by its safe rules. ValueError for whatever is wrong with it."""
    import yaml

    if len(text) > LARGEST_CONFIG:
        raise ValueError(f"it has more than {LARGEST_CONFIG:,} letters")
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        check_yaml(node)
        return loader.construct_document(node) if node is not None else None
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(
            str(error).partition("\n")[0] or "its values are nested too deep"
        ) from None
