"""torchtitan's data loader, whose state goes into its checkpoints. It trains on GPUs alone, so here
the loader is all there is: 20 batches, its state after 10, and the batches of a new one with that
state, for one data-parallel rank and for the first of two.

    python -m tests.comparison.torchtitan_data FOLDER

prints a line of JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.comparison.checkers import toml, torchtitan_base
from tests.comparison.shape import BATCH, INTERVAL, STEPS
from tests.peers import TORCHTITAN, install


def main(folder: Path) -> dict[str, Any]:
    from torchtitan.components.tokenizer import build_hf_tokenizer
    from torchtitan.config import ConfigManager
    from torchtitan.hf_datasets.text_datasets import build_text_dataloader

    file = folder / "data.toml"
    file.write_text(toml({**torchtitan_base(folder), "training.local_batch_size": BATCH}))
    config = ConfigManager().parse_args(["--job.config_file", str(file)])
    tokenizer = build_hf_tokenizer(config)

    whole = iter(loader := build_text_dataloader(1, 0, tokenizer, config))
    for _ in range(2 * INTERVAL):
        next(whole)
    state = loader.state_dict()
    rest = [next(whole)[0]["input"] for _ in range(STEPS - 2 * INTERVAL)]

    again = build_text_dataloader(1, 0, tokenizer, config)
    again.load_state_dict(state)
    batches = [batch[0]["input"] for batch, _ in zip(again, rest, strict=False)]
    same = sum(torch.equal(a, b) for a, b in zip(batches, rest, strict=True))

    config.training.local_batch_size = BATCH // 2
    on_two = build_text_dataloader(2, 0, tokenizer, config)
    try:
        on_two.load_state_dict(state)
        problem = ""
    except AssertionError as error:
        problem = str(error)
    return {"same": same, "of": len(rest), "problem": problem}


if __name__ == "__main__":
    install("torchtitan", TORCHTITAN)
    print("FOUND", json.dumps(main(Path(sys.argv[1]))))
