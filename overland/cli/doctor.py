"""`overland doctor`: runs the checks of the environment, quick ones first, and prints them; the
checks are in `cluster/doctor/`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from overland.cli.common import complete_site, verb
from overland.words import number_of

if TYPE_CHECKING:
    from overland.cluster.doctor import Finding
    from overland.cluster.site import NamedSite

WIDTH = 24


@verb
def doctor(
    config: Annotated[
        str | None, typer.Argument(help="Config or recipe to start once; default: quickstart.")
    ] = None,
    site: Annotated[
        str | None,
        typer.Option(
            help="Site name or file, to check what it needs.", autocompletion=complete_site
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check the environment, versions, caches and limits. Also starts the run once offline."""
    from overland.cluster.site import load_site

    findings = []
    for one in examine(config, load_site(site) if site else None):
        findings.append(one)
        if not as_json:
            print(f"{one.status:<8} {one.what:<{WIDTH}} {one.found}", flush=True)
            if one.way_out:
                print(f"{'':<8} {'':<{WIDTH}} → {one.way_out}", flush=True)
    counts = {kind: sum(one.status == kind for one in findings) for kind in ("error", "warning")}
    if as_json:
        print(json.dumps({**counts, "findings": [asdict(one) for one in findings]}, indent=2))
    else:
        numbers = [number_of(count, kind) for kind, count in counts.items()]
        print(f"\n{len(findings)} checks: {', '.join(numbers)}.")
    raise typer.Exit(1 if counts["error"] else 0)


def examine(config: str | None, site: NamedSite | None) -> Iterator[Finding]:
    """Yields findings as soon as they are known, quick checks first."""
    from overland.cluster.doctor import offline, session, software

    yield from session.check_session(site, os.environ)
    yield from session.check_places(site, os.environ)
    yield from software.check_software(site)
    yield from offline.check_offline_start(config, os.environ)
