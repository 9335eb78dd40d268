"""Tables of axolotl's simple keys: renamed, without effect here, or refused unless they ask for
what Overland does anyway, each with its reason. Names of keys are separated by spaces.

Keys that depend on each other are translated in `axolotl` and `axolotl_data`.
"""

from __future__ import annotations

from typing import Any

from overland.apps.dialects.draft import by_key

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

# Keys that are only translated together with others, such as datasets.
WITH_OTHERS = (
    "chat_template", "chat_template_jinja", "train_on_inputs", "excess_length_strategy",
    "precompute_ref_log_probs",
)  # fmt: skip

KERNELS = "the fastest implementation on the device is used; all compute the same"
WANDB = "the wandb package reads it from its own variable: WANDB_PROJECT, WANDB_NAME, …"
SHARDING = "parameters are sharded block by block over all devices (parallelism.sharding_stage)"

IGNORED = by_key({
    "the architecture and the tokenizer are detected from the files in the folder":
        "model_type tokenizer_type tokenizer_use_fast tokenizer_legacy "
        "tokenizer_save_jinja_files cls_model_config processor_type is_llama_derived_model "
        "is_mistral_derived_model is_falcon_derived_model is_qwen_derived_model",
    KERNELS:
        "flash_attention sdp_attention xformers_attention flex_attention eager_attention "
        "flex_attn_compile_kwargs flash_attn_cross_entropy flash_attn_rms_norm "
        "flash_attn_fuse_mlp flash_attn_fuse_qkv flash_optimum fused_attn_kernel sdpa_varlen "
        "lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel "
        "chunked_cross_entropy chunked_cross_entropy_num_chunks cut_cross_entropy "
        "unsloth_cross_entropy_loss unsloth_lora_mlp unsloth_lora_qkv unsloth_lora_o "
        "unsloth_rms_norm unsloth_rope tiled_mlp tiled_mlp_num_shards tiled_mlp_use_original_mlp "
        "use_kernels torch_compile_mode torch_compile_options dpo_use_liger_kernel "
        "dpo_padding_free batch_flattening heads_k_stride ring_attn_func "
        "fp8_enable_fsdp_float8_all_gather",
    "padding is masked and takes no loss, so it makes no difference":
        "pad_to_sequence_len pad_to_multiple_of padding_side",
    "packed or not, the loss per token is the same":
        "eval_sample_packing sample_packing_group_size sample_packing_bin_size "
        "sample_packing_eff_est sample_packing_sequentially multipack_real_batches "
        "sample_packing_mp_start_method total_num_tokens total_supervised_tokens "
        "streaming_multipack_buffer_size pretrain_multipack_buffer_size",
    "code that comes with a model is never run": "trust_remote_code",
    "training uses no network; `overland fetch` downloads and `overland push` uploads":
        "hub_model_id hub_strategy hub_revision push_dataset_to_hub push_to_hub_model_id "
        "hf_use_auth_token revision_of_model",
    "a thread reads ahead (data.read_ahead); there are no loader processes":
        "dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor "
        "dataset_keep_in_memory num_dataset_shards_to_save skip_prepare_dataset "
        "preprocess_iterable remove_unused_columns",
    "metrics go to the run folder, to TensorBoard, and optionally to Weights & Biases":
        "use_mlflow mlflow_tracking_uri mlflow_experiment_name mlflow_run_name "
        "hf_mlflow_log_artifacts use_comet comet_api_key comet_workspace comet_project_name "
        "comet_experiment_key comet_mode comet_online comet_experiment_config use_trackio "
        "trackio_project_name trackio_run_name trackio_space_id use_otel_metrics "
        "otel_metrics_host otel_metrics_port include_tokens_per_second include_tkps "
        "profiler_steps profiler_steps_start",
    WANDB:
        "wandb_name wandb_entity wandb_watch wandb_run_id wandb_log_model",
    "the launcher sets the devices (NGPU, `overland submit`)":
        "device device_map world_size local_rank ddp ddp_timeout ddp_bucket_cap_mb "
        "ddp_broadcast_buffers ddp_find_unused_parameters use_ray ray_run_name ray_num_workers "
        "resources_per_worker accelerator_config",
    SHARDING:
        "fsdp_version fsdp_final_state_dict_type qlora_sharded_model_loading low_cpu_mem_usage "
        "experimental_skip_move_to_device lora_on_cpu deepcompile",
    "it is for inference; use `overland generate`":
        "gradio_title gradio_share gradio_server_name gradio_server_port gradio_max_new_tokens "
        "gradio_temperature inference generate_samples num_generation_samples "
        "generation_max_new_tokens generation_temperature generation_top_p generation_top_k "
        "generation_prompt_ratio generation_do_sample eval_table_size eval_max_new_tokens",
    "`overland check` computes the memory of a step per device":
        "max_memory gpu_memory_limit auto_find_batch_size",
    "it is determined automatically": "strict debug axolotl_config_path is_preprocess",
    "a run automatically resumes from its own newest checkpoint": "auto_resume_from_checkpoints",
    "validation measures the loss":
        "do_causal_lm_eval eval_causal_lm_metrics do_bench_eval bench_dataset bench_split "
        "metric_for_best_model greater_is_better eval_accumulation_steps",
    "float32 products stay float32; for speed, set training.mixed_precision_param": "tf32",
    "recomputes as little as memory allows (activation_checkpoint.mode)":
        "gradient_checkpointing selective_checkpointing",
    "recomputation is always exact": "gradient_checkpointing_kwargs",
    "garbage is collected every training.gc_freq steps":
        "gc_steps gc_collect_steps torch_empty_cache_steps",
    "weights are always safetensors": "save_safetensors",
    "every checkpoint is complete, so that it can be resumed": "save_only_model",
    "checkpoint.interval sets when to save": "save_first_step",
    "`overland convert` merges, with --merge-lora": "merge_lora merge_method",
    "a growing vocabulary stays aligned to the same multiple": "resize_token_embeddings_to_32x",
    "a vocabulary never shrinks": "shrink_embeddings",
    "embeddings of new tokens always start as the mean of the others": "mean_resizing_embeddings",
    "lora.base is the type of all frozen weights": "embeddings_skip_upcast",
    "training.dtype is the type of the adapters": "peft_autocast_adapter_dtype",
    "the chat template determines what ends a turn": "eot_tokens",
    "tied matrices stay tied": "peft_ensure_weight_tying",
    "training.last_batch sets what happens to an incomplete last batch": "dataloader_drop_last",
})  # fmt: skip

# Keys that would change what is trained if they were ignored: what to do about any value, and about
# any but false.
UNSUPPORTED = by_key({
    "NF4 is the only supported quantization; remove it": "bnb_config_kwargs",
    "quantized weights are not supported": "model_quantization_config",
    "adapters apply only to matrices of layers; set lora_target_modules": "lora_target_parameters",
    "blocks are not replicated": "peft_layer_replication",
    "single rows of the embeddings cannot be trained; lora_modules_to_save: [embed_tokens, "
    "lm_head] trains all of them":
        "peft_trainable_token_indices",
    "LoftQ is not supported; remove it": "peft",
    "ReLoRA is not supported": "relora_prune_ratio",
    "LISA is not supported": "lisa_n_layers lisa_step_interval",
    "restarts of the learning rate are not supported":
        "jagged_restart_steps jagged_restart_warmup_steps",
    "set model.freeze to the parameters that are not trained, by name with wildcards":
        "unfrozen_parameters",
    "use [[optimizer.groups]] with an lr_factor, which multiplies the learning rate": "lr_groups",
    "use [[optimizer.groups]] with an lr_factor": "embedding_lr embedding_lr_scale",
    "set optimizer.options instead": "optim_args",
    "GaLore is not supported": "optim_target_modules",
    "the plateau comes before the decay; set lr_scheduler.decay_ratio": "cosine_constant_lr_ratio",
    "the warm-up always starts from 0": "lr_div_factor",
    "parts of a dataset are not supported; write a part to its own file":
        "dataset_shard_num dataset_shard_idx",
    "short samples are not dropped; remove them from the files": "min_sample_len",
    "it is for pretraining; start from a pretraining recipe of `overland init`":
        "pretraining_dataset",
    "early stopping is not supported; remove it, and set checkpoint.keep_best = 1 to keep the best":
        "early_stopping_patience",
    "axolotl's checkpoints cannot be resumed; set base_model or lora_model_dir to its weights":
        "resume_from_checkpoint",
    "set health.spike_guard, which detects loss spikes":
        "loss_watchdog_threshold loss_watchdog_patience",
    "put custom code into a module, and set job.custom_import to it": "trainer_cls",
    "set model.overrides.rope_scaling instead": "rope_scaling",
    "classification models are not supported": "num_labels",
    "set tokens to the special tokens to add": "added_tokens_overrides",
    "untrained embeddings are not changed": "fix_untrained_tokens",
    "quantization-aware training is not supported": "qat",
    "quantization is not supported": "quantization",
    "multimodal models are not supported": "freeze_mm_modules",
    "combinations of losses are not supported": "dpo_loss_weights",
    "set rl: orpo to learn the chosen answers as well": "rpo_alpha",
    "KTO is not supported": "kto_desirable_weight kto_undesirable_weight",
    "only a chat template can add a default system message; set sft.chat_template to one that does":
        "default_system_message",
    "it is for GRPO, which is not supported": "trl vllm",
})  # fmt: skip
MUST_BE_OFF = by_key({
    "8-bit frozen weights are not supported; remove it, which keeps them in bfloat16, or set "
    "load_in_4bit":
        "load_in_8bit",
    "GPTQ weights are not supported": "gptq",
    "the matrices of supported models are not transposed": "lora_fan_in_fan_out",
    "ReLoRA is not supported": "relora",
    "the warm-up is always linear": "lr_quadratic_warmup",
    "training data is always shuffled": "shuffle_before_merging_datasets curriculum_sampling",
    "duplicates are not removed; deduplicate the files first": "dataset_exact_deduplication",
    "data is read from local files; remove it": "streaming",
    "the last weights are the result; remove it, and set checkpoint.keep_best = 1 to also keep "
    "the best":
        "load_best_model_at_end",
    "sparse attention is not supported; remove it": "s2_attention",
    "8-bit attention is not supported; remove it": "sage_attention",
    "attention uses the standard softmax; remove it": "scaling_softmax",
    "this loss is not supported": "use_eaft",
    "positions always follow the text; remove it": "use_pose",
    "reward models are not supported": "reward_model process_reward_model",
    "activations stay on the device or are recomputed": "activation_offloading",
    "set training.enable_cpu_offload": "layer_offloading",
    "all pairs have the same weight": "dpo_use_weighting",
    "the loss is always a mean over pairs": "dpo_norm_loss",
})  # fmt: skip

# Key -> (harmless values; what to do about any other value).
REFUSED: dict[str, tuple[list[Any], str]] = {
    **{key: ([], reason) for key, reason in UNSUPPORTED.items()},
    **{key: ([False], reason) for key, reason in MUST_BE_OFF.items()},
    "peft_layers_pattern": (["layers", ["layers"]], "the list of blocks is always called layers"),
    "peft_init_lora_weights": ([True], "adapters always start as PEFT's do by default; remove it"),
    "loraplus_lr_embedding": (
        [1e-6],
        "adapters of embeddings use the same learning rate as all adapters; remove it",
    ),
    "shuffle_merged_datasets": ([True], "training data is always shuffled"),
}

# Keys that are true or false, if text for either would otherwise be taken for true.
SWITCHES = (
    "reinit_weights", "load_in_4bit", "lora_target_linear", "precompute_ref_log_probs",
    "train_on_inputs", "sample_packing", "use_wandb", "fp8", "fp16", "float16", "bfloat16",
    "float32",
    *(key for key, (harmless, _) in REFUSED.items() if harmless in ([True], [False])),
)  # fmt: skip
