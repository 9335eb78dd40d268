"""Downloads FineMath to data/finemath, with `overland fetch`, whose flags may follow."""

import sys

from overland.cli.main import run

words = ["--subset", "finemath-3plus", "--to", "data/finemath"]
run("fetch", "dataset", "HuggingFaceTB/finemath", *words, *sys.argv[1:])
