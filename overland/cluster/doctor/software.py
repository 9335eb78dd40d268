"""Checks Python, the PyTorch build, other packages, and the devices that PyTorch sees."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from overland.cluster.doctor import Finding, failure, ok, warning
from overland.cluster.site import NamedSite
from overland.words import command
from overland.world.devices import DRIVERS

PYTHON = (3, 11)
NOT_FOR_USERS = {"dev"}


@dataclass(frozen=True)
class Torch:
    """What the installed PyTorch was built for, and the devices that it sees."""

    version: str
    accelerator: str
    """nvidia, amd or none."""
    devices: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class Requirement:
    package: str
    minimum: str
    extra: str | None


def check_software(site: NamedSite | None) -> Iterator[Finding]:
    yield check_python(sys.version_info[:3])
    torch = look_at_torch()
    drivers = [name for name, path in DRIVERS.items() if Path(path).exists()]
    yield check_torch(torch, site, drivers)
    yield check_devices(torch, drivers)
    yield check_kernels(torch, can_use_triton)
    yield from check_requirements(requirements(), installed_versions())


def check_python(version: tuple[int, ...]) -> Finding:
    shown = ".".join(map(str, version))
    if version < PYTHON:
        return failure("python", shown, f"Overland needs {'.'.join(map(str, PYTHON))} or newer")
    return ok("python", f"{shown}, {sys.prefix}")


def look_at_torch() -> Torch:
    try:
        import torch
    except Exception as error:  # a build whose libraries are missing fails in many ways
        return Torch("", "none", error=str(error).partition("\n")[0] or type(error).__name__)
    kind = "amd" if torch.version.hip else "nvidia" if torch.version.cuda else "none"
    try:
        count = torch.cuda.device_count()
        names = tuple(torch.cuda.get_device_name(number) for number in range(count))
    except Exception as error:
        return Torch(torch.__version__, kind, error=str(error).partition("\n")[0])
    return Torch(torch.__version__, kind, names)


def check_torch(torch: Torch, site: NamedSite | None, drivers: list[str]) -> Finding:
    names = {"nvidia": "CUDA", "amd": "ROCm", "none": "CPUs only"}
    here = site.facts.accelerator if site else (drivers or ["none"])[0]
    way = f"`{command('overland', 'env', site.name if site else 'SITE')}` shows"
    if not torch.version:
        return failure("torch", f"cannot be imported: {torch.error}", f"{way} how to install it")
    shown = f"{torch.version}, built for {names[torch.accelerator]}"
    minimum = next((one.minimum for one in requirements() if one.package == "torch"), "2.11")
    if release(torch.version) < release(minimum):
        return failure(
            "torch", shown, f"Overland needs {minimum} or newer: {way} how to install it"
        )
    if here != "none" and torch.accelerator != here:
        where = f"{site.name} has" if site else "this machine has a driver for"
        needs = f"{where} {here.upper()} devices, which need the build for {names[here]}"
        return failure("torch", shown, f"{needs}: {way} how to install it")
    return ok("torch", shown)


def check_devices(torch: Torch, drivers: list[str]) -> Finding:
    if torch.devices:
        kinds = [f"{torch.devices.count(one)} × {one}" for one in dict.fromkeys(torch.devices)]
        return ok("devices", ", ".join(kinds))
    if drivers and torch.accelerator in drivers:
        why = f" ({torch.error})" if torch.error else ""
        way = "check that nvidia-smi or rocm-smi lists one, and CUDA_VISIBLE_DEVICES hides none"
        return failure("devices", f"there is a driver, but no device{why}", way)
    return ok("devices", "none, as on login nodes; runs here use the CPU")


def check_kernels(torch: Torch, can_use_triton: Callable[[], bool]) -> Finding:
    if torch.accelerator == "none":
        return ok("kernels", "plain PyTorch, as always on CPUs")
    if not torch.devices:
        return ok("kernels", "unknown without a device")
    if can_use_triton():
        return ok("kernels", "Triton works")
    way = "pip install the version of triton that torch requires"
    return warning("kernels", "no Triton: slower kernels of plain PyTorch are used", way)


def can_use_triton() -> bool:
    from overland.kernels import has_triton

    return has_triton()


def check_requirements(wanted: list[Requirement], versions: Mapping[str, str]) -> Iterator[Finding]:
    if not wanted:
        yield warning(
            "packages", "Overland is not installed, so its requirements are unknown",
            "install it, for example with `pip install --editable .`",
        )  # fmt: skip
        return
    by_extra: dict[str | None, list[Requirement]] = defaultdict(list)
    for one in wanted:
        by_extra[one.extra].append(one)
    base = by_extra.pop(None)
    lacking = [one for one in base if not is_met(one, versions)]
    if lacking:
        yield failure("packages", _shown(lacking, versions), f"pip install {_words(lacking)}")
    else:
        yield ok("packages", f"all {len(base)} are installed and new enough")
    for extra, some in sorted(by_extra.items(), key=lambda pair: str(pair[0])):
        lacking = [one for one in some if not is_met(one, versions)]
        what = f"extra {extra}"
        if not lacking:
            yield ok(what, ", ".join(f"{one.package} {versions[one.package]}" for one in some))
        elif any(one.package in versions for one in lacking):
            yield warning(what, _shown(lacking, versions), f"pip install {_words(lacking)}")
        else:
            missing = ", ".join(one.package for one in lacking)
            yield ok(what, f"not installed ({missing}): pip install 'overland[{extra}]'")


def is_met(wanted: Requirement, versions: Mapping[str, str]) -> bool:
    return wanted.package in versions and release(versions[wanted.package]) >= release(
        wanted.minimum
    )


def requirements() -> list[Requirement]:
    """Returns the requirements of the installed package."""
    try:
        lines = metadata.requires("overland") or []
    except metadata.PackageNotFoundError:
        return []
    found = []
    for line in lines:
        match = re.match(r"([\w.-]+)(?:\[[^\]]*\])?\s*(?:>=([\w.]+))?", line)
        extra = re.search(r"extra == ['\"](\w+)['\"]", line)
        if match and match[1] != "overland" and (not extra or extra[1] not in NOT_FOR_USERS):
            name = _plain(match[1])
            found.append(Requirement(name, match[2] or "0", extra[1] if extra else None))
    return found


def installed_versions() -> dict[str, str]:
    return {_plain(one.name): one.version for one in metadata.distributions() if one.name}


def release(version: str) -> tuple[int, ...]:
    """Returns the release as numbers: `2.13.0+cpu` is (2, 13, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else (0,)


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _shown(lacking: list[Requirement], versions: Mapping[str, str]) -> str:
    return ", ".join(
        f"{one.package} {versions[one.package]} is older than {one.minimum}"
        if one.package in versions
        else f"{one.package} is missing"
        for one in lacking
    )


def _words(lacking: list[Requirement]) -> str:
    return " ".join(f"'{one.package}>={one.minimum}'" for one in lacking)
