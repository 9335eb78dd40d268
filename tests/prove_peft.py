"""Adapters exchanged with the real PEFT, in both directions, by their logits; writes a page of
results.

    python -m tests.prove_peft docs/evidence/peft.md

PEFT is installed in a folder of its own (.venv/peft), so that nothing else can come to need it.
"""

from __future__ import annotations

import importlib.metadata
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overland.apps.convert import convert
from overland.apps.convert.formats import LazyCheckpoint, open_any
from overland.apps.convert.formats.merge import join
from overland.apps.convert.verify import model_with_weights
from overland.apps.dialects.peft import read_adapter_config, settings_of
from overland.apps.proofs.pool import RankPool
from overland.config.schema import JobConfig
from overland.models.registry import read_hf_config
from overland.world import World
from tests.jobs import run_job, tiny_job
from tests.peers import PEFT, install

LIMIT = 1e-5  # relative to the largest logit; PEFT's own merge is up to 2.7e-6 off from PEFT

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # name: PEFT's settings, and changes to the model
    "LoRA": ({"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}, {}),
    "LoRA, all-linear, dropout": (
        {"r": 4, "target_modules": "all-linear", "lora_dropout": 0.1},
        {},
    ),
    "rsLoRA": ({"r": 8, "target_modules": "all-linear", "use_rslora": True}, {}),
    "DoRA": ({"r": 4, "lora_alpha": 8, "target_modules": ATTENTION, "use_dora": True}, {}),
    "DoRA + rsLoRA, biases": (
        {"r": 4, "target_modules": "all-linear", "use_dora": True, "use_rslora": True},
        {"attention_bias": True, "mlp_bias": True},
    ),
    "rank and alpha patterns": (
        {
            "r": 2,
            "target_modules": ["q_proj", "up_proj", "down_proj"],
            "rank_pattern": {"layers.1.mlp.up_proj": 6, "^model.layers.0.self_attn.q_proj": 3},
            "alpha_pattern": {".*_proj": 24},
        },
        {},
    ),
    "a regular expression, exclusions": (
        {
            "r": 4,
            "target_modules": r".*\.(self_attn|mlp)\.(q|v|up)_proj",
            "exclude_modules": ["layers.1.mlp.up_proj"],
        },
        {},
    ),
    "some layers": ({"r": 4, "target_modules": ATTENTION, "layers_to_transform": [1]}, {}),
    "saved modules, all norms": (
        {"r": 4, "target_modules": ATTENTION, "modules_to_save": ["lm_head", "norm"]},
        {},
    ),
    "embeddings": ({"r": 4, "target_modules": ["embed_tokens", "v_proj"]}, {}),
    "embeddings, tied": (
        {"r": 4, "target_modules": ["embed_tokens", "v_proj"]},
        {"tie_word_embeddings": True},
    ),
}


def main(path: Path) -> int:
    install("peft", PEFT)
    rows, failed = [], False
    with tempfile.TemporaryDirectory(prefix="overland-peft-") as folder:
        pool = RankPool()
        try:
            for number, (name, (settings, changes)) in enumerate(CASES.items()):
                place = Path(folder) / str(number)
                place.mkdir()
                figures = prove(place, settings, changes, pool)
                is_equal = all(figure is None or figure < LIMIT for figure in figures[1:])
                failed |= not is_equal
                cells = [name, *("" if one is None else f"{one:.1e}" for one in figures)]
                rows.append(f"| {' | '.join([*cells, 'equal' if is_equal else 'DIFFERS'])} |")
                print(rows[-1], flush=True)
        finally:
            pool.close()
    path.write_text("\n".join([*head(), *rows, "", HOW, ""]))
    return int(failed)


def prove(
    place: Path, settings: dict[str, Any], changes: dict[str, Any], pool: Any
) -> list[float | None]:
    """Returns how far logits differ, relative to the largest: PEFT's own merge from PEFT, which is
    the rounding of float32; PEFT's adapter here; merged here and read by transformers; our adapter
    in PEFT; the same, merged by PEFT."""
    from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256,
        "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1,
    }  # fmt: skip
    base = place / "base"
    LlamaForCausalLM(LlamaConfig(**sizes, **changes)).save_pretrained(base)
    tokens_BS = torch.randint(256, (2, 24))

    def load(folder: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logits(model: Any) -> Tensor:
        with torch.no_grad():
            found: Tensor = model.eval()(tokens_BS).logits
        return found

    theirs = get_peft_model(load(base), LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    wanted = logits(theirs)
    assert difference(wanted, logits(load(base))) > 0.01  # or nothing would be shown
    theirs.save_pretrained(place / "theirs")
    here = join(open_any(base), open_any(place / "theirs"))
    read = difference(ours(here, tokens_BS), wanted)
    convert(base, place / "merged", "hf", adapter=place / "theirs", merge_lora=True)
    merged = difference(logits(load(place / "merged")), wanted)

    # A run continues from that adapter, and writes its own.
    run = place / "run"
    pool.run(2, train, job(run, base, place / "theirs"))
    trained = ours(open_any(run), tokens_BS)
    assert difference(trained, wanted) > 1e-4
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        back = PeftModel.from_pretrained(load(base), run / "checkpoint-2")
    missing = [str(one.message) for one in said if "adapter keys" in str(one.message)]
    assert not missing, missing
    written = difference(logits(back), trained)
    tied = changes.get("tie_word_embeddings")  # PEFT merges into both of them
    united = None if tied else difference(logits(back.merge_and_unload()), trained)
    before, after = (PeftConfig.from_pretrained(str(one)).to_dict() for one in (
        place / "theirs", run / "checkpoint-2"))  # fmt: skip
    for key in before.keys() - {"base_model_name_or_path", "inference_mode"}:
        one, other = (sorted(x) if isinstance(x, list | set) else x
                      for x in (before[key], after[key]))  # fmt: skip
        assert one == other, (key, one, other)
    noise = None if tied else difference(logits(theirs.merge_and_unload()), wanted)
    return [noise, read, merged, written, united]


def ours(source: LazyCheckpoint, tokens_BS: Tensor) -> Tensor:
    assert source.config is not None
    with torch.no_grad():
        found: Tensor = model_with_weights(source, read_hf_config(source.config))(tokens_BS)
    return found


def difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


def job(folder: Path, base: Path, adapter: Path) -> JobConfig:
    found = settings_of(read_adapter_config(adapter), adapter).model_dump()
    return tiny_job(
        folder,
        model={"config": str(base), "overrides": {}},
        training={
            "steps": 2,
            "local_batch_size": 4,
            "dtype": "float32",
            "mixed_precision_param": "float32",
            "mixed_precision_reduce": "float32",
        },
        lora={**found, "adapter": str(adapter), "save_as_peft": True},
        checkpoint={"enable": True, "interval": 2, "initial_load_path": str(base)},
    )


def train(world: World, config: JobConfig) -> None:
    run_job(world, config)


def head() -> list[str]:
    names = ("peft", "transformers", "torch")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    return [
        "# Adapters exchanged with PEFT",
        "",
        "The largest difference of logits, relative to the largest of them, in float32 on a CPU, "
        f"with {versions}. At most {LIMIT:.0e} counts as equal.",
        "",
        "| adapter | PEFT's, merged by PEFT | PEFT's, read here | "
        "PEFT's, merged here, read by transformers | "
        "ours, trained on from it on two ranks, read by PEFT | the same, merged by PEFT | |",
        "|---|---|---|---|---|---|---|",
    ]


HOW = """\
By `python -m tests.prove_peft` (part of `make prove-all`): a small Llama with random weights, and \
adapters with random values. The first column is PEFT compared with itself: the rounding of \
float32. PEFT loads ours without reporting missing or unexpected names, and reads the same \
settings from both files adapter_config.json. Where embeddings are tied, PEFT's own merge also \
changes the output matrix, so the first and last columns stay empty there."""


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
