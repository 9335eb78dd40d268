"""Downloads the ids of Stack-2 to data/stack_v2_ids, with `overland fetch`, whose flags may follow.
They hold no text: BigCode's script on the dataset's page gets it from Software Heritage."""

import sys

from overland.cli.main import run

repo = "bigcode/the-stack-v2-train-smol-ids"
run("fetch", "dataset", repo, "--to", "data/stack_v2_ids", *sys.argv[1:])
