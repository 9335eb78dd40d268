"""Checks that scratch and caches are writable, have room, and are not in a small home."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from overland.cluster.doctor.finding import Finding, failure, ok, warning
from overland.cluster.site import NamedSite

LITTLE = 5e9  # bytes free: less than a shard of weights or a torch build


@dataclass(frozen=True)
class CacheFolder:
    variable: str
    default: str
    what: str
    accelerator: str | None = None
    """The only accelerator it matters for."""


CACHES = (
    CacheFolder("XDG_CACHE_HOME", "~/.cache", "caches without their own variable"),
    CacheFolder("HF_HOME", "$XDG_CACHE_HOME/huggingface", "Hugging Face's files"),
    CacheFolder("TRITON_CACHE_DIR", "~/.triton/cache", "compiled kernels"),
    CacheFolder("TORCHINDUCTOR_CACHE_DIR", "/tmp/torchinductor_$USER", "compiled models"),
    CacheFolder("MIOPEN_USER_DB_PATH", "~/.config/miopen", "MIOpen's choices", "amd"),
    CacheFolder("MIOPEN_CUSTOM_CACHE_DIR", "$XDG_CACHE_HOME/miopen", "MIOpen's kernels", "amd"),
)


def check_places(site: NamedSite | None, env: Mapping[str, str]) -> Iterator[Finding]:
    yield check_scratch(site, env)
    accelerator = site.facts.accelerator if site else None
    for cache in CACHES:
        if cache.accelerator in (None, accelerator):
            yield check_cache(cache, site, env)


def check_scratch(site: NamedSite | None, env: Mapping[str, str]) -> Finding:
    root = env.get("SCRATCH_ROOT")
    if not root:
        advice = site.facts.disk.scratch if site else None
        if site and site.facts.scheduler == "slurm":
            way = f"export SCRATCH_ROOT={advice or 'your folder on the scratch file system'}"
            return warning("SCRATCH_ROOT", "not set: `overland fetch` writes below here", way)
        return ok("SCRATCH_ROOT", "not set: `overland fetch` writes into ./assets and ./data")
    folder = Path(root).expanduser()
    if not folder.is_dir():
        return failure("SCRATCH_ROOT", f"{folder} is not a folder", "create it, or set another")
    return check_writable("SCRATCH_ROOT", folder, "another folder")


def check_cache(cache: CacheFolder, site: NamedSite | None, env: Mapping[str, str]) -> Finding:
    if cache.variable not in env and site and cache.variable in site.facts.environment:
        return ok(cache.variable, f"set in every job of {site.name}")
    path = cache_path(cache, env)
    finding = check_writable(cache.variable, path, f"export {cache.variable}=… elsewhere")
    if finding.status != "ok":
        return finding
    home, scratch = Path(env.get("HOME", "~")).expanduser(), env.get("SCRATCH_ROOT")
    on_scratch = scratch and not Path(scratch).expanduser().is_relative_to(home)
    if on_scratch and path.is_relative_to(home):
        name = cache.variable.removesuffix("_DIR").removesuffix("_HOME").lower()
        way = f"export {cache.variable}=$SCRATCH_ROOT/{name}"
        return warning(cache.variable, f"{path}: {cache.what}, in home rather than scratch", way)
    return finding


def cache_path(cache: CacheFolder, env: Mapping[str, str]) -> Path:
    home = env.get("HOME", str(Path("~").expanduser()))
    said = env.get(cache.variable) or cache.default
    general = env.get("XDG_CACHE_HOME") or f"{home}/.cache"
    user = env.get("USER") or str(os.getuid())
    said = said.replace("$XDG_CACHE_HOME", general).replace("$USER", user)
    return Path(home + said[1:] if said.startswith("~") else said)


def check_writable(what: str, path: Path, way_out: str) -> Finding:
    """Checks that a folder is writable and has room; one that does not exist yet is judged by its
    nearest existing parent."""
    there = next((one for one in (path, *path.parents) if one.exists()), Path("/"))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return failure(what, f"{path} is not writable", way_out)
    free = shutil.disk_usage(there).free
    shown = f"{path}, {free / 1e9:,.0f} GB free"
    return warning(what, shown, f"free space, or {way_out}") if free < LITTLE else ok(what, shown)
