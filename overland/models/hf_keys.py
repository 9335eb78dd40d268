"""The keys of a config.json: read, known to be harmless, or refused by name.

A key that Overland does not know may change the mathematics (Granite's multipliers, Gemma's
soft-caps, a MoE's experts), and a model that trains with it dropped in silence is wrong for weeks.
So unknown keys are errors unless their value is null.
"""

from __future__ import annotations

from typing import Any

from overland.errors import ModelError
from overland.models.config import FAMILIES, FULL


def keys_of(model_type: str) -> set[str]:
    """The keys of a family's config.json that describe the model."""
    family = FAMILIES[model_type]
    keys = {"model_type", "head_dim", *SIZES, *PLAIN, *_ROPE_KEYS}
    if family.chooses_attention_bias:
        keys.add("attention_bias")
    if family.chooses_mlp_bias:
        keys.add("mlp_bias")
    if family.chooses_norm:
        keys.add("norm_type")
    if family.window == "all":
        keys.add("sliding_window")
    if family.window == "layers":
        keys |= _LAYER_WINDOW_KEYS
    return keys


def refuse_unknown(hf: dict[str, Any], model_type: str, where: str) -> None:
    known = keys_of(model_type)
    for name, value in hf.items():
        if name in known or name in _HARMLESS or name.startswith("_") or value is None:
            continue
        if name in _ONLY:
            if value not in _ONLY[name]:
                raise ModelError(f"{where}: {name} = {value!r} is not supported")
            continue
        if name == "layer_types" and set(value) == {FULL}:
            continue
        if name in _REASONS:
            raise ModelError(f"{where}: {name} is not supported: {_REASONS[name]}")
        raise ModelError(
            f"{where}: key '{name}' = {_short(value)} is not known for model_type '{model_type}' "
            "and might change the mathematics"
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)

PLAIN = (
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "hidden_act",
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)

_ROPE_KEYS = frozenset({"rope_theta", "rope_scaling", "rope_parameters"})
_LAYER_WINDOW_KEYS = frozenset(
    {"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"}
)

_MOE = "mixtures of experts are not built yet"
_REASONS = {
    "quantization_config": "load the unquantized weights",
    "auto_map": "the repository brings its own model code",
    "num_experts": _MOE,
    "num_local_experts": _MOE,
    "num_experts_per_tok": _MOE,
    "n_routed_experts": _MOE,
    "moe_intermediate_size": _MOE,
}

# Keys that change the mathematics unless they hold one of these values.
_ONLY: dict[str, tuple[Any, ...]] = {
    "attention_dropout": (0,),
    "hidden_dropout": (0,),
    "resid_pdrop": (0,),
    "embd_pdrop": (0,),
    "partial_rotary_factor": (1,),
    "use_mrope": (False,),
    "is_encoder_decoder": (False,),
    "is_causal": (True,),
    "add_cross_attention": (False,),
    "pruned_heads": ({},),
    "rope_interleaved": (False,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
}

# Bookkeeping, generation defaults and hints to the runtime: none changes the forward pass.
_HARMLESS_KEYS = """
    architectures transformers_version torch_dtype dtype use_cache name_or_path use_bfloat16
    pretraining_tp unsloth_fixed unsloth_version model_name task_specific_params
    return_dict output_hidden_states output_attentions torchscript is_decoder tf_legacy_loss
    chunk_size_feed_forward cross_attention_hidden_size tie_encoder_decoder finetuning_task
    id2label label2id num_labels problem_type tokenizer_class prefix sep_token_id
    decoder_start_token_id mask_token_id cls_token_id begin_suppress_tokens suppress_tokens
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
    return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty attn_implementation max_sequence_length is_llama_config
    transformers.js_config
"""
_HARMLESS = frozenset(_HARMLESS_KEYS.split())
