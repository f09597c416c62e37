"""Keys that exist only to be refused: other tools' names of them."""

from eke.config.foreign_names.phrases import HERE, LATER, MODES, PARALLEL, Row

BEST = f"{LATER}: a run ends after its last step, and the newest checkpoints are kept; "
BEST += "metrics.jsonl has the loss of every evaluation (train.eval_every)"
UPLOAD = "is not done: eke uploads nothing; "
UPLOAD += "the finished checkpoint is RUN/model: hf upload OWNER/NAME RUN/model"

# fmt: off
KEYS: tuple[Row, ...] = (
    # number formats
    ("hf:fp16 use_fp16", HERE, "precision=fp16", {"false": "precision=fp32"}),
    ("hf:bf16 use_bf16", HERE, "precision=bf16", {"false": "precision=fp32"}),
    ("hf:tf32 allow_tf32 use_tf32", HERE, "precision.tf32=on", {"false": "precision.tf32=off"}),
    ("hf:no_tf32", HERE, "precision.tf32=off", {"false": "precision.tf32=on"}),
    ("fp8 use_fp8 fp8_backend float8", HERE, "precision=fp8", {"false": "precision=bf16"}),
    ("factory:pure_bf16", HERE, "precision=bf16_pure", {"false": "precision=bf16"}),
    ("precision.fp8 precision.fp8_recipe precision.recipe_name", HERE,
     "precision.float8=tensorwise", {"false": "precision.float8=off",
     "rowwise": "precision.float8=rowwise"}),
    ("accelerate:mixed_precision example:torch_dtype tune:dtype amp model.torch_dtype model.dtype",
     HERE, "precision={value}", {"no": "precision=fp32", "false": "precision=fp32",
     "true": "precision=fp16"}),
    ("hf:half_precision_backend hf:fp16_backend hf:fp16_opt_level", "belongs to apex, which eke "
     "does not use; torch's autocast is", ""),
    ("hf:fp16_full_eval", HERE, "precision.evaluation=float16",
     {"false": "precision.evaluation=same"}),
    ("hf:bf16_full_eval", HERE, "precision.evaluation=bfloat16",
     {"false": "precision.evaluation=same"}),
    ("master_weights use_master_weights fp32_master_weights precision.master_weights", HERE,
     "precision.master=on", {"false": "precision.master=off"}),
    # batch
    ("hf:per_device_train_batch_size hf:per_gpu_train_batch_size", HERE,
     "batch.per_device={value}"),
    ("hf:per_device_eval_batch_size eval_batch_size", HERE, "batch.eval_per_device={value}"),
    ("batch_size bs deepspeed:train_batch_size axolotl:micro_batch_size batch.size",
     "could be one device's or all devices' batch; eke's is batch.per_device",
     "batch.per_device={value}"),
    ("global_batch_size effective_batch_size total_batch_size", HERE, "batch.target={value}"),
    ("hf:gradient_accumulation_steps grad_accum lightning:accumulate_grad_batches "
     "grad_accum_steps", HERE, "batch.accumulation={value}"),
    ("hf:auto_find_batch_size lightning:auto_scale_batch_size", "is batch=auto, decided before "
     "training", "batch=auto", {"false": "batch=fixed"}),
    ("hf:eval_accumulation_steps", "has no counterpart: evaluation keeps sums only", ""),
    # optimizer and schedule
    ("hf:optim optimizer_name optimizer.name optimizer.type optimizer_type", HERE,
     "optimizer={value}"),
    ("hf:learning_rate optimizer.learning_rate", HERE, "optimizer.lr={value}"),
    ("hf:adam_beta1 optimizer.adam_beta1", HERE, "optimizer.beta1={value}"),
    ("hf:adam_beta2 optimizer.adam_beta2", HERE, "optimizer.beta2={value}"),
    ("hf:adam_epsilon optimizer.epsilon", HERE, "optimizer.eps={value}"),
    ("betas optimizer.betas adam_betas", "is two keys here: [optimizer.beta1,optimizer.beta2]",
     "optimizer.beta1={0} optimizer.beta2={1}"),
    ("hf:optim_args hf:lr_scheduler_kwargs", "is a key for each value here: optimizer.*, "
     "schedule.*", ""),
    ("hf:lr_scheduler_type lr_scheduler scheduler schedule.name schedule.type", HERE,
     "schedule={value}"),
    ("hf:warmup_ratio schedule.warmup_ratio", HERE, "schedule.warmup_frac={value}"),
    ("lightning:gradient_clip_val grad_clip tune:clip_grad_norm gradient_clipping", HERE,
     "train.max_grad_norm={value}", {"null": "train.max_grad_norm=null",
     "none": "train.max_grad_norm=null", "false": "train.max_grad_norm=null"}),
    ("lightning:gradient_clip_algorithm", "is the norm of all gradients (train.max_grad_norm)", ""),
    ("lightning:auto_lr_find", LATER, ""),
    # length, logging, checkpoints
    ("hf:num_train_epochs num_epochs lightning:max_epochs", HERE, "train.epochs={value}"),
    ("hf:max_steps num_steps example:max_train_steps train.max_steps", HERE, "train.steps={value}",
     {"-1": "train.steps=null"}),
    ("hf:logging_steps lightning:log_every_n_steps log_interval", HERE, "train.log_every={whole}"),
    ("hf:eval_steps eval_interval", HERE, "train.eval_every={whole}"),
    ("hf:save_steps save_interval", HERE, "train.checkpoint_every={whole}"),
    ("hf:save_total_limit", HERE, "train.keep_checkpoints={value}"),
    ("hf:logging_strategy", "is a number of steps here: train.log_every", ""),
    ("hf:eval_strategy hf:evaluation_strategy", "is a number of steps here, train.eval_every; "
     "eke evaluates before the first and after the last step", "", {"no": "train.eval_every=null"}),
    ("hf:save_strategy lightning:enable_checkpointing", "is a number of steps here: "
     "train.checkpoint_every", "", {"false": "train.checkpoint_every=null",
     "none": "train.checkpoint_every=null"}),
    ("axolotl:saves_per_epoch axolotl:evals_per_epoch lightning:val_check_interval "
     "lightning:check_val_every_n_epoch tune:max_steps_per_epoch lightning:max_time eval_delay",
     "is counted in steps here: train.eval_every, train.checkpoint_every, train.steps", ""),
    ("hf:do_train hf:do_eval hf:do_predict hf:eval_on_start lightning:num_sanity_val_steps "
     "lightning:limit_val_batches", "has no switch: eke trains, and evaluates "
     "data.num_eval_samples before the first and after the last step", ""),
    ("hf:resume_from_checkpoint resume lightning:ckpt_path lightning:resume_from_ckpt "
     "auto_resume_from_checkpoints", "is done by the same command, which continues its run; "
     "weights to start from are model=pretrained model.name_or_path=FOLDER", ""),
    ("hf:overwrite_output_dir", "never happens: a finished run stays, and can be repeated",
     "rerun=true", {"false": "rerun=false"}),
    ("hf:output_dir out_dir save_dir hf:logging_dir lightning:default_root_dir",
     "is paths.runs here, with one folder per run in it", "paths.runs={value}"),
    ("hf:run_name", "is the identity of the configuration here; runs have a group of any name",
     "tracker.group={value}"),
    ("name", "could be a checkpoint's (model.name_or_path), a data set's (data.name) or a "
     "group's of runs (tracker.group)", ""),
    ("tags tracker.tags notes", f"{LATER}; a group of runs has a name, tracker.group", ""),
    ("hf:push_to_hub hf:hub_model_id hf:hub_strategy hf:hub_token hub_private_repo "
     "push_to_hub_model_id", UPLOAD, ""),
    ("hf:load_best_model_at_end hf:metric_for_best_model hf:greater_is_better save_best monitor",
     BEST, ""),
    ("lightning:early_stopping axolotl:early_stopping_patience early_stopping_threshold patience "
     "early_stop", BEST, ""),
    ("hf:save_only_model hf:save_safetensors", "has no switch: a checkpoint is safetensors, with "
     "the optimizer's state, so that a run can continue", ""),
    ("hf:disable_tqdm lightning:enable_progress_bar", "has no switch: a bar is drawn in "
     "terminals only", ""),
    # a short trial
    ("lightning:fast_dev_run", "is experiment=debug here: 2 steps of 8 rows",
     "experiment=debug train.steps={whole}", {"true": "experiment=debug",
     "false": "experiment=none"}),
    ("debug dry_run dryrun smoke_test test_run sanity_check", "is experiment=debug here: 2 steps "
     "of 8 rows", "experiment=debug", {"false": "experiment=none", "[]": "experiment=none"}),
    ("lightning:limit_train_batches", "is a number of steps here", "train.steps={whole}"),
    ("lightning:overfit_batches", "is a number of samples here, data.num_samples: batches times "
     "samples a step (batch.per_device); 8 rows for 2 steps are experiment=debug", ""),
    ("lightning:detect_anomaly lightning:profiler lightning:deterministic lightning:benchmark "
     "hf:full_determinism", LATER, ""),
    ("lightning:seed_everything random_seed random_state", HERE, "seed={value}"),
    ("hf:data_seed", "is for data=synthetic here; the order of samples follows seed", ""),
    # memory, attention, compile, kernels
    ("hf:gradient_checkpointing activation_checkpointing use_gradient_checkpointing "
     "tune:enable_activation_checkpointing", HERE, "memory=checkpointing",
     {"false": "memory=none"}),
    ("hf:gradient_checkpointing_kwargs use_reentrant", "is decided by eke: non-reentrant, "
     "PyTorch's advice", ""),
    ("hf:torch_empty_cache_steps empty_cache_steps empty_cache_every", HERE,
     "memory.empty_cache_every={value}", {"none": "memory.empty_cache_every=null"}),
    ("every_n_layers", HERE, "memory=checkpointing memory.every_n={value}"),
    ("activation_offload trl:activation_offloading save_on_cpu offload_activations "
     "cpu_checkpointing tune:enable_activation_offloading", HERE, "memory=activation_offload",
     {"false": "memory.activation_offload=false"}),
    ("tune:optimizer_in_bwd optimizer_in_backward", HERE, "memory=optimizer_in_backward",
     {"false": "memory.optimizer_in_backward=false"}),
    ("example:attn_implementation attn model.attn_implementation", HERE, "attention={value}"),
    ("use_flash_attention_2 axolotl:flash_attention use_flash_attn factory:flash_attn", HERE,
     "attention=flash2", {"false": "attention=sdpa", "auto": "attention=auto",
     "sdpa": "attention=sdpa", "disabled": "attention=eager", "fa3": "attention=flash3"}),
    ("sdpa_backend sdp_kernel sdpa_kernel", HERE, "attention.backend={value}"),
    ("hf:torch_compile use_compile hf:torchdynamo", HERE, "compile={value}",
     {"true": "compile=inductor", "false": "compile=none"}),
    ("hf:torch_compile_backend compile.backend", HERE, "compile={value}"),
    ("hf:torch_compile_mode", HERE, "compile=inductor compile.mode={value}",
     {mode.replace("_", "-"): f"compile=inductor compile.mode={mode}" for mode in MODES}),
    ("accelerate:use_regional_compilation compile_regions regional_compilation", HERE,
     "compile.regional=true", {"false": "compile.regional=false"}),
    ("hf:use_liger_kernel liger hf:liger_kernel_config factory:enable_liger_kernel", HERE,
     "kernels=liger", {"none": "kernels=none", "false": "kernels=none"}),
    ("fused_linear_cross_entropy fused_linear_ce cut_cross_entropy linear_cross_entropy", HERE,
     "kernels.fused_linear_cross_entropy=true",
     {"false": "kernels.fused_linear_cross_entropy=false"}),
    ("sparse_prediction dense_seq_output", HERE, "kernels.sparse_prediction=true",
     {"false": "kernels.sparse_prediction=false"}),
    ("hf:use_ipex ipex hf:jit_mode_eval", "was removed from transformers; its work is in PyTorch "
     "now (compile)", ""),
    # adapters
    ("lora use_peft use_lora", HERE, "peft=lora", {"none": "peft=none", "false": "peft=none"}),
    ("axolotl:adapter factory:finetuning_type", HERE, "peft={value}", {"full": "peft=none",
     "freeze": ""}),
    ("qlora axolotl:load_in_4bit", HERE, "peft=qlora", {"false": "peft=none"}),
    ("axolotl:load_in_8bit", f"(8-bit weights) {LATER}; 4-bit weights are peft=qlora", "",
     {"false": "peft=none"}),
    ("factory:quantization_bit", "4-bit weights are peft=qlora; there are no others", "",
     {"4": "peft=qlora", "null": "peft=none", "none": "peft=none"}),
    ("peft:use_dora", HERE, "peft=dora", {"false": "peft=lora"}),
    ("peft:use_rslora", HERE, "peft=lora peft.use_rslora={value}"),
    ("peft:lora_r lora_rank peft.rank peft.lora_r", HERE, "peft=lora peft.r={value}"),
    ("peft:lora_alpha peft.lora_alpha", HERE, "peft=lora peft.alpha={value}"),
    ("peft:lora_dropout peft.lora_dropout", HERE, "peft=lora peft.dropout={value}"),
    ("lora_target_modules peft:target_modules lora_modules factory:lora_target", HERE,
     "peft=lora peft.target_modules=[{items}]",
     {"all-linear": "peft=lora peft.target_modules=null", "all": "peft=lora"}),
    ("axolotl:lora_target_linear", "is what peft=lora does by itself", "peft=lora",
     {"false": "peft=lora peft.target_modules=[q_proj,v_proj]"}),
    ("modules_to_save axolotl:lora_modules_to_save factory:additional_target",
     f"{LATER}: the head that a classification adds is trained, nothing else", ""),
    ("bnb:bnb_4bit_quant_type peft.bnb_4bit_quant_type", HERE, "peft=qlora "
     "peft.quant_type={value}"),
    ("bnb:bnb_4bit_use_double_quant use_double_quant", HERE, "peft=qlora peft.double_quant=true",
     {"false": "peft=qlora peft.double_quant=false"}),
    ("bnb:bnb_4bit_compute_dtype", HERE, "precision={value}"),
    ("cpu_offload deepspeed:offload_optimizer", HERE, "distributed=zero2 offload=optimizer_cpu",
     {"none": "offload=none", "false": "offload=none"}),
    ("deepspeed:offload_param", HERE, "distributed=zero3 offload=params_cpu",
     {"none": "offload=none", "false": "offload=none"}),
    ("deepspeed:nvme_path offload.nvme_path", HERE, "distributed=zero3 offload=nvme "
     "offload.path={value}"),
    # processes and devices
    ("hf:deepspeed", HERE, "distributed=zero2 distributed.deepspeed_config={value}"),
    ("zero deepspeed:zero_stage", HERE, "distributed=zero{value}", {"0": "distributed=ddp"}),
    ("hf:fsdp hf:fsdp_config", HERE, "distributed=fsdp", {"false": "distributed=none",
     "shard_grad_op": "distributed=fsdp distributed.reshard_after_forward=false"}),
    ("lightning:strategy parallel_strategy", HERE, "distributed={value}",
     {"auto": "distributed=none"}
     | {f"deepspeed_stage_{stage}": f"distributed=zero{stage}" for stage in (1, 2, 3)}),
    ("hf:sharded_ddp", "was removed from transformers: fsdp took its place", "distributed=fsdp"),
    ("tensor_parallel tensor_parallel_size tp_size pipeline_parallel pipeline_parallel_size "
     "pp_size expert_parallel expert_parallel_size ep_size context_parallel_size cp_size "
     "distributed.tensor_parallel distributed.pipeline_parallel distributed.expert_parallel",
     PARALLEL, ""),
    ("ddp", HERE, "distributed=ddp", {"false": "distributed=none"}),
    ("hf:ddp_backend process_group_backend", "is chosen by the device here: nccl or gloo", ""),
    ("num_gpus lightning:gpus n_gpu ngpus lightning:devices nproc_per_node world_size",
     "is counted in processes, one per device; eke's is distributed.num_processes",
     "distributed.num_processes={value}", {"auto": "", "-1": ""}),
    ("nnodes num_nodes accelerate:num_machines", HERE, "distributed.num_nodes={value}"),
    ("hf:ddp_timeout", HERE, "distributed.timeout_s={value}"),
    ("hf:ddp_find_unused_parameters hf:ddp_bucket_cap_mb", "is an argument of Hugging Face "
     "Trainer, which is an engine here", "engine=trainer trainer.extra.{name}={value}"),
    ("hf:use_cpu hf:no_cuda cpu", HERE, "hardware=cpu", {"false": "hardware=auto"}),
    ("device lightning:accelerator", HERE, "hardware={value}", {"cuda": "hardware=auto",
     "gpu": "hardware=auto"}),
    ("device_map", "is decided by distributed and offload", ""),
    # data and data loading
    ("hf:dataloader_num_workers num_workers", HERE, "dataloader.workers={value}"),
    ("hf:dataloader_pin_memory", HERE, "dataloader.pin_memory=on",
     {"false": "dataloader.pin_memory=off"}),
    ("hf:dataloader_prefetch_factor prefetch_factor", HERE, "dataloader.prefetch={value}"),
    ("hf:dataloader_persistent_workers persistent_workers", HERE, "dataloader.persistent={value}"),
    ("example:max_seq_length tune:max_seq_len trl:max_length example:block_size sequence_length "
     "axolotl:sequence_len factory:cutoff_len context_length", HERE, "data.seq_len={value}"),
    ("example:max_train_samples num_train_samples factory:max_samples", HERE,
     "data.num_samples={value}"),
    ("example:max_eval_samples", HERE, "data.num_eval_samples={value}"),
    ("factory:val_size axolotl:val_set_size validation_split test_size", HERE,
     "data.eval_frac={value}"),
    ("example:validation_split_percentage", "is a share here: data.eval_frac, 0.05 for 5 percent",
     ""),
    ("example:dataset_name dataset axolotl:datasets example:task_name data.dataset "
     "data.dataset_name dataset.name", HERE, "data={value}"),
    ("example:dataset_config_name dataset_config", HERE, "data=hub data.name=FOLDER_OR_HUB_NAME "
     "data.config_name={value}"),
    ("example:train_file train_files data_path data_dir data_files data_file train_data "
     "factory:dataset_dir dataset_path dataset.path train_path data.file data.files "
     "data.train_file", HERE, "{data}"),
    ("example:validation_file eval_file val_file validation_data eval_data val_data eval_dataset "
     "data.eval_file data.val_path data.validation_file", HERE, "{eval_data}"),
    ("example:test_file test_data", "is not read: eke evaluates on one set, data.eval_path", ""),
    ("trl:dataset_text_field text_column text_column_name text_field", HERE, "data.text={value}"),
    ("label_column_name label_column", HERE, "data.label={value}"),
    ("trl:assistant_only_loss trl:completion_only_loss axolotl:train_on_inputs mask_prompt",
     "is decided by two columns, data.prompt=PROMPT data.response=ANSWER: answers alone are "
     f"predicted; in a column of whole conversations it {LATER}", ""),
    ("factory:template chat_template trl:chat_template_path", "is the checkpoint's own, used for "
     "data.prompt where it has one", ""),
    ("example:overwrite_cache example:preprocessing_num_workers trl:dataset_num_proc "
     "example:use_fast_tokenizer example:pad_to_max_length hf:remove_unused_columns "
     "hf:dataloader_drop_last", "has no counterpart: rows are tokenized once, kept, and padded "
     "to the longest of a micro-batch", ""),
    ("example:tokenizer_name tokenizer tokenizer_name_or_path tokenizer.path", HERE,
     "data.tokenizer={value}"),
    ("pad_to_multiple_of", HERE, "data.pad_to_multiple_of={value}"),
    ("hf:group_by_length", HERE, "data.length_grouping=true",
     {"false": "data.length_grouping=false"}),
    ("hf:label_smoothing_factor label_smoothing", "is an argument of Hugging Face Trainer, which "
     "is an engine here", "engine=trainer trainer.extra.label_smoothing_factor={value}"),
    ("hf:neftune_noise_alpha neftune", "is an argument of Hugging Face Trainer, which is an "
     "engine here", "engine=trainer trainer.extra.neftune_noise_alpha={value}"),
    ("trl:packing axolotl:sample_packing factory:neat_packing", HERE, "data.packing=on",
     {"false": "data.packing=off"}),
    ("trl:padding_free", HERE, "data.packing=padding_free", {"false": "data.packing=off"}),
    ("trl:eval_packing", "is decided with data.packing, for training and evaluation", ""),
    # model
    ("example:model_name_or_path model_name model.pretrained pretrained axolotl:base_model "
     "model_path model.path model.name checkpoint tune:checkpoint_dir checkpoint_path "
     "pretrained_model_name_or_path", HERE, "model=pretrained model.name_or_path={value}"),
    ("example:model_revision", HERE, "model=pretrained model.name_or_path=FOLDER_OR_HUB_NAME "
     "model.revision={value}"),
    ("example:trust_remote_code model.trust_remote_code", "is never on: eke runs no code from "
     "checkpoints", ""),
    ("model_type", HERE, "model={value}"),
    ("factory:stage", "is task here, which predicts text; preference training (dpo, ppo, rm) "
     f"{LATER}", "", {"sft": "task=causal_lm", "pt": "task=causal_lm"}),
    ("model.num_layers model.n_layer n_layer num_layers", HERE, "model.num_hidden_layers={value}"),
    ("model.n_head n_head model.num_heads num_heads", HERE, "model.num_attention_heads={value}"),
    ("model.n_embd model.d_model n_embd d_model model.hidden_dim", HERE,
     "model.hidden_size={value}"),
    ("model.d_ff model.n_inner d_ff", HERE, "model.intermediate_size={value}"),
    # tracking
    ("use_wandb", HERE, "tracker=wandb", {"false": "tracker=none"}),
    ("hf:report_to lightning:logger tune:metric_logger", HERE, "tracker={value}",
     {"all": "tracker=wandb", "[]": "tracker=none", "false": "tracker=none"}),
    ("wandb:wandb_project wandb.project project_name", HERE, "tracker.project={value}"),
    ("wandb:wandb_entity wandb.entity", HERE, "tracker.entity={value}"),
    ("wandb:wandb_mode wandb.mode", HERE, "tracker.mode={value}"),
)
# fmt: on
