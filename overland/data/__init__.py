"""Turns any corpus into exact, reproducible batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from overland.data.loader import build_train_loader as build_train_loader

__all__ = ["build_train_loader"]


def __getattr__(name: str) -> Any:
    """Imports the loader late, because it needs torch and most of this package does not."""
    if name == "build_train_loader":
        from overland.data.loader import build_train_loader

        return build_train_loader
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
