"""Converts a DCP folder, or a checkpoint of a run, to Meta's format, with `overland convert`.

OUTPUT_DIR gets consolidated.00.pth and params.json, and the same weights as checkpoint.pth.
"""

import argparse
import os
import shlex
import sys
from pathlib import Path

from overland.apps.hub.repo import connect, open_repo
from overland.cli.main import run
from overland.errors import OverlandError

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input_dir", type=Path, required=True)
    parser.add_argument("--output_dir", type=Path, required=True, help="a new folder")
    parser.add_argument("--config", help="config.json of the model, if INPUT_DIR has none")
    parser.add_argument(
        "--push_to_hub",
        nargs="?",
        const=os.environ.get("HUB_REPO_ID", ""),
        metavar="OWNER/NAME",
        help="also upload, to a branch named after INPUT_DIR; default: $HUB_REPO_ID",
    )
    given = parser.parse_args()
    if given.push_to_hub == "" and sys.stdin.isatty():  # the original has its author's repository
        given.push_to_hub = input("Repository to upload to (OWNER/NAME): ").strip()
    later = ["push", str(given.output_dir), given.push_to_hub or ""]
    later += ["--revision", given.input_dir.resolve().name]
    if given.push_to_hub is not None:  # refused before the conversion, which takes long
        if given.push_to_hub.count("/") != 1:
            parser.error(
                "--push_to_hub: name the repository, --push_to_hub OWNER/NAME, or set HUB_REPO_ID"
            )
        try:
            token = connect(open_repo(given.push_to_hub, "model")).token
        except OverlandError as error:
            parser.error(f"--push_to_hub: {error}")
        if not token:
            parser.error("--push_to_hub: set HF_TOKEN to a token with write access")
        if (given.output_dir / "checkpoint.pth").is_file():
            parser.error(
                f"{given.output_dir} is converted; upload it: overland {shlex.join(later)}"
            )
    config = ["--config", given.config] if given.config else []
    run("convert", str(given.input_dir), str(given.output_dir), "--to", "meta", *config)
    os.link(given.output_dir / "consolidated.00.pth", given.output_dir / "checkpoint.pth")
    if given.push_to_hub is not None:
        try:
            run(*later)
        except SystemExit:
            print(
                f"converted, not uploaded; try again: overland {shlex.join(later)}", file=sys.stderr
            )
            raise
