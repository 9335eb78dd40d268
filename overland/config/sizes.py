"""Numbers of bytes, as a person reads them."""

from __future__ import annotations


def size(num_bytes: float) -> str:
    """In GB, or in MB or kB where that would be 0.0 GB."""
    for unit, bytes_of_unit in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= bytes_of_unit / 10:
            return f"{num_bytes / bytes_of_unit:,.1f} {unit}"
    return f"{num_bytes / 1e3:,.1f} kB"
