"""The simple keys of axolotl: renamed, without effect here, or refused unless they ask for what
Overland does anyway.

Keys that depend on each other are translated in `axolotl` and `axolotl_data`.
"""

from __future__ import annotations

from typing import Any

# axolotl's key -> current key, with the same values.
RENAMED: dict[str, str] = {
    "output_dir": "job.dump_folder",
    "dataset_prepared_path": "data.cache_folder",
    "dataset_processes": "data.tokenise_processes",
    "dataset_num_proc": "data.tokenise_processes",
    "group_by_length": "data.group_by_length",
    "eval_sequence_len": "validation.seq_len",
    "eval_batch_size": "validation.local_batch_size",
    "neftune_noise_alpha": "sft.neftune_alpha",
    "noisy_embedding_alpha": "sft.neftune_alpha",
    "chat_template_kwargs": "sft.template_options",
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_epsilon": "optimizer.eps",
    "max_grad_norm": "training.max_norm",
    "logging_steps": "metrics.log_freq",
    "save_total_limit": "checkpoint.keep_latest_k",
    "use_tensorboard": "metrics.enable_tensorboard",
    "torch_compile": "compile.enable",
    "torch_compile_backend": "compile.backend",
    "seed": "debug.seed",
    "dp_shard_size": "parallelism.data_parallel_shard_degree",
    "dp_replicate_size": "parallelism.data_parallel_replicate_degree",
    "tensor_parallel_size": "parallelism.tensor_parallel_degree",
    "context_parallel_size": "parallelism.context_parallel_degree",
    "sequence_parallel_degree": "parallelism.context_parallel_degree",
}

# With an adapter.
LORA: dict[str, str] = {
    "lora_r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_modules_to_save": "lora.modules_to_save",
    "lora_exclude_modules": "lora.exclude",
    "lora_rank_pattern": "lora.rank_pattern",
    "lora_alpha_pattern": "lora.alpha_pattern",
    "peft_layers_to_transform": "lora.layers",
    "peft_use_rslora": "lora.rslora",
    "peft_use_dora": "lora.dora",
    "loraplus_lr_ratio": "lora.lr_ratio",
    "lora_model_dir": "lora.adapter",
}

# With rl.
PREFERENCE: dict[str, str] = {
    "rl_beta": "preference.beta",
    "dpo_beta": "preference.beta",
    "dpo_label_smoothing": "preference.label_smoothing",
    "simpo_gamma": "preference.simpo_gamma",
    "max_prompt_len": "preference.max_prompt",
}

# Keys that are translated by code.
TRANSLATED = (
    "base_model", "tokenizer_config", "overrides_of_model_config", "adapter", "load_in_4bit",
    "lora_target_modules", "lora_target_linear", "rl", "orpo_alpha", "cpo_alpha",
    "precompute_ref_log_probs", "datasets", "test_datasets", "chat_template",
    "chat_template_jinja", "train_on_inputs", "tokens", "special_tokens", "sequence_len",
    "excess_length_strategy", "sample_packing", "val_set_size", "micro_batch_size",
    "gradient_accumulation_steps", "num_epochs", "max_steps", "optimizer", "lr_scheduler",
    "cosine_min_lr_ratio", "warmup_steps", "warmup_ratio", "bf16", "fp16", "float32", "fp8",
    "gradient_checkpointing", "eval_steps", "evals_per_epoch", "save_steps", "saves_per_epoch",
    "save_strategy", "wandb_project", "use_wandb", "deepspeed", "fsdp", "fsdp_config",
)  # fmt: skip

KERNELS = "the fastest implementation on the device is used; all compute the same"
PADDING = "padding is masked and takes no loss, so it makes no difference"
PACKING = "packed or not, the loss per token is the same"
MODEL = "the architecture and the tokenizer are detected from the files in the folder"
REMOTE = "code that comes with a model is never run"
HUB = "training uses no network; `overland fetch` downloads and `overland push` uploads"
LOADER = "a thread reads ahead (data.read_ahead); there are no loader processes"
LOGS = "metrics go to the run folder, to TensorBoard, and optionally to Weights & Biases"
WANDB = "the wandb package reads it from its own variable: WANDB_PROJECT, WANDB_NAME, …"
LAUNCH = "the launcher sets the devices (NGPU, `overland submit`)"
SHARDING = "parameters are sharded block by block over all devices (parallelism.sharding_stage)"
INFERENCE = "it is for inference; use `overland generate`"
MERGING = "`overland convert` merges, with --merge-lora"
MEMORY = "`overland check` computes the memory of a step per device"
ITSELF = "it is determined automatically"
RESUME = "a run automatically resumes from its own newest checkpoint"
EVALUATION = "validation measures the loss"

IGNORED: dict[str, str] = {
    **dict.fromkeys(
        ("model_type", "tokenizer_type", "tokenizer_use_fast", "tokenizer_legacy",
         "tokenizer_save_jinja_files", "cls_model_config", "processor_type",
         "is_llama_derived_model", "is_mistral_derived_model", "is_falcon_derived_model",
         "is_qwen_derived_model"),
        MODEL,
    ),
    **dict.fromkeys(
        ("flash_attention", "sdp_attention", "xformers_attention", "flex_attention",
         "eager_attention", "flex_attn_compile_kwargs", "flash_attn_cross_entropy",
         "flash_attn_rms_norm", "flash_attn_fuse_mlp", "flash_attn_fuse_qkv", "flash_optimum",
         "fused_attn_kernel", "sdpa_varlen", "lora_mlp_kernel", "lora_qkv_kernel",
         "lora_o_kernel", "lora_embedding_kernel", "chunked_cross_entropy",
         "chunked_cross_entropy_num_chunks", "cut_cross_entropy", "unsloth_cross_entropy_loss",
         "unsloth_lora_mlp", "unsloth_lora_qkv", "unsloth_lora_o", "unsloth_rms_norm",
         "unsloth_rope", "tiled_mlp", "tiled_mlp_num_shards", "tiled_mlp_use_original_mlp",
         "use_kernels", "torch_compile_mode", "torch_compile_options",
         "dpo_use_liger_kernel", "dpo_padding_free", "batch_flattening", "heads_k_stride",
         "ring_attn_func", "fp8_enable_fsdp_float8_all_gather"),
        KERNELS,
    ),
    **dict.fromkeys(
        ("pad_to_sequence_len", "pad_to_multiple_of", "padding_side"), PADDING
    ),
    **dict.fromkeys(
        ("eval_sample_packing", "sample_packing_group_size", "sample_packing_bin_size",
         "sample_packing_eff_est", "sample_packing_sequentially", "multipack_real_batches",
         "sample_packing_mp_start_method", "total_num_tokens", "total_supervised_tokens"),
        PACKING,
    ),
    "trust_remote_code": REMOTE,
    **dict.fromkeys(
        ("hub_model_id", "hub_strategy", "hub_revision", "push_dataset_to_hub",
         "push_to_hub_model_id", "hf_use_auth_token", "revision_of_model"),
        HUB,
    ),
    **dict.fromkeys(
        ("dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor",
         "dataset_keep_in_memory", "num_dataset_shards_to_save", "skip_prepare_dataset",
         "preprocess_iterable", "remove_unused_columns"),
        LOADER,
    ),
    **dict.fromkeys(
        ("use_mlflow", "mlflow_tracking_uri", "mlflow_experiment_name", "mlflow_run_name",
         "hf_mlflow_log_artifacts", "use_comet", "comet_api_key", "comet_workspace",
         "comet_project_name", "comet_experiment_key", "comet_mode", "comet_online",
         "comet_experiment_config", "use_trackio", "trackio_project_name", "trackio_run_name",
         "trackio_space_id", "use_otel_metrics", "otel_metrics_host", "otel_metrics_port",
         "include_tokens_per_second", "include_tkps", "profiler_steps", "profiler_steps_start"),
        LOGS,
    ),
    **dict.fromkeys(
        ("wandb_name", "wandb_entity", "wandb_watch", "wandb_run_id", "wandb_log_model"), WANDB
    ),
    **dict.fromkeys(
        ("device", "device_map", "world_size", "local_rank", "ddp", "ddp_timeout",
         "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_find_unused_parameters", "use_ray",
         "ray_run_name", "ray_num_workers", "resources_per_worker", "accelerator_config"),
        LAUNCH,
    ),
    **dict.fromkeys(
        ("fsdp_version", "fsdp_final_state_dict_type", "qlora_sharded_model_loading",
         "low_cpu_mem_usage", "experimental_skip_move_to_device", "lora_on_cpu", "deepcompile"),
        SHARDING,
    ),
    **dict.fromkeys(
        ("gradio_title", "gradio_share", "gradio_server_name", "gradio_server_port",
         "gradio_max_new_tokens", "gradio_temperature", "inference", "generate_samples",
         "num_generation_samples", "generation_max_new_tokens", "generation_temperature",
         "generation_top_p", "generation_top_k", "generation_prompt_ratio",
         "generation_do_sample", "eval_table_size", "eval_max_new_tokens"),
        INFERENCE,
    ),
    **dict.fromkeys(("max_memory", "gpu_memory_limit", "auto_find_batch_size"), MEMORY),
    **dict.fromkeys(("strict", "debug", "axolotl_config_path", "is_preprocess"), ITSELF),
    "auto_resume_from_checkpoints": RESUME,
    **dict.fromkeys(
        ("do_causal_lm_eval", "eval_causal_lm_metrics", "do_bench_eval", "bench_dataset",
         "bench_split", "metric_for_best_model", "greater_is_better", "eval_accumulation_steps"),
        EVALUATION,
    ),
    "tf32": "float32 products stay float32; for speed, set training.mixed_precision_param",
    "gradient_checkpointing_kwargs": "recomputation is always exact",
    **dict.fromkeys(
        ("gc_steps", "gc_collect_steps", "torch_empty_cache_steps"),
        "garbage is collected every training.gc_freq steps",
    ),
    "save_safetensors": "weights are always safetensors",
    "save_only_model": "every checkpoint is complete, so that it can be resumed",
    "save_first_step": "checkpoint.interval sets when to save",
    "merge_lora": MERGING,
    "merge_method": MERGING,
    "resize_token_embeddings_to_32x":
        "a growing vocabulary stays aligned to the same multiple",
    "shrink_embeddings": "a vocabulary never shrinks",
    "mean_resizing_embeddings": "embeddings of new tokens always start as the mean of the others",
    "embeddings_skip_upcast": "lora.base is the type of all frozen weights",
    "peft_autocast_adapter_dtype": "training.dtype is the type of the adapters",
    "eot_tokens": "the chat template determines what ends a turn",
    "peft_ensure_weight_tying": "tied matrices stay tied",
    "streaming_multipack_buffer_size": PACKING,
    "pretrain_multipack_buffer_size": PACKING,
    "dataloader_drop_last": "training.last_batch sets what happens to an incomplete last batch",
}  # fmt: skip

# Key that would change what is trained if it were ignored -> (harmless values; what to do about any
# other value).
REFUSED: dict[str, tuple[list[Any], str]] = {
    "load_in_8bit": (
        [False],
        "8-bit frozen weights are not supported; remove it, which keeps them in bfloat16, or set "
        "load_in_4bit",
    ),
    "gptq": ([False], "GPTQ weights are not supported"),
    "bnb_config_kwargs": (
        [],
        "NF4 is the only supported quantization; remove it",
    ),
    "model_quantization_config": ([], "quantized weights are not supported"),
    "lora_fan_in_fan_out": ([False], "the matrices of supported models are not transposed"),
    "lora_target_parameters": (
        [[]],
        "adapters apply only to matrices of layers; set lora_target_modules",
    ),
    "peft_layers_pattern": (["layers", ["layers"]], "the list of blocks is always called layers"),
    "peft_layer_replication": ([[]], "blocks are not replicated"),
    "peft_init_lora_weights": (
        [True],
        "adapters are always initialized as PEFT does by default; remove it",
    ),
    "peft_trainable_token_indices": (
        [],
        "single rows of the embeddings cannot be trained; lora_modules_to_save: [embed_tokens, "
        "lm_head] trains all of them",
    ),
    "peft": ([], "LoftQ is not supported; remove it"),
    "loraplus_lr_embedding": (
        [1e-6],
        "adapters of embeddings use the same learning rate as all adapters; remove it",
    ),
    "relora": ([False], "ReLoRA is not supported"),
    "relora_prune_ratio": ([], "ReLoRA is not supported"),
    "lisa_n_layers": ([], "LISA is not supported"),
    "lisa_step_interval": ([], "LISA is not supported"),
    "jagged_restart_steps": ([], "restarts of the learning rate are not supported"),
    "jagged_restart_warmup_steps": ([], "restarts of the learning rate are not supported"),
    "unfrozen_parameters": (
        [[]],
        "set model.freeze to the parameters that are not trained, by name with wildcards",
    ),
    "lr_groups": (
        [[]],
        "use [[optimizer.groups]] with an lr_factor, which multiplies the learning rate",
    ),
    "embedding_lr": ([], "use [[optimizer.groups]] with an lr_factor"),
    "embedding_lr_scale": ([], "use [[optimizer.groups]] with an lr_factor"),
    "optim_args": ([], "set optimizer.options instead"),
    "optim_target_modules": ([], "GaLore is not supported"),
    "lr_quadratic_warmup": ([False], "the warm-up is always linear"),
    "cosine_constant_lr_ratio": (
        [],
        "the plateau comes before the decay; set lr_scheduler.decay_ratio",
    ),
    "lr_div_factor": ([], "the warm-up always starts from 0"),
    "shuffle_merged_datasets": ([True], "training data is always shuffled"),
    "shuffle_before_merging_datasets": ([False], "training data is always shuffled"),
    "curriculum_sampling": ([False], "training data is always shuffled"),
    "dataset_exact_deduplication": (
        [False],
        "duplicates are not removed; deduplicate the files first",
    ),
    "dataset_shard_num": ([], "parts of a dataset are not supported; write a part to its own file"),
    "dataset_shard_idx": ([], "parts of a dataset are not supported; write a part to its own file"),
    "min_sample_len": ([], "short samples are not dropped; remove them from the files"),
    "streaming": ([False], "data is read from local files; remove it"),
    "pretraining_dataset": (
        [[]],
        "it is for pretraining; start from a pretraining recipe of `overland init`",
    ),
    "early_stopping_patience": (
        [],
        "early stopping is not supported; remove it, and set checkpoint.keep_best = 1 to keep the "
        "best",
    ),
    "load_best_model_at_end": (
        [False],
        "the last weights are the result; remove it, and set checkpoint.keep_best = 1 to also keep "
        "the best",
    ),
    "resume_from_checkpoint": (
        [],
        "axolotl's checkpoints cannot be resumed; set base_model or lora_model_dir to its weights",
    ),
    "loss_watchdog_threshold": ([], "set health.spike_guard, which detects loss spikes"),
    "loss_watchdog_patience": ([], "set health.spike_guard, which detects loss spikes"),
    "trainer_cls": ([], "put custom code into a module, and set job.custom_import to it"),
    "s2_attention": ([False], "sparse attention is not supported; remove it"),
    "sage_attention": ([False], "8-bit attention is not supported; remove it"),
    "scaling_softmax": ([False], "attention uses the standard softmax; remove it"),
    "use_eaft": ([False], "this loss is not supported"),
    "use_pose": ([False], "positions always follow the text; remove it"),
    "rope_scaling": ([], "set model.overrides.rope_scaling instead"),
    "reward_model": ([False], "reward models are not supported"),
    "process_reward_model": ([False], "reward models are not supported"),
    "num_labels": ([], "classification models are not supported"),
    "added_tokens_overrides": ([], "set tokens to the special tokens to add"),
    "fix_untrained_tokens": ([], "untrained embeddings are not changed"),
    "activation_offloading": ([False], "activations stay on the device or are recomputed"),
    "layer_offloading": ([False], "set training.enable_cpu_offload"),
    "qat": ([], "quantization-aware training is not supported"),
    "quantization": ([], "quantization is not supported"),
    "freeze_mm_modules": ([], "multimodal models are not supported"),
    "dpo_use_weighting": ([False], "all pairs have the same weight"),
    "dpo_loss_weights": ([], "combinations of losses are not supported"),
    "dpo_norm_loss": ([False], "the loss is always a mean over pairs"),
    "rpo_alpha": ([], "set rl: orpo to learn the chosen answers as well"),
    "kto_desirable_weight": ([], "KTO is not supported"),
    "kto_undesirable_weight": ([], "KTO is not supported"),
    "default_system_message": (
        [],
        "only a chat template can add a default system message; set sft.chat_template to one that "
        "does",
    ),
    "trl": ([], "it is for GRPO, which is not supported"),
    "vllm": ([], "it is for GRPO, which is not supported"),
}

# Keys that are true or false, if text for either would otherwise be taken for true.
SWITCHES = (
    "reinit_weights", "load_in_4bit", "lora_target_linear", "precompute_ref_log_probs",
    "train_on_inputs", "sample_packing", "use_wandb", "fp8", "fp16", "float16", "bfloat16",
    "float32",
    *(key for key, (harmless, _) in REFUSED.items() if harmless in ([True], [False])),
)  # fmt: skip

# Optimizers that are equivalent to AdamW.
ADAMW = (
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_hf",
    "adamw_apex_fused",
    "adamw",
    "optimi_adamw",
)
NARROW_ADAMW = (
    "adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "paged_adamw",
    "adamw_torch_8bit", "adamw_torch_4bit", "ao_adamw_8bit", "ao_adamw_4bit", "ao_adamw_fp8",
    "flash_adamw",
)  # fmt: skip
LION = ("lion_32bit", "lion_8bit", "paged_lion_32bit", "paged_lion_8bit", "lion_pytorch")

# Plugins that only provide other implementations, and the prefixes of their keys.
PLUGINS = ("liger", "cut_cross_entropy")
PLUGIN_KEYS = ("liger_",)
