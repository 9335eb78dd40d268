"""Generation on a GPU gives what the model itself would say, for every family and kind of weights:

    python benchmarks/gpu/same_text.py [--store docs/evidence/gpu_same_text.json]

Random tiny models, seven prompts of unequal lengths in a batch of eight, 40 greedy tokens each. The
tokens of each text are then given to the plain model, all at once and without a cache, on the same
GPU: at every place the token that was chosen must be the likeliest, or as likely as the likeliest
but for rounding. Prints, for each row, the most that was missing, in steps of the number format.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from overland.apps.evaluation.cache import CachedDecoder
from overland.apps.evaluation.generate import GenerationRequest, Generator
from overland.config.schema import Lora
from overland.kernels.nf4 import pack
from overland.models import DecoderConfig, build_model
from overland.models.init import init_weights
from overland.models.lora import LoRA, LoRALinear
from overland.models.nf4 import NF4, narrow_matrices
from overland.models.transform import apply_transforms
from tests.evaluation.engines import GREEDY, opened, some_prompts
from tests.models.tiny import CASES, hf

LENGTHS = (1, 3, 17, 40, 64, 5, 33)
NUM_TOKENS = 40
FORMATS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# A layer adds a rounding or two, and random layers make more of each.
MOST_STEPS = {"bfloat16": 16, "float16": 16, "float32": 64}
LARGER = hf("llama", vocab_size=1000, hidden_size=256, intermediate_size=704, head_dim=64)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path, default=Path("outputs/gpu_same_text.json"))
    parser.add_argument("--last", type=int, default=0, help="only so many rows, from the end")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    families = {
        f"{family}; {rope}": wider(contents) for (family, rope), (contents, _) in CASES.items()
    }
    work = [(name, contents, kind, "") for name, contents in families.items() for kind in FORMATS]
    work += [("larger", LARGER, "bfloat16", change) for change in ("", "lora", "dora", "nf4")]
    rows, failed = {}, False
    for name, contents, kind, change in work[-given.last :]:
        model = built({**contents, "max_position_embeddings": 256}, FORMATS[kind], change, device)
        written_out, steps = compare(model, FORMATS[kind], device)
        failed |= not steps <= MOST_STEPS[kind]
        label = ", ".join(filter(None, (name, kind, change)))
        rows[label] = {"written out": written_out, "steps": steps}
        if not steps <= 2:
            print(f"{label}: {steps:.1f} steps, written out: {written_out}", flush=True)
    worst = max(row["steps"] for row in rows.values())
    count = sum(row["written out"] for row in rows.values())
    print(f"{len(rows)} models, {count} written out: at most {worst:.1f} steps from the likeliest")
    given.store.parent.mkdir(parents=True, exist_ok=True)
    given.store.write_text(json.dumps(rows, indent=1) + "\n")
    return int(failed)


def wider(contents: dict[str, Any]) -> dict[str, Any]:
    """With twice the width: some kernels of torch want heads of 16 numbers at least."""
    more = {"head_dim": 2 * contents["head_dim"]} if "head_dim" in contents else {}
    return {**contents, "hidden_size": 2 * contents["hidden_size"], **more}


def built(
    contents: dict[str, Any], dtype: torch.dtype, change: str, device: torch.device
) -> nn.Module:
    torch.manual_seed(0)
    model = build_model(DecoderConfig.from_hf(contents))
    init_weights(model, seed=1)
    settings = Lora(rank=8, dora=change == "dora", base="nf4" if change == "nf4" else "auto")
    if change:
        dense = {name: one.detach().clone() for name, one in model.named_parameters()}
        apply_transforms(model, [LoRA(settings), *([NF4(settings)] if change == "nf4" else [])])
        for module in model.modules():
            if isinstance(module, LoRALinear):
                nn.init.normal_(module.lora_A.weight, std=0.1)
                nn.init.normal_(module.lora_B.weight, std=0.1)
                if module.lora_magnitude_vector is not None:
                    module.lora_magnitude_vector.data = module.weight.norm(dim=1)
        for name in narrow_matrices(model):
            model.get_parameter(name).data = pack(dense[name])
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return model.to(device).eval().requires_grad_(False)


@torch.no_grad()
def compare(model: nn.Module, dtype: torch.dtype, device: torch.device) -> tuple[bool, float]:
    prompts = some_prompts(LENGTHS)
    generator = Generator(opened(model, dtype=dtype, device=device), batch_size=8, length=128)
    done = generator.generate(prompts, GenerationRequest(NUM_TOKENS, GREEDY))
    rows = generator.rows
    written_out = isinstance(rows, CachedDecoder) and rows.written_out is not None
    generator.close()
    most = 0.0
    for prompt, one in zip(prompts, done, strict=True):
        tokens_1S = torch.tensor([[*prompt, *one.ids]], device=device)
        logits_SV = model(tokens_1S)[0, len(prompt) - 1 : -1].float()
        most = max(most, missing(logits_SV, torch.tensor(one.ids, device=device), dtype))
    return written_out, most


def missing(logits_SV: Tensor, chosen_S: Tensor, dtype: torch.dtype) -> float:
    """Returns how much less likely a chosen token was than the likeliest: in steps that `dtype` has
    among the largest numbers of the row."""
    best_S = logits_SV.amax(dim=1)
    step_S = logits_SV.abs().amax(dim=1) * torch.finfo(dtype).eps
    lacking_S = best_S - logits_SV.gather(1, chosen_S[:, None])[:, 0]
    return float((lacking_S / step_S).max())


if __name__ == "__main__":
    sys.exit(main())
