"""The one-time set-up of a cluster, as a script with reasons."""

from __future__ import annotations

import sys
from pathlib import Path

from overland.tools.jobs.script import template
from overland.tools.jobs.site import NamedSite

DEFAULT_ROCM = "7.2"


def render_setup(site: NamedSite) -> str:
    facts = site.facts
    return template("setup.sh.j2").render(
        site=site,
        facts=facts,
        setup=facts.setup,
        rocm=facts.setup.rocm or DEFAULT_ROCM,
        source=source(),
    )


def source() -> str:
    """What pip installs Overland from: this checkout, or the package by name."""
    checkout = Path(__file__).resolve().parents[3]
    return str(checkout) if (checkout / "pyproject.toml").is_file() else "overland"


def session_file() -> Path | None:
    """The file that the set-up wrote beside its environments, if this Python is one of them."""
    file = Path(sys.prefix).parent.parent / "overland.sh"
    return file if Path(sys.prefix).parent.name == "envs" and file.is_file() else None
