"""Keys that exist only to be refused: other tools' names of them.

What several rows of the tables say.

Options that exist only to be refused: other tools' names, and retired techniques.

Names that exist only to be refused: other tools' spellings and retired techniques.

Two tables, read by did-you-mean. A name that has become a key or an option of eke's own has no row
here (tested), and the override that each row proposes composes and sets what was meant (tested).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from eke.config.compose.catalogue import normal
from eke.config.compose.suggest import as_data, as_evaluation

Row = tuple[str, str, str] | tuple[str, str, str, dict[str, str]]
"""Names as typed elsewhere, separated by spaces | why not here | what to type instead, where
{value} is what was typed; empty for nothing that does the same | the same for particular values."""

HERE = ""
"""The reason of a name for what eke has under its own."""
OWNERS = {
    "hf": "the Hugging Face Trainer",
    "example": "a Hugging Face example",
    "trl": "TRL",
    "lightning": "PyTorch Lightning",
    "axolotl": "axolotl",
    "factory": "LLaMA-Factory",
    "tune": "torchtune",
    "peft": "PEFT",
    "bnb": "bitsandbytes",
    "accelerate": "Accelerate",
    "deepspeed": "DeepSpeed",
    "wandb": "W&B",
}
"""What stands before a name and a colon -> the tool whose word it is."""
FAMILY = "is a family; its sizes, with random weights, have names"
LATER = "is not available in eke yet"
MODES = ("reduce_overhead", "max_autotune", "max_autotune_no_cudagraphs")
INFERENCE = "is a backend for inference; it cannot train"
PARALLEL = f"(a layer's work, or the layers, spread out) {LATER}; fsdp spreads the state"
OTHER_TRACKER = f"{LATER}; metrics.jsonl is written in any case, and wandb offline needs no server"
FP8 = "is not a format that weights are trained in; fp8 multiplies in the narrowest there is"


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


# fmt: off
OPTIONS: tuple[Row, ...] = (
    # number formats
    ("precision=16 precision=float16 precision=half precision=16-mixed precision=fp16-mixed "
     "precision=f16", HERE, "precision=fp16"),
    ("precision=bfloat16 precision=bf16-mixed precision=bf16_mixed", HERE, "precision=bf16"),
    ("precision=32 precision=float32 precision=float precision=no precision=none precision=full "
     "precision=32-true", HERE, "precision=fp32"),
    ("precision=bf16-true precision=pure_bf16 precision=full_bf16", HERE, "precision=bf16_pure"),
    ("precision=float8 precision=8 precision=fp8_torchao precision=fp8_e4m3", HERE,
     "precision=fp8"),
    ("precision=int8 precision=4", FP8, "precision=fp8"),
    ("precision=auto precision=mixed precision=amp", "does not say which 16-bit format; bf16 "
     "needs no loss scaling", "precision=bf16"),
    # optimizers
    ("optimizer=adamw_hf", "was removed from transformers 5: it was slower than torch's AdamW",
     "optimizer=adamw"),
    ("optimizer=adamw_torch optimizer=adamw_torch_xla", "is the Hugging Face Trainer's name for "
     "torch's AdamW", "optimizer=adamw"),
    ("optimizer=adamw_torch_fused", "is the Hugging Face Trainer's name for torch's fused AdamW",
     "optimizer=adamw_fused"),
    ("optimizer=adam optimizer=torch_adam", "couples decay and gradient; eke has the decoupled "
     "one", "optimizer=adamw"),
    ("optimizer=adamw_bnb_8bit optimizer=adam8bit optimizer=adamw_bnb optimizer=adam_8bit",
     "is another tool's name for bitsandbytes' 8-bit AdamW", "optimizer=adamw_8bit"),
    ("optimizer=paged_adamw_32bit optimizer=paged_adamw", "(paged 32-bit moments) is no option "
     "of eke; paged 8-bit moments are", "optimizer=paged_adamw_8bit"),
    ("optimizer=adamw_torch_8bit", "is the Hugging Face Trainer's name for torchao's",
     "optimizer=adamw_torchao_8bit"),
    ("optimizer=adamw_torch_4bit", "is the Hugging Face Trainer's name for torchao's",
     "optimizer=adamw_torchao_4bit"),
    ("optimizer=adamw_anyprecision", "needed torchdistx, which is archived; rounding bfloat16 "
     "weights at random does its work", "optimizer=adamw_bf16_sr"),
    ("optimizer=galore_adamw optimizer=galore_adamw_layerwise", "is the Hugging Face Trainer's "
     "name", "optimizer=galore"),
    ("optimizer=apollo_adamw optimizer=apollo_adamw_layerwise", "is the Hugging Face Trainer's "
     "name", "optimizer=apollo"),
    ("optimizer=schedule_free_adamw optimizer=schedulefree", "is another tool's name",
     "optimizer=schedule_free"),
    ("optimizer=lion_32bit", "is the Hugging Face Trainer's name", "optimizer=lion"),
    ("optimizer=lomo optimizer=adalomo", "(a step within the backward pass) is not available in "
     "eke", "optimizer=adafactor"),
    ("optimizer=rmsprop optimizer=adagrad optimizer=ademamix optimizer=lamb optimizer=sophia",
     f"{LATER}; adamw is the closest that is", "optimizer=adamw"),
    # memory, attention, compile
    ("memory=gradient_checkpointing memory=activation_checkpointing memory=full", HERE,
     "memory=checkpointing"),
    ("memory=selective memory=selective_checkpointing memory=sac", HERE,
     "memory=checkpointing_selective"),
    ("memory=offload memory=save_on_cpu memory=activation_offloading", HERE,
     "memory=activation_offload"),
    ("memory=optimizer_in_bwd memory=layerwise memory=lomo", HERE, "memory=optimizer_in_backward"),
    ("attention=flash_attention_2 attention=flash_attn attention=fa2", HERE, "attention=flash2"),
    ("attention=flash_attention_3 attention=fa3", HERE, "attention=flash3"),
    ("attention=flash", "is sdpa's kernel of that name, or a package: flash2, flash3",
     "attention=sdpa attention.backend=flash"),
    ("attention=xformers attention=mem_efficient", "is sdpa's kernel mem_efficient",
     "attention=sdpa attention.backend=mem_efficient"),
    ("attention=cudnn", "is a kernel of sdpa", "attention=sdpa attention.backend=cudnn"),
    ("attention=math", "is a kernel of sdpa", "attention=sdpa attention.backend=math"),
    ("attention=bettertransformer attention=better_transformer", "was removed from transformers: "
     "PyTorch's sdpa took its place", "attention=sdpa"),
    ("attention=flex_attention", HERE, "attention=flex"),
    ("kernels=flce kernels=fused_ce kernels=linear_cross_entropy kernels=cut_cross_entropy", HERE,
     "kernels=fused_linear_cross_entropy"),
    ("kernels=liger_kernel", HERE, "kernels=liger"),
    ("compile=nvfuser compile=aot_nvfuser compile=aot_ts_nvfuser compile=nvprims_nvfuser "
     "compile=prims_nvfuser compile=ts_nvfuser compile=nnc compile=ts_nnc",
     "was removed from PyTorch; inductor took its place", "compile=inductor"),
    ("compile=ts compile=aot_ts compile=torchscript", "is TorchScript, which PyTorch has "
     "deprecated; inductor took its place", "compile=inductor"),
    ("compile=aot_cudagraphs", "is called cudagraphs in PyTorch today", "compile=cudagraphs"),
    ("compile=aot_inductor", "compiles ahead of time, for inference; inductor is what trains",
     "compile=inductor"),
    ("compile=ofi compile=ipex compile=onnxrt compile=tvm compile=openvino compile=static_runtime",
     INFERENCE, "compile=inductor"),
    ("compile=fx2trt compile=tensorrt compile=torch_tensorrt compile=fx2trt_fp16 "
     "compile=torch2trt compile=torchtrt", INFERENCE, "compile=inductor"),
    ("compile=openxla compile=openxla_eval compile=xla compile=hpu_backend",
     "is a backend for other accelerators; eke trains on CUDA and CPU", "compile=inductor"),
    ("compile=true compile=on", "does not say which backend", "compile=inductor"),
    ("compile=default", "is a mode of inductor", "compile=inductor"),
    ("compile=regional", "is a field; a compiler goes with it", "compile=inductor "
     "compile.regional=true"),
    *((f"compile={mode.replace('_', '-')}",
       f"is called {mode} here, a mode of inductor", f"compile=inductor compile.mode={mode}")
      for mode in MODES),
    ("peft=adalora peft=loha peft=lokr peft=vera peft=oft peft=pissa peft=prefix_tuning "
     "peft=prompt_tuning peft=adapters peft=bitfit", f"{LATER}; lora is the closest that is",
     "peft=lora"),
    ("peft=rslora", "is lora with another scale", "peft=lora peft.use_rslora=true"),
    # processes, trackers, engines, schedules, data, models
    ("distributed=deepspeed distributed=zero", "does not say which stage of ZeRO",
     "distributed=zero2"),
    ("offload=disk offload=ssd offload=zero_infinity", "is called nvme here",
     "distributed=zero3 offload=nvme offload.path=FOLDER"),
    ("offload=cpu offload=optimizer", "does not say what moves", "offload=optimizer_cpu"),
    ("offload=params offload=param_cpu", HERE, "offload=params_cpu"),
    ("distributed=fsdp2 distributed=full_shard distributed=hybrid_shard", HERE, "distributed=fsdp"),
    ("distributed=fsdp1 distributed=shard_grad_op", "is PyTorch's older FSDP; keeping the "
     "weights after forward is a key of fsdp", "distributed=fsdp "
     "distributed.reshard_after_forward=false"),
    ("distributed=tp distributed=pp distributed=ep distributed=cp distributed=tensor_parallel "
     "distributed=pipeline_parallel distributed=expert_parallel distributed=3d "
     "distributed=tensor distributed=pipeline distributed=expert", PARALLEL, "distributed=fsdp"),
    ("tracker=comet_ml", OTHER_TRACKER, "tracker=wandb"),
    ("tracker=all", "is one tracker here", "tracker=wandb"),
    ("schedule=constant_with_warmup", HERE, "schedule=constant"),
    ("schedule=warmup_stable_decay", HERE, "schedule=wsd"),
    ("schedule=cosine_with_restarts schedule=polynomial schedule=inverse_sqrt",
     f"{LATER}; cosine is the closest that is", "schedule=cosine"),
    ("data=json data=ndjson", "is called jsonl here: one object a line",
     "data=jsonl data.path=FILE_OR_FOLDER"),
    ("data=tsv", "is no option: rows are jsonl, parquet or comma-separated (csv)", ""),
    ("hardware=cuda hardware=gpu", "is found by auto", "hardware=auto"),
    ("hardware=3090", HERE, "hardware=rtx3090"),
    ("hardware=4090", HERE, "hardware=rtx4090"),
    ("model=bert", FAMILY, "model=bert_base"),
    ("model=t5", FAMILY, "model=t5_small"),
    ("model=llama", FAMILY, "model=llama_1b"),
    ("model=llama2", FAMILY, "model=llama2_7b"),
    ("model=llama3", FAMILY, "model=llama3_8b"),
    ("model=qwen model=qwen3", FAMILY, "model=qwen3_0_6b"),
    ("model=mixtral model=moe", FAMILY, "model=mixtral_8x7b"),
)
# fmt: on


@dataclass(frozen=True)
class Retired:
    """Why a name is refused, and what to type instead."""

    name: str
    """As it is typed elsewhere."""
    reason: str
    """A clause that follows the name: what it is, or why it is gone; empty for eke's own name."""
    fix: str
    """The override to type, empty where eke has nothing that does the same; `{value}` stands for
    the value that was typed, `{whole}` for a whole number alone, `{0}` and `{1}` for its items,
    `{items}` for all of them, `{data}` and `{eval_data}` for what reads a file of this name."""
    by_value: Mapping[str, str] = field(default_factory=dict)
    """Overrides for particular values, in lower case (`true`, `false`: also for 1, 0, yes, no)."""
    owner: str = ""
    """The tool whose name it is; empty for several tools' and for nobody's in particular."""

    def overrides(self, value: str) -> tuple[str, ...]:
        """What to type instead to get what `value` asked for; empty where nothing does."""
        plain = value.strip("\"'").lower()
        boolean = _BOOLEANS.get(plain, plain)
        fix = self.by_value.get(plain, self.by_value.get(boolean, self.fix))
        if fix in _FILES:
            return _FILES[fix](value)
        items = [item.strip() for item in value.strip("[]()").split(",")]
        whole = all(item.isdecimal() for item in items)
        if ("{1}" in fix and len(items) != 2) or ("{whole}" in fix and not whole):
            return ()
        known = {"value": value, "whole": value, "name": self.name, "items": ",".join(items)}
        known |= {str(number): item for number, item in enumerate(items)}
        # Split before the value goes in: it may hold spaces.
        return tuple(
            re.sub(r"\{(\w+)\}", lambda match: known[match[1]], part) for part in fix.split()
        )

    def why(self, value: str) -> str:
        """The reason, and for a name of another tool whose it is and eke's name."""
        typed = self.overrides(value)
        if self.reason:
            why = self.reason if typed else f"{self.reason}; remove it"
            return f"{why} ({self.owner}'s name)" if self.owner else why
        if "=" in self.name:
            return f"is called {self.fix.partition('=')[2]} here"
        fix = _PLACES.get(self.fix, self.fix).split()
        keys = [override.partition("=")[0] for override in typed or fix]
        own = next((key for key in reversed(keys) if "." in key), keys[-1])
        why = f"is {self.owner or 'another tool'}'s name; eke's is {own}"
        return why if typed else f"{why}, which takes no {value}"


_PLACES = {"{data}": "data.path", "{eval_data}": "data.eval_path"}
_FILES = {"{data}": as_data, "{eval_data}": as_evaluation}
# as typed -> as it is looked up in by_value
_BOOLEANS = {"1": "true", "yes": "true", "on": "true", "0": "false", "no": "false", "off": "false"}


def _rows() -> Iterator[Retired]:
    for names, reason, fix, *by_value in (*KEYS, *OPTIONS):
        for word in names.split():
            owner, _, name = word.rpartition(":")
            values: dict[str, str] = by_value[0] if by_value else {}
            yield Retired(name, reason, fix, values, OWNERS.get(owner, ""))


RETIRED = {row.name: row for row in _rows()}
"""Key path, or `group=option`, exactly as typed elsewhere -> why not here, and what instead."""


def find_retired(name: str) -> Retired | None:
    """The row of a key path or of `group=option`, whatever its case and dashes."""
    if name in RETIRED:
        return RETIRED[name]
    wanted = normal(name)
    return next((row for known, row in RETIRED.items() if normal(known) == wanted), None)
