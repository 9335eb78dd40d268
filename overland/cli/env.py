"""`overland env`: the one-time set-up of a cluster, as a script."""

from __future__ import annotations

from typing import Annotated

import typer

from overland.cli.errors import user_errors


@user_errors
def env(
    site: Annotated[
        str | None, typer.Argument(help="A site's name or file.", show_default=False)
    ] = None,
) -> None:
    """Print the one-time set-up script of a cluster, with reasons: overland env SITE > setup.sh"""
    from overland.cli.submit import list_sites
    from overland.tools.jobs.script import render_setup
    from overland.tools.jobs.site import load_site

    if site is None:
        print(list_sites())
        return
    print(render_setup(load_site(site)), end="")
