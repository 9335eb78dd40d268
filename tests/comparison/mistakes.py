"""Mistakes in a config that every trainer's users make, in each trainer's words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Settings = dict[str, Any]
"""Key and value; keys of sections have a dot."""


@dataclass(frozen=True)
class Mistake:
    title: str
    keys: tuple[str, ...]
    """What a message should name, one word per problem; `a|b` for either."""
    right: str = ""
    """The name or word that was meant, which a message could suggest."""
    settings: dict[str, Settings] = field(default_factory=dict)
    """By trainer; one that is not named has no such setting."""
    text: dict[str, str] = field(default_factory=dict)
    """Lines added to the file as they are, by trainer."""


def for_hf(**settings: Any) -> dict[str, Settings]:
    return {"transformers": settings, "TRL": settings, "axolotl": settings}


MISTAKES = (
    Mistake(
        "misspelled key",
        ("learning_ratee|optimizer.lrr|optimizer|lrr|matrix.lrr",),
        "learning_rate|optimizer.lr|matrix-lr",
        {
            "Overland": {"optimizer.lrr": 1e-3},
            **for_hf(learning_ratee=1e-3),
            "torchtitan": {"optimizer.lrr": 1e-3},
            "nanochat": {"matrix-lrr": 0.1},
        },
    ),
    Mistake(
        "key in the wrong section",
        ("training.lr|lr",),
        "optimizer.lr",
        {"Overland": {"training.lr": 1e-3}, "torchtitan": {"training.lr": 1e-3}},
    ),
    Mistake(
        "key of another trainer",
        ("gradient_accumulation_steps|global_batch_size|gradient-accumulation-steps",),
        "global_batch_size|per_device_train_batch_size|micro_batch_size|total-batch-size",
        {
            "Overland": {"training.gradient_accumulation_steps": 4},
            **for_hf(global_batch_size=64),
            "torchtitan": {"training.gradient_accumulation_steps": 4},
            "nanochat": {"gradient-accumulation-steps": 4},
        },
    ),
    Mistake(
        "word where a number belongs",
        ("max_steps|training.steps|steps|num-iterations",),
        "",
        {
            "Overland": {"training.steps": "many"},
            **for_hf(max_steps="many"),
            "torchtitan": {"training.steps": "many"},
            "nanochat": {"num-iterations": "many"},
        },
    ),
    Mistake(
        "word that is no choice",
        ("lr_scheduler|decay_type|window_pattern",),
        "cosine|SL",
        {
            "Overland": {"lr_scheduler.decay_type": "cosin"},
            **for_hf(lr_scheduler_type="cosin"),
            "axolotl": {"lr_scheduler": "cosin"},
            "torchtitan": {"lr_scheduler.decay_type": "cosin"},
            "nanochat": {"window-pattern": "Q"},
        },
    ),
    Mistake(
        "negative number of steps",
        ("max_steps|training.steps|steps|num.iterations",),
        "",
        {
            "Overland": {"training.steps": -5},
            **for_hf(max_steps=-5),
            "torchtitan": {"training.steps": -5},
            "nanochat": {"num-iterations": -5},
        },
    ),
    Mistake(
        "negative learning rate",
        ("learning_rate|optimizer.lr|learning rate|matrix.lr",),
        "",
        {
            "Overland": {"optimizer.lr": -1e-3},
            **for_hf(learning_rate=-1e-3),
            "torchtitan": {"optimizer.lr": -1e-3},
            "nanochat": {"matrix-lr": -0.02},
        },
    ),
    Mistake(
        "batch that the passes do not divide",
        ("global_batch_size|total_batch_size",),
        "",
        {
            "Overland": {"training.local_batch_size": 4, "training.global_batch_size": 10},
            "torchtitan": {"training.local_batch_size": 4, "training.global_batch_size": 10},
            "nanochat": {"device-batch-size": 4, "total-batch-size": 600},
        },
    ),
    Mistake(
        "data that is not there",
        ("nothing/here",),
        "",
        {
            "Overland": {"training.dataset_path": "nothing/here"},
            "transformers": {"dataset_name": "nothing/here"},
            "TRL": {"dataset_name": "nothing/here"},
            "axolotl": {"datasets": [{"path": "nothing/here", "type": "completion"}]},
            "torchtitan": {"training.dataset_path": "nothing/here"},
        },
    ),
    Mistake(
        "model that is not there",
        ("nothing/here",),
        "",
        {
            "Overland": {"model.from": "nothing/here"},
            "transformers": {"model_name_or_path": "nothing/here"},
            "TRL": {"model_name_or_path": "nothing/here"},
            "axolotl": {"base_model": "nothing/here"},
            "torchtitan": {"model.hf_assets_path": "nothing/here"},
        },
    ),
    Mistake(
        "sequences longer than the model's positions",
        ("seq_len|max_length|sequence_len|max_position",),
        "",
        {
            "Overland": {"training.seq_len": 4096},
            "TRL": {"max_length": 4096},
            "axolotl": {"sequence_len": 4096},
        },
    ),
    Mistake(
        "yes or no answered with a word",
        ("packing|sample_packing|compile.enable|gradient_checkpointing|data.document_mask",),
        "",
        {
            "Overland": {"data.document_mask": "maybe"},
            "transformers": {"gradient_checkpointing": "maybe"},
            "TRL": {"packing": "maybe"},
            "axolotl": {"sample_packing": "maybe"},
            "torchtitan": {"compile.enable": "maybe"},
        },
    ),
    Mistake(
        "key given twice",
        ("max_steps|steps",),
        "",
        {name: {} for name in ("Overland", "transformers", "TRL", "axolotl", "torchtitan")},
        {
            "Overland": "steps = 3\n",
            "transformers": "max_steps: 3\n",
            "TRL": "max_steps: 3\n",
            "axolotl": "max_steps: 3\n",
            "torchtitan": "steps = 3\n",
        },
    ),
    Mistake(
        "two mistakes at once: both are named",
        (
            "learning_ratee|optimizer.lrr|lrr|matrix.lrr",
            "max_steps|training.steps|steps|num-iterations",
        ),
        "",
        {
            "Overland": {"optimizer.lrr": 1e-3, "training.steps": "many"},
            **for_hf(learning_ratee=1e-3, max_steps="many"),
            "torchtitan": {"optimizer.lrr": 1e-3, "training.steps": "many"},
            "nanochat": {"matrix-lrr": 0.1, "num-iterations": "many"},
        },
    ),
)
