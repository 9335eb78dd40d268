"""Greedy texts compared with transformers' generate(), token for token; writes a page of results.

python -m tests.prove_generation docs/evidence/generation.md
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from overland.models import DecoderConfig, build_model
from tests.evaluation.engines import continued, some_prompts, tiny
from tests.models.test_parity import reference, transformers
from tests.models.tiny import CASES, hf

NUM_TOKENS = 200
LENGTHS = (3, 17, 40)
# Wide enough that products, and not the time between them, are what counts.
LARGER: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6,
    "num_attention_heads": 6, "num_key_value_heads": 2, "initializer_range": 0.02,
}  # fmt: skip


def main(path: Path) -> int:
    torch.set_num_threads(1)  # so that figures do not depend on what else runs
    rows, failed = [], False
    for (family, rope), (contents, _) in CASES.items():
        cells = compare({**contents, "max_position_embeddings": 256})
        failed |= any(cell != "equal" for cell in cells)
        rows.append(f"| {' | '.join([family, rope, *cells])} |")
        print(rows[-1], flush=True)
    path.write_text("\n".join([*head(), *rows, "", *speed(), ""]))
    return int(failed)


def compare(contents: dict[str, Any]) -> list[str]:
    """Whether 200 tokens after each of three prompts are those of transformers: in a batch, in a
    batch without a cache, alone."""
    theirs, ours = reference(contents), tiny(contents)
    ours.load_state_dict(theirs.state_dict())
    prompts = some_prompts(LENGTHS)
    wanted = [
        theirs.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False,
                        eos_token_id=None, pad_token_id=0)[0, len(prompt):].tolist()
        for prompt in prompts
    ]  # fmt: skip
    together = continued(ours, prompts, NUM_TOKENS)
    plain = continued(ours, prompts, NUM_TOKENS, cached=False)
    alone = [continued(ours, [prompt], NUM_TOKENS, batch_size=1)[0] for prompt in prompts]
    return [
        "equal" if [list(one.ids) for one in found] == wanted else "DIFFERS"
        for found in (together, plain, alone)
    ]


def head() -> list[str]:
    return [
        "# Generation compared with transformers",
        "",
        f"Random tiny models in float32 on the CPU, transformers {transformers.__version__}, torch "
        f"{torch.__version__}: {NUM_TOKENS} greedy tokens after prompts of "
        f"{', '.join(map(str, LENGTHS))} tokens. `equal`: all {NUM_TOKENS * len(LENGTHS)} tokens "
        "are those of transformers' `generate` for each prompt alone.",
        "",
        "Made by `python -m tests.prove_generation docs/evidence/generation.md`.",
        "",
        "| family | rope | in a batch, cached | in a batch, without cache | alone, cached |",
        "|---|---|---|---|---|",
    ]


def speed() -> list[str]:
    """What the cache is worth, in one run."""
    contents = hf("llama", **LARGER, max_position_embeddings=256)
    model = build_model(DecoderConfig.from_hf(contents)).eval()
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**contents), attn_implementation="sdpa"
    ).eval()
    model.load_state_dict(theirs.state_dict())
    prompts = [[5 + i for i in range(56)] for _ in range(2)]
    cached = seconds(lambda: continued(model, prompts, 32))
    plain = seconds(lambda: continued(model, prompts, 32, cached=False))
    their = seconds(lambda: by_transformers(theirs, prompts))
    return [
        "## What the cache gains",
        "",
        f"A Llama of {sum(one.numel() for one in model.parameters()) / 1e6:.0f} M parameters, 2 "
        "prompts of 56 tokens and 32 new ones each, float32, one CPU thread, one run: without the "
        f"cache (rows of 256 tokens are computed again for each token) it takes "
        f"{plain / cached:.0f} times as long as with it; transformers with its own cache takes "
        f"{their / cached:.2f} times as long.",
    ]


def by_transformers(model: nn.Module, prompts: list[list[int]]) -> None:
    tokens_BS = torch.tensor(prompts)
    model.generate(  # type: ignore[operator]
        tokens_BS, attention_mask=torch.ones_like(tokens_BS), max_new_tokens=32, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip


def seconds(work: Any) -> float:
    """The better of two."""
    times = []
    for _ in range(2):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
