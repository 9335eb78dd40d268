"""Downloads a tokenizer to torchtitan/datasets/tokenizer, with `overland fetch tokenizer`.

Gated models: accept the license on the model's page, then `export HF_TOKEN=…`.
"""

import argparse
import os

from overland.cli.main import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repo_id", default="meta-llama/Meta-Llama-3.1-8B")
    parser.add_argument(
        "--tokenizer_path", default="", help="folder of the tokenizer in the repository"
    )
    parser.add_argument("--local_dir", default="torchtitan/datasets/tokenizer/")
    parser.add_argument("--hf_token", help="visible in the process list; HF_TOKEN is not")
    given = parser.parse_args()
    if given.hf_token:
        os.environ["HF_TOKEN"] = given.hf_token
    file = "/".join([*given.tokenizer_path.strip("/").split("/"), "tokenizer.model"]).lstrip("/")
    run("fetch", "tokenizer", given.repo_id, "--include", file, "--to", given.local_dir)


if __name__ == "__main__":
    main()
