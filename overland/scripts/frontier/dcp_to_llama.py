"""Converts a DCP folder, or a checkpoint of a run, to Meta's format, with `overland convert`.

OUTPUT_DIR gets consolidated.00.pth and params.json, and the same weights as checkpoint.pth.
"""

import argparse
import os
import sys
from pathlib import Path

from overland.cli.main import run

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
    if given.push_to_hub == "":
        parser.error(
            "--push_to_hub: name the repository, --push_to_hub OWNER/NAME, or set HUB_REPO_ID"
        )
    config = ["--config", given.config] if given.config else []
    run("convert", str(given.input_dir), str(given.output_dir), "--to", "meta", *config)
    os.link(given.output_dir / "consolidated.00.pth", given.output_dir / "checkpoint.pth")
    if given.push_to_hub:
        branch = given.input_dir.resolve().name
        run("push", str(given.output_dir), given.push_to_hub, "--revision", branch)
