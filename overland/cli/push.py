"""`overland push`: a folder to a Hub."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from overland.cli.errors import user_errors


class RepoType(StrEnum):
    model = "model"
    dataset = "dataset"


@user_errors
def push(
    folder: Annotated[Path, typer.Argument(help="What to upload, such as RUN/hf.")],
    name: Annotated[str, typer.Argument(help="OWNER/NAME on the Hub; made if not there.")],
    repo_type: Annotated[
        RepoType, typer.Option("--type", help="model or dataset.", show_choices=False)
    ] = RepoType.model,
    private: Annotated[bool, typer.Option("--private", help="For your eyes alone.")] = False,
    revision: Annotated[
        str | None, typer.Option(help="Branch; made if not there; default: main.")
    ] = None,
    message: Annotated[str | None, typer.Option(help="Of the commit.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Upload a folder, such as the weights in RUN/hf, and compare what arrived. HF_ENDPOINT and
    HF_TOKEN are respected."""
    from overland.tools.hub.push import push as push_files

    done = push_files(
        folder.expanduser(),
        name,
        repo_type=repo_type.value,
        private=private,
        revision=revision,
        message=message,
        bars=sys.stderr.isatty(),
    )
    size = sum(done.files.values())
    if as_json:
        facts = {"commit": done.commit, "url": done.url, "files": done.files, "bytes": size}
        print(json.dumps(facts, indent=2))
        return
    print(f"{done.url}: {len(done.files)} files, {size / 1e6:,.1f} MB, commit {done.commit[:12]}")
    print("verified: the Hub's sizes and hashes are those of the files here")
