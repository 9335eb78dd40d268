"""What a proof takes from a user's config: the kind of model and how it computes, not its size."""

from __future__ import annotations

from overland.config.load import load_config
from overland.models.config import DecoderConfig
from overland.models.registry import model_config
from overland.proofs.layouts import Sections

KINDS = ("model_type", "tie_word_embeddings", "attention_bias", "mlp_bias", "norm_type")


def settings_of(source: str | None) -> Sections | None:
    """Sections that hold for every layout of the proof; None without a config."""
    if source is None:
        return None
    config = load_config(source).config
    settings: Sections = {
        "activation_checkpoint": config.activation_checkpoint.model_dump(),
        "compile": config.compile.model_dump(),
        "data": {"document_mask": config.data.document_mask},
        "optimizer": {"name": config.optimizer.name},
        "debug": {"seed": config.debug.seed},
    }
    if config.compile.enable:  # the proof is about the layout; generated code differs in rounding
        settings["compile"]["backend"] = "aot_eager"
    architecture = model_config(config.model)
    if isinstance(architecture, DecoderConfig):
        hf = architecture.to_hf()
        settings["model"] = {key: hf[key] for key in KINDS if key in hf}
        if hf.get("sliding_window"):
            settings["model"]["sliding_window"] = 9
    return settings
