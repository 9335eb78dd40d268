"""Generation beside transformers' own, in one process: `python benchmarks/gpu/generation.py 8B`.

Random weights in bfloat16, random prompts of 512 tokens, the likeliest token always, no end of
text: one prompt and 256 new tokens, and 64 prompts and 128 new tokens. Times are of whole calls,
prompts included, after one call that compiles and records; tokens/s are new tokens only.
transformers generates with its own cache, and for one prompt also with its static cache, compiled.

Then the texts: where the first differing token of a prompt stands, how far apart the two tokens'
logits were there, in steps of bfloat16, and how far apart the two models' own logits are there. As
long as the first is less than twice the second, rounding alone decides. Prints a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[2]))

from overland.config.schema import Model
from overland.data.tokenizer import Tokenizer
from overland.models import build_model
from overland.models.registry import model_config
from overland.tools.evaluation.generate import Generator
from overland.tools.evaluation.model import OpenModel
from overland.tools.evaluation.sampling import Sampling

PROMPT_TOKENS = 512
WORK = {"one prompt": (1, 256), "64 prompts": (64, 128)}
REPEATS = 3


class NoText:
    """Tokens are all that is looked at."""

    specials: dict[str, int] = {}
    path = Path("none")

    def decode(self, ids: list[int]) -> str:
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("flavor", nargs="?", default="8B")
    parser.add_argument("--ours-only", action="store_true")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = model_config(Model(name="llama3", flavor=given.flavor))
    torch.manual_seed(0)
    with torch.device(device):
        ours = build_model(config).to(torch.bfloat16).eval().requires_grad_(False)
        for parameter in ours.parameters():
            parameter.fill_(1) if parameter.dim() == 1 else parameter.normal_(0, 0.02)
    theirs = None if given.ours_only else peer(config.to_hf(), ours, device)
    found: dict[str, Any] = {"device": name_of(device), "torch": torch.__version__}
    found["transformers"] = transformers.__version__
    for name, (batch, new) in WORK.items():
        prompts = torch.randint(0, config.vocab_size, (batch, PROMPT_TOKENS)).tolist()
        seconds, texts = timed_ours(ours, prompts, new, device)
        row: dict[str, Any] = {"overland": batch * new / seconds}
        if theirs is not None:
            seconds, other_texts = timed_theirs(theirs, prompts, new, device)
            row["transformers"] = batch * new / seconds
            if batch == 1:
                static = {"cache_implementation": "static"}
                seconds, _ = timed_theirs(theirs, prompts, new, device, **static)
                row["transformers, static and compiled"] = batch * new / seconds
            row["texts"] = divergence((ours, theirs), prompts, texts, other_texts, device)
        found[name] = row
        print(f"{name}: {row}", file=sys.stderr, flush=True)
    print(json.dumps(found))


def timed_ours(
    model: torch.nn.Module, prompts: list[list[int]], new: int, device: torch.device
) -> tuple[float, list[list[int]]]:
    opened = OpenModel(
        model=model, tokenizer=cast(Tokenizer, NoText()), config=None, context=8192,
        path=Path("random"), step=None, end_ids=(), dtype=torch.bfloat16, device=device,
    )  # fmt: skip
    generator = Generator(opened, batch_size=len(prompts), length=PROMPT_TOKENS + new)
    asked: dict[str, Any] = {"max_new_tokens": new, "sampling": Sampling(), "end_ids": ()}
    seconds, done = timed(partial(generator.generate, prompts, **asked), device)
    generator.close()
    return seconds, [list(one.ids) for one in done]


def timed_theirs(
    model: Any, prompts: list[list[int]], new: int, device: torch.device, **options: Any
) -> tuple[float, list[list[int]]]:
    tokens_BS = torch.tensor(prompts, device=device)
    asked = {
        "attention_mask": torch.ones_like(tokens_BS), "max_new_tokens": new, "min_new_tokens": new,
        "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **options,
    }  # fmt: skip
    seconds, out_BS = timed(partial(model.generate, tokens_BS, **asked), device)
    return seconds, out_BS[:, PROMPT_TOKENS:].tolist()


def peer(contents: dict[str, Any], ours: torch.nn.Module, device: torch.device) -> Any:
    """transformers' model with the same weights: the names are the same too."""
    config = transformers.LlamaConfig(**contents)
    with torch.device("meta"):
        theirs = transformers.LlamaForCausalLM(config)
    theirs.load_state_dict(ours.state_dict(), assign=True, strict=False)
    rotary = type(theirs.model.rotary_emb)
    theirs.model.rotary_emb = rotary(config, device=device)
    return theirs.eval()


def timed(ask: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Returns the median of several calls, after one that nobody times, and what it gave."""
    result = ask()
    times = []
    for _ in range(REPEATS):
        wait(device)
        start = time.perf_counter()
        result = ask()
        wait(device)
        times.append(time.perf_counter() - start)
    return sorted(times)[REPEATS // 2], result


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@torch.no_grad()
def divergence(
    models: tuple[Any, Any],
    prompts: list[list[int]],
    ours: list[list[int]],
    theirs: list[list[int]],
    device: torch.device,
) -> dict[str, Any]:
    """Where texts part, how near the two tokens were to each other there, and how near the two
    models are."""
    places, apart, rounding = [], [], []
    for prompt, a, b in zip(prompts, ours, theirs, strict=True):
        place = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        if place is None:
            continue
        tokens = torch.tensor([[*prompt, *a[:place]]], device=device)
        mine_V = models[0](tokens)[0, -1].float()
        their_V = models[1](tokens).logits[0, -1].float()
        step = 2.0 ** (mine_V[[a[place], b[place]]].abs().max().log2().floor().item() - 7)
        places.append(place)
        apart.append(float((mine_V[a[place]] - mine_V[b[place]]).abs()) / step)
        rounding.append(float((mine_V - their_V).abs().max()) / step)
    return {
        "equal texts": len(prompts) - len(places),
        "parted": len(places),
        "first": min(places, default=None),
        "most steps between the two tokens": max(apart, default=None),
        "most steps between the two models": max(rounding, default=None),
        "by rounding": sum(x <= 2 * y for x, y in zip(apart, rounding, strict=True)),
    }


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "cpu"


if __name__ == "__main__":
    main()
