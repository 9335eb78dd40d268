"""`overland fetch` and `overland push`: download and upload models, tokenizers and datasets. These
are the only verbs that need a network."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from overland.apps.progress import progress_bar
from overland.apps.streams import raw
from overland.cli.common import Json, verb
from overland.errors import HubError
from overland.words import number_of

if TYPE_CHECKING:
    from overland.apps.hub.fetch import Fetched, Report, Wanted


@verb
def fetch(
    kind: Annotated[
        Literal["model", "tokenizer", "dataset", "tasks"], typer.Argument(show_choices=False)
    ],
    names: Annotated[list[str], typer.Argument(metavar="NAME")],
    revision: str | None = None,
    subset: str | None = None,
    include: list[str] | None = None,
    to: Path | None = None,
    verify: bool = False,
    dry_run: bool = False,
    include_path: Path | None = None,
    as_json: Json = False,
) -> None:
    """Download a model, tokenizer, dataset or evaluation tasks. Interrupted downloads resume, and
    every byte is verified. HF_ENDPOINT and HF_TOKEN are respected.

    Args:
        kind: model, tokenizer, dataset or tasks.
        names: OWNER/NAME on the Hub; for tasks: their names, or @LIST.
        revision: Branch, tag or commit; default: main.
        subset: Subset (config) of a dataset.
        include: Fetch only files that match, e.g. '*.json'; repeatable.
        to: Target folder; default: a new one below $SCRATCH_ROOT.
        verify: Only verify what is already here; needs no network.
        dry_run: Tasks: only list their datasets; needs no network.
        include_path: Tasks: a folder with your own task definitions.
        as_json: Print JSON.
    """
    from overland.apps.hub.fetch import Wanted, default_folder
    from overland.apps.hub.fetch import fetch as fetch_files

    if kind == "tasks":
        refuse_options({"--revision": revision, "--subset": subset, "--include": include})
        fetch_for_tasks(names, include_path, to, dry_run or verify, as_json)
        return
    refuse_options({"--dry-run": dry_run, "--include-path": include_path}, "tasks")
    if len(names) > 1:
        raise typer.BadParameter(f"expected one name for a {kind}, got {len(names)}")
    (name,) = names
    folder = to.expanduser() if to is not None else default_folder(kind, name)
    wanted = Wanted(kind, name, revision, (subset,) if subset else (), tuple(include or ()))
    with progress_bar("fetching", "bytes", lines=True) as report:
        if verify:
            verify_fetched(wanted, folder, report, as_json)
            return
        done = fetch_files(wanted, folder, report)
    print_fetched(done, wanted, folder, as_json)


def refuse_options(given: dict[str, object], of: str = "a dataset") -> None:
    for option, value in given.items():
        if value:
            raise typer.BadParameter(f"applies only to {of}", param_hint=option)


def fetch_for_tasks(
    names: list[str], include_path: Path | None, to: Path | None, dry_run: bool, as_json: bool
) -> None:
    """Downloads the datasets that tasks read, or lists them."""
    from overland.apps.evaluation.task_data import fetch_tasks, in_words, task_names, tasks_root
    from overland.apps.evaluation.task_run import needs_of

    wanted = task_names(names)
    needs = needs_of(wanted, include_path)
    root = to.expanduser() if to is not None else tasks_root()
    failed: dict[str, str] = {}
    if not dry_run:
        with progress_bar("fetching", "bytes", lines=True) as report:
            failed = fetch_tasks(needs, root, report, lambda line: print(line, file=sys.stderr))
    if as_json:
        print(json.dumps(needs.to_json(root) | {"failed": failed}, indent=2))
    else:
        print(*in_words(needs, root), sep="\n")
    for name, why in failed.items():
        print(f"{name}: {why}", file=sys.stderr)
    if failed:
        raise HubError(f"{len(failed)} of {len(needs.datasets)} datasets could not be fetched")


def verify_fetched(wanted: Wanted, folder: Path, report: Report, as_json: bool) -> None:
    from overland.apps.hub.fetch import verify_folder

    problems = verify_folder(wanted, folder, report)
    if as_json:
        print(json.dumps({"folder": str(folder), "intact": not problems, "problems": problems}))
    for name, problem in problems.items():
        print(f"{problem}: {folder / name}", file=sys.stderr)
    if problems:
        print("Run the same command without --verify to fetch them again.", file=sys.stderr)
        raise typer.Exit(1)
    if not as_json:
        print(f"{folder}: every file matches the Hub's checksum")


def print_fetched(done: Fetched, wanted: Wanted, folder: Path, as_json: bool) -> None:
    from overland.apps.hub.fetch import config_lines

    snapshot = done.snapshot
    subset = wanted.subsets[0] if wanted.subsets else None
    lines = config_lines(wanted.kind, wanted.name, folder, subset)
    if as_json:
        facts = {
            "name": snapshot.name,
            "commit": snapshot.commit,
            "folder": str(folder),
            "files": len(snapshot.files),
            "bytes": snapshot.num_bytes,
            "fetched": done.fetched,
            "mended": done.mended,
            "config": lines,
        }
        print(json.dumps(facts, indent=2))
        return
    for name in done.mended:
        print(f"was damaged, fetched again: {name}")
    kept = len(snapshot.files) - len(done.fetched)
    files = number_of(len(snapshot.files), "file")
    print(
        f"{folder}: {snapshot.name} at commit {snapshot.commit[:12]}, {files}, "
        f"{snapshot.num_bytes / 1e6:,.1f} MB; {len(done.fetched)} fetched, {kept} already here, "
        "all verified"
    )
    print(f"\nIn a config:\n\n{lines}", end="")


@verb
def push(
    folder: Path,
    name: str,
    repo_type: Annotated[
        Literal["model", "dataset"], typer.Option("--type", show_choices=False)
    ] = "model",
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
    as_json: Json = False,
) -> None:
    """Upload a folder of weights or data to the Hugging Face Hub. What arrived is verified.
    HF_ENDPOINT and HF_TOKEN are respected.

    Args:
        folder: Folder to upload, such as RUN/hf.
        name: OWNER/NAME on the Hub; created if it does not exist.
        repo_type: model or dataset.
        private: Create the repository as private.
        revision: Branch, created if it does not exist; default: main.
        message: Commit message.
        as_json: Print JSON.
    """
    from overland.apps.hub.push import push as push_files

    with redirect_stderr(raw(sys.stderr)):  # where the client of the Hub draws its bars
        done = push_files(
            folder.expanduser(),
            name,
            repo_type=repo_type,
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
    files = number_of(len(done.files), "file")
    print(f"{done.url}: {files}, {size / 1e6:,.1f} MB, commit {done.commit[:12]}")
    print("verified: sizes and hashes on the Hub match the local files")
