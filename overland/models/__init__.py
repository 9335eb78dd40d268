"""Models: plain PyTorch with Hugging Face parameter names, and nothing about parallelism.

A new Hugging Face family is an entry of `FAMILIES` in `hf_config.py`, as far as options of the
decoder describe it; `weights.py` loads the weights of any. Importing this package does not import
torch; `build_model` and the modules it needs do.
"""

from overland.errors import ModelError
from overland.models.config import DecoderConfig
from overland.models.flops import causal_flops_per_token, count_parameters, flops_per_token
from overland.models.hf_config import RopeConfig
from overland.models.registry import (
    build_model,
    flavor_names,
    model_names,
    register_model,
    resolve_config,
)

__all__ = [
    "DecoderConfig",
    "ModelError",
    "RopeConfig",
    "build_model",
    "causal_flops_per_token",
    "count_parameters",
    "flavor_names",
    "flops_per_token",
    "model_names",
    "register_model",
    "resolve_config",
]
