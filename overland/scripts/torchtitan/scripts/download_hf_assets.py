"""Model assets from a Hub to assets/hf/NAME, which is `overland fetch`.

Gated models: accept the licence on the model's page, then `export HF_TOKEN=…`.
"""

import argparse
import os
import sys
from pathlib import Path

from overland.cli.main import run

PATTERNS = {
    "tokenizer": "",  # fetch knows them
    "safetensors": "*.safetensors*",
    "index": "*.safetensors.index.json",
    "config": "*config.json",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repo_id", default="meta-llama/Llama-3.1-8B")
    parser.add_argument("--assets", nargs="+", choices=PATTERNS, default=[])
    parser.add_argument("--additional_patterns", nargs="+", default=[], metavar="PATTERN")
    parser.add_argument("--all", action="store_true", help="every file of the repository")
    parser.add_argument("--local_dir", type=Path, default=Path("assets/hf"))
    parser.add_argument("--hf_token", help="shows in the list of processes; HF_TOKEN does not")
    given = parser.parse_args()
    if given.hf_token:
        os.environ["HF_TOKEN"] = given.hf_token
    if not (given.assets or given.additional_patterns or given.all):
        given.assets = ["tokenizer"]
        said = "note: only the tokenizer and config.json; --assets safetensors brings the weights"
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
