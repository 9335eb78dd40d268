"""What a proof takes from a user's config: the kind of model and how it computes, not its size."""

from __future__ import annotations

from overland.checks.model import check_custom_import
from overland.config.errors import ConfigError, Problem
from overland.config.load import load_config
from overland.models.registry import model_config, own_model_name
from overland.tools.proofs.layouts import Sections

KINDS = ("model_type", "tie_word_embeddings", "attention_bias", "mlp_bias", "norm_type")


def settings_of(source: str | None) -> Sections | None:
    """Sections that hold for every layout of the proof; None without a config."""
    if source is None:
        return None
    loaded = load_config(source)
    config = loaded.config
    if problems := list(check_custom_import(loaded)):  # the model may be one of the user's own
        raise ConfigError(problems)
    settings: Sections = {
        "job": {"custom_import": config.job.custom_import},
        "activation_checkpoint": config.activation_checkpoint.model_dump(),
        "compile": config.compile.model_dump(),
        "data": {"document_mask": config.data.document_mask},
        "optimizer": {"name": config.optimizer.name, "options": config.optimizer.options},
        "debug": {"seed": config.debug.seed},
    }
    if config.compile.enable:  # the proof is about the layout; generated code differs in rounding
        settings["compile"]["backend"] = "aot_eager"
    architecture = model_config(config.model)
    if own_model_name(architecture):  # a plain decoder of its sizes would prove nothing
        message = (
            "a model of your own is not proven here: train it for a few steps in float64 under "
            "each layout, and compare the losses"
        )
        raise ConfigError([Problem(message, loaded.where("model.name"), "model.name")])
    hf = architecture.to_hf()
    settings["model"] = {key: hf[key] for key in KINDS if key in hf}
    if hf.get("sliding_window"):
        settings["model"]["sliding_window"] = 9
    return settings
