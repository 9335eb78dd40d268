"""The rules by which parameters and buffers start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Normal:
    std: float
    name: str  # of the random stream


@dataclass(frozen=True)
class Uniform:
    """Uniform from -bound to bound; None means 1 / √n, for a matrix with n inputs."""

    bound: float | None
    name: str  # of the random stream


@dataclass(frozen=True)
class Constant:
    value: float


Rule = Normal | Uniform | Constant
