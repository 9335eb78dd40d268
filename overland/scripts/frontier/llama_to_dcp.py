"""Converts Meta's Llama weights to DCP with torchtitan's names, with `overland convert`."""

import argparse

from overland.cli.main import run

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--input_dir", required=True, help="folder with consolidated.*.pth, params.json"
    )
    parser.add_argument("--output_dir", required=True, help="a new folder")
    given = parser.parse_args()
    form = ["--to", "dcp", "--names", "torchtitan", "--key-prefix", "model."]
    run("convert", given.input_dir, given.output_dir, *form)
