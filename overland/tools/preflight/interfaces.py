"""The network interfaces that training was told to use."""

from __future__ import annotations

import os
from collections.abc import Mapping

from overland.errors import ClusterError
from overland.world.wire import INTERFACES, Message, address_of_interface


def measure(env: Mapping[str, str] = os.environ) -> Message:
    """Address by name; those that are missing, or have none, as a sentence. Every name counts: NCCL
    spreads over all that are listed."""
    addresses: dict[str, str] = {}
    problems: list[str] = []
    for variable in INTERFACES:
        words = env.get(variable, "")
        if words.startswith("^"):  # those not to use; any other will do
            continue
        for name in filter(None, words.lstrip("=").split(",")):
            try:
                addresses[name] = address_of_interface(name, variable)
            except ClusterError as error:
                problems.append(str(error))
    return {"addresses": addresses, "problems": problems}
