"""Checks everything around a run that can be checked from here: `overland doctor`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from overland.cluster.doctor.finding import Finding
from overland.cluster.site import NamedSite

__all__ = ["Finding", "examine"]


def examine(
    config: str | None, site: NamedSite | None, env: Mapping[str, str] = os.environ
) -> Iterator[Finding]:
    """Yields findings as soon as they are known, quick checks first."""
    from overland.cluster.doctor.places import check_places
    from overland.cluster.doctor.session import check_session
    from overland.cluster.doctor.software import check_software
    from overland.cluster.doctor.start import check_offline_start

    yield from check_session(site, env)
    yield from check_places(site, env)
    yield from check_software(site)
    yield from check_offline_start(config, env)
