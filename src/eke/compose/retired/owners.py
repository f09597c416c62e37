"""Whose word a key is, so that a refusal names the tool it comes from."""

from eke.compose.wording import normal

# The first tool that has the word; the Trainer's are fields of its TrainingArguments (tested).
_OWNERS = {
    "the Hugging Face Trainer":
        "fp16 bf16 tf32 fp16_full_eval bf16_full_eval per_device_train_batch_size "
        "per_gpu_train_batch_size per_device_eval_batch_size gradient_accumulation_steps "
        "auto_find_batch_size optim learning_rate adam_beta1 adam_beta2 adam_epsilon "
        "lr_scheduler_type warmup_ratio num_train_epochs max_steps logging_steps eval_steps "
        "save_steps save_total_limit logging_strategy eval_strategy evaluation_strategy do_eval "
        "save_strategy resume_from_checkpoint overwrite_output_dir output_dir logging_dir run_name "
        "gradient_checkpointing gradient_checkpointing_kwargs torch_empty_cache_steps "
        "torch_compile torch_compile_backend torch_compile_mode use_liger_kernel "
        "liger_kernel_config deepspeed fsdp fsdp_config sharded_ddp ddp_backend use_cpu no_cuda "
        "dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor "
        "dataloader_persistent_workers group_by_length label_smoothing_factor "
        "neftune_noise_alpha report_to push_to_hub hub_model_id hub_strategy hub_token "
        "load_best_model_at_end metric_for_best_model greater_is_better "
        "eval_accumulation_steps do_train do_predict eval_on_start data_seed use_ipex "
        "jit_mode_eval half_precision_backend fp16_backend fp16_opt_level disable_tqdm "
        "save_only_model full_determinism lr_scheduler_kwargs ddp_find_unused_parameters "
        "ddp_bucket_cap_mb ddp_timeout optim_args no_tf32 torchdynamo remove_unused_columns "
        "dataloader_drop_last save_safetensors",
    "a Hugging Face example":
        "model_name_or_path train_file validation_file test_file dataset_name "
        "dataset_config_name tokenizer_name max_seq_length block_size max_train_samples "
        "max_eval_samples pad_to_max_length use_fast_tokenizer trust_remote_code torch_dtype "
        "attn_implementation max_train_steps preprocessing_num_workers overwrite_cache "
        "task_name validation_split_percentage model_revision",
    "TRL":
        "assistant_only_loss completion_only_loss packing padding_free dataset_text_field "
        "activation_offloading max_length eval_packing dataset_num_proc chat_template_path",
    "PyTorch Lightning":
        "max_epochs accumulate_grad_batches gradient_clip_val gradient_clip_algorithm "
        "log_every_n_steps fast_dev_run limit_train_batches limit_val_batches overfit_batches "
        "ckpt_path resume_from_ckpt default_root_dir devices accelerator strategy logger "
        "val_check_interval check_val_every_n_epoch seed_everything enable_checkpointing "
        "enable_progress_bar early_stopping num_sanity_val_steps deterministic benchmark "
        "detect_anomaly profiler max_time gpus auto_lr_find auto_scale_batch_size",
    "axolotl":
        "base_model sequence_len sample_packing val_set_size adapter micro_batch_size "
        "load_in_8bit load_in_4bit flash_attention early_stopping_patience lora_target_linear "
        "train_on_inputs evals_per_epoch saves_per_epoch datasets lora_modules_to_save",
    "LLaMA-Factory":
        "finetuning_type cutoff_len lora_target neat_packing max_samples quantization_bit "
        "flash_attn stage template dataset_dir val_size pure_bf16 enable_liger_kernel "
        "additional_target plot_loss",
    "torchtune":
        "enable_activation_checkpointing enable_activation_offloading optimizer_in_bwd dtype "
        "max_steps_per_epoch clip_grad_norm checkpoint_dir max_seq_len metric_logger",
    "PEFT": "lora_r lora_alpha lora_dropout target_modules use_dora use_rslora",
    "bitsandbytes": "bnb_4bit_quant_type bnb_4bit_use_double_quant bnb_4bit_compute_dtype",
    "Accelerate": "mixed_precision num_machines use_regional_compilation",
    "DeepSpeed": "zero_stage offload_optimizer offload_param nvme_path train_batch_size",
    "W&B": "wandb_project wandb_entity wandb_mode",
}  # fmt: skip
OWNERS = {normal(name): tool for tool, names in _OWNERS.items() for name in names.split()}
"""Name -> tool."""


def whose(name: str) -> str:
    """`is PyTorch Lightning's name`."""
    return f"is {OWNERS.get(normal(name), 'another tool')}'s name"
