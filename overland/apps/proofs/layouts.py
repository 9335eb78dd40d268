"""The list of layouts that are proven equal to one process, and the syntax of their descriptive
names.

shard2 rep2 tp2 cp2 pp2     degrees; products are written with "x": pp2xtp2
:zero2  :1F1B  :full ...    a sharding stage, a pipeline schedule, a recompute mode
+tied +uneven +documents    changes to the model or the data, also made to the reference
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import prod
from typing import Any

DEGREES = {
    "pp": "pipeline_parallel_degree",
    "rep": "data_parallel_replicate_degree",
    "shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
}

ROWS = 8  # of each batch

Sections = dict[str, dict[str, Any]]

# How a layout computes: nothing here may change the loss.
WAYS: dict[str, Sections] = {
    "zero0": {"parallelism": {"sharding_stage": "zero0"}},
    "zero2": {"parallelism": {"sharding_stage": "zero2"}},
    "zero3": {"parallelism": {"sharding_stage": "zero3"}},
    "zero2_hybrid": {"parallelism": {"sharding_stage": "zero2_hybrid"}},
    "zero3_hybrid": {"parallelism": {"sharding_stage": "zero3_hybrid"}},
    **{
        schedule: {"parallelism": {"pipeline_parallel_schedule": schedule}}
        for schedule in (
            "1F1B",
            "GPipe",
            "Interleaved1F1B",
            "InterleavedZeroBubble",
            "ZBVZeroBubble",
            "DualPipeV",
        )
    },
    "full": {"activation_checkpoint": {"mode": "full"}},
    "op": {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"}},
    "every2": {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "2"}},
    "compile": {"compile": {"enable": True, "backend": "aot_eager"}},
    "async": {"parallelism": {"enable_async_tensor_parallel": True}},
    "accumulate": {"training": {"local_batch_size": 1}},
    "microbatch2": {"parallelism": {"pipeline_parallel_microbatch_size": 2}},
}

PAIRS: Sections = {
    "sft": {"shape": "preference", "too_long": "truncate"},
    "data": {"packing": "trunc"},
}

# What is computed: the reference changes too. ARCHITECTURE has keys of the model's config.json.
ARCHITECTURE = "architecture"
KINDS: dict[str, Sections] = {
    "tied": {ARCHITECTURE: {"tie_word_embeddings": True}},
    "uneven": {ARCHITECTURE: {"num_hidden_layers": 5}},
    "documents": {"data": {"document_mask": True}},
    "window": {ARCHITECTURE: {"model_type": "mistral", "sliding_window": 9}},
    "qknorm": {ARCHITECTURE: {"model_type": "qwen3"}},
    "bias": {ARCHITECTURE: {"model_type": "qwen2"}},
    "layernorm": {ARCHITECTURE: {"norm_type": "layernorm"}},
    "frozen": {"model": {"freeze": ["*q_proj*", "*embed_tokens*", "*input_layernorm*"]}},
    "lora": {"lora": {"rank": 4, "targets": "all-linear", "dropout": 0.2}},
    "rslora": {
        "lora": {
            "rank": 4,
            "targets": ["q_proj", "down_proj"],
            "rslora": True,
            "layers": [1, 3],
            "modules_to_save": ["lm_head"],
        }
    },
    "dora": {"lora": {"rank": 4, "targets": "all-linear", "dora": True}},
    "qlora": {  # a scale is for 64 weights
        ARCHITECTURE: {"hidden_size": 64, "intermediate_size": 128},
        "lora": {"rank": 4, "targets": "all-linear", "base": "nf4"},
    },
    "loraembedding": {"lora": {"rank": 4, "targets": ["embed_tokens", "v_proj"]}},
    "sft": {"sft": {"shape": "messages"}, "data": {"packing": "best_fit", "document_mask": True}},
    "dpo": {**PAIRS, "preference": {"loss": "dpo"}, "lora": {"rank": 4, "targets": "all-linear"}},
    "dpocopy": {**PAIRS, "preference": {"loss": "dpo"}},
    "orpo": {**PAIRS, "preference": {"loss": "orpo"}},
    "sparse": {"model": {"sparse": {"refresh": 2, "exclude": ["k_proj"]}}},
    "vit": {
        "model": {"name": "vit_mae", "flavor": "debug"},
        "training": {"dataset": "shapes"},
        "validation": {"dataset": "shapes_heldout", "dataset_path": None, "steps": 2},
    },
    "float8": {"training": {"float8": "tensorwise"}},
    "frozenstage": {"model": {"freeze": ["*embed_tokens*", "model.layers.[012].*"]}},
}


# For a custom model: one of each way to split it, of which it may refuse some.
OWN = ("shard1:accumulate shard2 shard2:zero2 rep2 shard2:accumulate shard2:full pp2 "
       "pp2:microbatch2 tp2 cp2 tp2xshard2")  # fmt: skip


@dataclass(frozen=True)
class ProofLayout:
    name: str
    degrees: dict[str, int]
    ways: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()

    def alone(self, *ways: str) -> ProofLayout:
        """Returns what one process computes, which this layout must equal."""
        return replace(self, degrees={}, ways=ways)

    @property
    def num_ranks(self) -> int:
        return prod(self.degrees.values())

    @property
    def num_nodes(self) -> int:
        """Hybrid stages distinguish nodes, so they are proven on two simulated ones."""
        return 2 if any(way.endswith("hybrid") for way in self.ways) else 1

    @property
    def parallelism(self) -> dict[str, int]:
        """Degrees by config key. Sharding is off unless the layout names it."""
        return {DEGREES["shard"]: 1} | {DEGREES[axis]: n for axis, n in self.degrees.items()}


def parse(name: str) -> ProofLayout:
    """Parses the name of a layout; raises ValueError if it is invalid."""
    words = re.split(r"(?=[:+])", name)
    degrees: dict[str, int] = {}
    for part in words[0].split("x"):
        match = re.fullmatch(r"([a-z]+)(\d+)", part)
        if match is None or match[1] not in DEGREES:
            known = ", ".join(DEGREES)
            raise ValueError(f"{name}: expected degrees such as pp2xtp2 (of {known}), got {part!r}")
        axis, degree = match[1], int(match[2])
        if axis in degrees or not degree:
            raise ValueError(f"{name}: expected each of {', '.join(DEGREES)} once, and 1 or more")
        degrees[axis] = degree
    if ROWS % (rows := degrees.get("shard", 1) * degrees.get("rep", 1)):
        raise ValueError(f"{name}: a proof has {ROWS} rows, which {rows} ranks cannot share")
    ways = tuple(word[1:] for word in words[1:] if word[0] == ":")
    kinds = tuple(word[1:] for word in words[1:] if word[0] == "+")
    for word, known_words in [(w, WAYS) for w in ways] + [(k, KINDS) for k in kinds]:
        if word not in known_words:
            raise ValueError(f"{name}: {word!r} is none of {', '.join(known_words)}")
    for words_of_one, meanings in ((ways, WAYS), (kinds, KINDS)):
        if twice := set_twice([meanings[word] for word in words_of_one]):
            raise ValueError(f"{name}: two words after the degrees set {twice}")
    layout = ProofLayout(name, degrees, ways, kinds)
    if layout.num_ranks % layout.num_nodes:
        raise ValueError(f"{name}: a hybrid stage is proven on {layout.num_nodes} nodes")
    return layout


def set_twice(changes: list[Sections]) -> str:
    """Returns a key that two changes set, or nothing."""
    keys = [f"{section}.{key}" for one in changes for section in one for key in one[section]]
    return next((key for key in keys if keys.count(key) > 1), "")


def parse_all(text: str) -> list[ProofLayout]:
    return [parse(name) for name in text.split()]


# Every axis, stage and schedule, every kind of training, and pairs of those whose code interacts,
# in minutes on two cores: what `make test` runs. Frozen parameters in a pipeline are proven
# together with their checkpoints.
SHORT = parse_all("""
    shard2:zero3  shard2:zero2  shard2:zero0+frozen  shard4:zero3_hybrid  rep2xshard2
    shard4:accumulate+documents  shard2:zero3+documents  shard2:full+dora
    tp2+layernorm  tp2+qknorm  tp2+bias+tied+frozen  tp2:compile:full  tp2+rslora  tp2+dpo
    cp2:full+window  cp2+dpocopy  cp2xtp2+documents
    pp2:1F1B+tied  pp2:GPipe:microbatch2+uneven  pp2:Interleaved1F1B  pp2:InterleavedZeroBubble
    pp2:ZBVZeroBubble+tied  pp2:DualPipeV  pp2+dpo
    pp2xtp2+tied  pp2xshard2:zero2:full+lora  pp2xcp2+sft  tp2xshard2:op+sparse  shard2+qlora
""")

# All of them: `make prove-all`.
LAYOUTS = SHORT + parse_all("""
    shard2:zero0  tp2+bias+tied  cp2+documents  cp2+window  cp2:full
    pp2:GPipe+uneven  pp2:microbatch2  tp2xshard2:op  pp2xshard2:zero2  shard2+frozen  tp2+frozen
    pp2xshard2:full+lora  shard2:compile:full+dora  tp2xshard2+sparse
    shard4:accumulate  pp2xcp2  pp2:ZBVZeroBubble+tied+frozen  pp2+frozenstage  cp2xtp2+frozen
    pp2xtp2+dpo
    shard4:zero3  shard4:zero2  shard4:zero2_hybrid  shard2xtp2:zero3_hybrid
    shard4:zero0  rep4  rep2  tp4  cp4  cp4+documents  pp4+uneven
    pp4:GPipe+uneven  pp4:1F1B+tied
    rep2xtp2  rep2xcp2  rep2xpp2  cp2xshard2  cp2xshard2+window  pp2xshard2:ZBVZeroBubble
    pp2xshard2:Interleaved1F1B:zero3  pp2xtp2:ZBVZeroBubble  pp2xtp2:Interleaved1F1B+qknorm
    pp2xcp2:DualPipeV+documents  tp2xshard2+tied  tp2xshard2:full+documents  tp2xcp2+bias
    pp2xshard2xtp2  pp2xcp2xtp2+documents  rep2xshard2xtp2  cp2xshard2xtp2:every2
    rep2xcp2xtp2  pp2xrep2xtp2+tied  pp2xshard2xcp2:Interleaved1F1B  pp4xtp2+uneven
    pp2xrep2xshard2:GPipe
    tp2  tp2:compile  tp2:compile:op  pp2xtp2:compile+layernorm  cp2+layernorm
    shard2:full+layernorm
    pp2:GPipe+frozenstage  pp2:Interleaved1F1B+frozenstage  pp2:InterleavedZeroBubble+frozenstage
    pp2:ZBVZeroBubble+frozenstage  pp2:DualPipeV+frozenstage  pp2:1F1B+tied+frozen
    pp2xtp2+tied+frozen  pp2xshard2+frozenstage
    pp2xshard2xcp2xtp2  pp2xshard2xcp2xtp2:Interleaved1F1B+documents+tied
    pp2xrep2xshard2xtp2:accumulate
    shard2+lora  shard2:zero0+lora  rep2xshard2:accumulate+lora  tp2+lora  tp2xshard2:op+lora
    cp2xtp2:compile+lora  tp2:compile:full+lora  tp4+lora+bias  cp2+lora+documents
    cp2xshard2+lora+window  pp2+lora
    pp2xcp2xtp2+lora  pp2:ZBVZeroBubble+lora  pp2:DualPipeV+lora+tied  pp2:Interleaved1F1B+lora
    pp2xshard2xcp2xtp2+lora  shard2+rslora  pp2+rslora  pp2+rslora+tied  cp2+rslora  pp2+dora
    cp2+dora  shard2+dora  rep2xshard2+dora  shard2+loraembedding  pp2+loraembedding+tied
    cp2+loraembedding  shard2:accumulate+sft  tp2+sft  shard4+sft  pp2:ZBVZeroBubble+sft
    shard2+dpo  cp2+dpo  pp2:ZBVZeroBubble+dpo  rep2xshard2:accumulate+dpo
    cp2xtp2:full+dpo
    shard2+dpocopy  tp2+dpocopy  pp2:Interleaved1F1B+dpocopy  cp2xshard2+dpocopy  shard2+orpo
    pp2xcp2+orpo  tp2:compile+orpo
    shard2:zero3+sparse  shard2:zero2+sparse  shard2:zero0+sparse  shard4:zero3_hybrid+sparse
    shard4:zero2_hybrid+sparse  shard4:accumulate+sparse  tp2+sparse  tp4+sparse+bias  cp2+sparse
    tp2xshard2:compile+sparse  pp2+sparse  pp2xtp2:full+sparse+tied  pp2:ZBVZeroBubble+sparse
    cp2xtp2+sparse+documents
    shard4:zero3_hybrid+qlora  shard2:compile:full+qlora  pp2xshard2+qlora  cp2:full+qlora
""")

# All five axes: 32 ranks, outside CI.
FIVE_AXES = parse_all("pp2xrep2xshard2xcp2xtp2  pp2xrep2xshard2xcp2xtp2:ZBVZeroBubble+documents")
