"""Downloads model assets to assets/hf/NAME, with `overland fetch`.

Gated models: accept the license on the model's page, then `export HF_TOKEN=…`.
"""

import argparse
import os
import sys
from pathlib import Path

from overland.cli.main import run

PATTERNS = {
    "tokenizer": "",  # fetch knows the files
    "safetensors": "*.safetensors*",
    "index": "*.safetensors.index.json",
    "config": "*config.json",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repo_id", default="meta-llama/Llama-3.1-8B")
    parser.add_argument("--assets", nargs="+", choices=PATTERNS, default=[])
    parser.add_argument("--additional_patterns", nargs="+", default=[], metavar="PATTERN")
    parser.add_argument("--all", action="store_true", help="all files of the repository")
    parser.add_argument("--local_dir", type=Path, default=Path("assets/hf"))
    parser.add_argument("--hf_token", help="visible in the process list; HF_TOKEN is not")
    given = parser.parse_args()
    if given.hf_token:
        os.environ["HF_TOKEN"] = given.hf_token
    if not (given.assets or given.additional_patterns or given.all):
        given.assets = ["tokenizer"]
        said = "note: only the tokenizer and config.json; add --assets safetensors for the weights"
        print(said, file=sys.stderr)
    to = ["--to", str(given.local_dir / given.repo_id.rpartition("/")[2])]
    wanted = {PATTERNS[kind] for kind in given.assets} - {""}
    wanted |= {f"*{pattern.lstrip('*')}" for pattern in given.additional_patterns}
    included = [word for one in sorted(wanted) for word in ("--include", one)]
    if given.all:
        included = ["--include", "*"]
    if "tokenizer" in given.assets:
        run("fetch", "tokenizer", given.repo_id, *to)
    if included:
        run("fetch", "model", given.repo_id, *included, *to)


if __name__ == "__main__":
    main()
