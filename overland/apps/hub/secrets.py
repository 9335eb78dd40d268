"""Finds what must not be published: files whose names suggest secrets, and keys inside any file.

The list is in docs/fetch.md. Values of environment variables that look like secrets are searched
for too, whatever their form.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from overland.cluster.script import SHORTEST_SECRET
from overland.config.paths import SECRET
from overland.errors import HubError

FOLDERS = {".ssh", ".aws", ".gnupg", ".kube", ".docker"}
NAMES = (
    ".env", ".env.*", ".envrc", ".netrc", "_netrc", "*credential*", ".pypirc", ".npmrc", ".pgpass",
    ".htpasswd", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "*.pem", "*.key", "*.p12",
    "*.pfx", "*.ppk", "kubeconfig", "stored_tokens",
)  # fmt: skip
# What it is, a prefix to search for first (fast, in gigabytes of weights), and the full pattern.
KEYS = [
    (kind, start.encode(), re.compile(pattern.encode()))
    for kind, start, pattern in [
        ("a Hugging Face token", "hf_", r"hf_[A-Za-z0-9]{34}"),
        ("a Hugging Face token", "api_org_", r"api_org_[A-Za-z0-9]{34}"),
        ("an AWS key", "AKIA", r"AKIA[0-9A-Z]{16}(?![0-9A-Za-z])"),
        ("an AWS key", "ASIA", r"ASIA[0-9A-Z]{16}(?![0-9A-Za-z])"),
        ("a Google Cloud key", "AIza", r"AIza[0-9A-Za-z_-]{35}"),
        ("an Azure key", "AccountKey=", r"AccountKey=[A-Za-z0-9+/]{86}=="),
        ("a GitHub token", "github_pat_", r"github_pat_[A-Za-z0-9_]{60}"),
        *(("a GitHub token", f"gh{c}_", rf"gh{c}_[A-Za-z0-9]{{36}}") for c in "pousr"),
        ("an OpenAI key", "sk-proj-", r"sk-proj-[A-Za-z0-9_-]{40}"),
        ("an Anthropic key", "sk-ant-", r"sk-ant-[A-Za-z0-9_-]{40}"),
        ("a Slack token", "xox", r"xox[abprs]-[0-9A-Za-z-]{20}"),
        ("a private key", "PRIVATE KEY-----", r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY-----"),
    ]
]
LONGEST_KEY = 128
BLOCK = 1 << 22  # bytes read at a time


def refuse_secret_files(folder: Path, files: list[str]) -> None:
    """Raises an error for files with secrets: checks names first, then every byte."""
    for file in files:
        if looks_secret(file):
            raise HubError(
                f"{folder / file} looks like a file with keys or passwords: remove it from the "
                "folder before pushing"
            )
    values = {
        f"the value of {name}": value.encode()
        for name, value in os.environ.items()
        if SECRET.search(name) and len(value) >= SHORTEST_SECRET
    }
    for file in files:
        if found := secret_in(folder / file, values):
            raise HubError(f"{folder / file} contains {found}: remove it before pushing")


def looks_secret(file: str) -> bool:
    path = PurePosixPath(file.lower())
    named = any(fnmatchcase(path.name, pattern) for pattern in NAMES) and path.suffix != ".pub"
    return named or not FOLDERS.isdisjoint(path.parts)


def secret_in(path: Path, values: Mapping[str, bytes]) -> str | None:
    """Returns the first secret in the file, which is read in blocks that overlap by the longest
    one."""
    overlap = max([LONGEST_KEY, *map(len, values.values())])
    end = b""
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            text = end + block
            for name, value in values.items():
                if value in text:
                    return name
            for kind, start, pattern in KEYS:
                if start in text and pattern.search(text):
                    return kind
            end = text[-overlap:]
    return None
