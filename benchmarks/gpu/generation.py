"""Generation compared with transformers', in one process: `python benchmarks/gpu/generation.py 8B`.

Random weights in bfloat16, random prompts of 512 tokens, the likeliest token always, no end of
text: one prompt and 256 new tokens, and 64 prompts and 128 new tokens. Times are of whole calls,
prompts included, after one call that compiles and records; tokens/s are new tokens only.
transformers generates with its own cache, and for one prompt also with its static cache, compiled.

Then the texts: where the first differing token of a prompt stands, and there, in steps of bfloat16,
how far apart the logits of the two tokens are in float32, and how far both ways of computing are
from float32. If the first is at most the sum of both, rounding alone decides. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from overland.apps.evaluation.cache import CachedDecoder, release
from overland.apps.evaluation.generate import GenerationRequest, Generator
from overland.apps.evaluation.model import OpenModel
from overland.config.schema import Model
from overland.data.tokenizer import Tokenizer
from overland.models import build_model
from overland.models.registry import model_config

PROMPT_TOKENS = 512
WORK = {"one prompt": (1, 256), "64 prompts": (64, 128)}
REPEATS = 3
Texts = tuple[list[list[int]], list[list[int]], list[list[int]]]  # prompts, ours, theirs


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
    parted: dict[str, Texts] = {}
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
            parted[name] = (prompts, texts, other_texts)
        found[name] = row
        print(f"{name}: {row}", file=sys.stderr, flush=True)
    for name, texts in divergence(ours, theirs, parted, device).items():
        found[name]["texts"] = texts
        print(f"{name}: {texts}", file=sys.stderr, flush=True)
    print(json.dumps(found))


def timed_ours(
    model: torch.nn.Module, prompts: list[list[int]], new: int, device: torch.device
) -> tuple[float, list[list[int]]]:
    opened = OpenModel(
        model=model, tokenizer=cast(Tokenizer, NoText()), config=None, context=8192,
        path=Path("random"), step=None, end_ids=(), dtype=torch.bfloat16, device=device,
    )  # fmt: skip
    generator = Generator(opened, batch_size=len(prompts), length=PROMPT_TOKENS + new)
    seconds, done = timed(partial(generator.generate, prompts, GenerationRequest(new)), device)
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


@dataclass
class Parting:
    """Where two texts of a prompt part: the tokens up to there, the two that follow, and the logits
    by our fast path and by transformers."""

    tokens: list[int]
    pair: list[int]
    fast_V: Tensor
    their_V: Tensor


@torch.no_grad()
def divergence(
    ours: Any, theirs: Any, all_texts: dict[str, Texts], device: torch.device
) -> dict[str, dict[str, Any]]:
    """What the texts say; the model becomes float32."""
    partings = {name: list(partings_of(ours, theirs, *all_texts[name])) for name in all_texts}
    release_shared(ours)
    exact = ours.to(torch.float32)
    found = {}
    for name, ones in partings.items():
        gaps, fast, other, by_rounding = [], [], [], 0
        for one in ones:
            exact_V = exact(torch.tensor([one.tokens], device=device))[0, -1]
            step = 2.0 ** (exact_V[one.pair].abs().max().log2().floor().item() - 7)
            gaps.append(float((exact_V[one.pair[0]] - exact_V[one.pair[1]]).abs()) / step)
            fast.append(float((one.fast_V - exact_V).abs().max()) / step)
            other.append(float((one.their_V - exact_V).abs().max()) / step)
            by_rounding += gaps[-1] <= fast[-1] + other[-1]
        found[name] = {
            "equal texts": len(all_texts[name][0]) - len(ones),
            "parted": len(ones),
            "by rounding": by_rounding,
            "steps between the two tokens, mean and most": mean_and_most(gaps),
            "ours from float32": mean_and_most(fast),
            "transformers from float32": mean_and_most(other),
        }
    return found


def partings_of(
    ours: Any, theirs: Any, prompts: list[list[int]], a: list[list[int]], b: list[list[int]]
) -> Iterator[Parting]:
    for prompt, mine, other in zip(prompts, a, b, strict=True):
        place = next((i for i, (x, y) in enumerate(zip(mine, other, strict=True)) if x != y), None)
        if place is None:
            continue
        tokens = [*prompt, *mine[:place]]
        their_V = theirs(torch.tensor([tokens], device=theirs.device)).logits[0, -1].float()
        cached = CachedDecoder(ours, 1, is_static=their_V.is_cuda)
        fast_V = cached.start([tokens])[0].float()
        release(ours)
        yield Parting(tokens, [mine[place], other[place]], fast_V, their_V)


def release_shared(model: torch.nn.Module) -> None:
    """Gives each parameter memory of its own: matrices that were merged share theirs."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def mean_and_most(values: list[float]) -> list[float]:
    return [sum(values) / len(values), max(values)] if values else []


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "cpu"


if __name__ == "__main__":
    main()
