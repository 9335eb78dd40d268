"""Checks the shell or job: offline switches, proxies, Slurm, leftover ranks, limits and tokens; and
that scratch and caches are writable, have room, and are not in a small home."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from overland.cluster.doctor import Finding, failure, ok, warning
from overland.cluster.site import NamedSite

OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy")
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OPEN_FILES = 4096  # a loader, its sockets and a thousand shards
LOCKED_BYTES = 1 << 30  # what network drivers pin per rank
LITTLE = 5e9  # bytes free: less than a shard of weights or a torch build


class CacheFolder(NamedTuple):
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


def check_session(site: NamedSite | None, env: Mapping[str, str]) -> Iterator[Finding]:
    yield check_offline(env)
    yield check_proxies(site, env)
    yield check_slurm(site)
    yield check_ranks(env)
    yield from check_limits(
        resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        site,
    )
    yield check_token(env)
    yield from check_token_files(env)


def check_offline(env: Mapping[str, str]) -> Finding:
    are_set = [name for name in OFFLINE if env.get(name, "0").lower() not in ("", "0", "false")]
    if "SLURM_JOB_ID" in env:
        missing = [name for name in OFFLINE if name not in are_set]
        if missing:
            way = f"export {' '.join(f'{name}=1' for name in missing)}"
            found = f"{', '.join(missing)} not set in a job: a library may wait for a network"
            return warning("offline", found, f"{way}; `overland submit` does this automatically")
        return ok("offline", "all switches are set")
    if are_set:
        found = f"{', '.join(are_set)} set outside of a job: fetch and push will not work"
        return warning("offline", found, f"unset {' '.join(are_set)} to fetch")
    return ok("offline", "not in a job; `overland submit` sets the switches in every job")


def check_proxies(site: NamedSite | None, env: Mapping[str, str]) -> Finding:
    # Only the names: the address of a proxy may contain a password.
    are_set = [name for one in PROXIES for name in (one, one.upper()) if env.get(name)]
    if not are_set:
        return ok("proxies", "none")
    if "SLURM_JOB_ID" in env and (site is None or site.facts.proxies == "off"):
        found = f"{', '.join(are_set)} set in a job: clients may hang on the proxy"
        return warning("proxies", found, f"unset {' '.join(are_set)}")
    return ok("proxies", f"{', '.join(are_set)}, for fetch and push")


def check_slurm(site: NamedSite | None) -> Finding:
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        if site is not None and site.facts.scheduler == "slurm":
            way = f"go to a login node of {site.name}, or load its module"
            return failure("slurm", "sbatch was not found", way)
        return ok("slurm", "not found; `overland train` does not need it")
    try:
        done = subprocess.run([sbatch, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return failure("slurm", f"sbatch does not start: {error}", "ask the site's support")
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        if site is not None and site.facts.scheduler == "slurm":
            return failure("slurm", f"sbatch fails: {why}", "ask the site's support")
        return warning("slurm", f"sbatch fails: {why}", "only `overland submit` needs it")
    return ok("slurm", done.stdout.strip())


def check_ranks(env: Mapping[str, str]) -> Finding:
    left = [name for name in RANKS if env.get(name)]
    if left and "TORCHELASTIC_RUN_ID" not in env:
        found = f"{', '.join(left)} set in this shell: `overland train` would wait for other ranks"
        return warning("ranks", found, f"unset {' '.join(left)}")
    return ok("ranks", "no leftover variables")


def check_limits(files: int, locked: int, site: NamedSite | None) -> Iterator[Finding]:
    unlimited = resource.RLIM_INFINITY
    if files != unlimited and files < OPEN_FILES:
        yield warning("open files", f"{files} at most", f"ulimit -n {OPEN_FILES}")
    else:
        yield ok("open files", "unlimited" if files == unlimited else f"{files} at most")
    shown = "unlimited" if locked == unlimited else f"{locked / 2**20:,.0f} MiB at most"
    # Only RDMA networks pin a lot of memory.
    on_cluster = site is not None and site.facts.scheduler == "slurm"
    if on_cluster and locked != unlimited and locked < LOCKED_BYTES:
        way = "ulimit -l unlimited; in a job, Slurm's PropagateResourceLimits decides"
        yield warning("locked memory", shown, way)
    else:
        yield ok("locked memory", shown)


def check_token(env: Mapping[str, str]) -> Finding:
    if env.get("HF_TOKEN"):
        return ok("HF_TOKEN", "set; its value is never shown")
    return ok("HF_TOKEN", "not set: open models can be fetched, gated ones cannot")


def check_token_files(env: Mapping[str, str]) -> Iterator[Finding]:
    """Checks the token files that Hugging Face's own tools store; Overland does not read them."""
    home = cache_path(next(one for one in CACHES if one.variable == "HF_HOME"), env)
    token = Path(env.get("HF_TOKEN_PATH") or home / "token")
    for path in (token, token.with_name("stored_tokens")):
        try:
            mode = path.stat().st_mode & 0o777
        except OSError:
            continue
        if mode & 0o077:
            found = f"{path} can be read by others (mode {mode:o})"
            yield warning("token file", found, f"chmod 600 {path}")


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
