"""Names that exist only to be refused: other tools' spellings and retired techniques.

One table, read by did-you-mean. A name that has become a key or an option of eke's own has no row
here (tested), and the override that each row proposes is one that composes today (tested).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from eke.compose.wording import normal


@dataclass(frozen=True)
class Retired:
    """Why a name is refused, and what to type instead."""

    why: str
    """A clause that follows the name: what it is, or why it is gone."""
    fix: str
    """The override to type; `{value}` stands for the value that was typed."""
    by_value: Mapping[str, str] = field(default_factory=dict)
    """Overrides for particular values, in lower case (`true`, `false`: also for 1, 0, yes, no)."""

    def overrides(self, value: str) -> tuple[str, ...]:
        """What to type instead to get what `value` asked for."""
        lowered = value.strip("\"'").lower()
        lowered = _BOOLEANS.get(lowered, lowered)
        # Split before the value goes in: it may hold spaces.
        parts = self.by_value.get(lowered, self.fix).split()
        return tuple(part.replace("{value}", value) for part in parts)


# as typed -> as it is looked up in by_value
_BOOLEANS = {"1": "true", "yes": "true", "on": "true", "0": "false", "no": "false", "off": "false"}

_HF = "is the Hugging Face Trainer's name"
_LATER = "is not available in eke yet"
_INFERENCE = "is a backend for inference; it cannot train"
_8BIT = f"(8-bit optimizer states) {_LATER}; adafactor is what saves optimizer memory today"
_ADAPTERS = f"(parameter-efficient fine-tuning) {_LATER}; recipe=low_memory saves most today"
_SHARDED = f"(several processes) {_LATER}; eke trains in one process today"
_OTHER_TRACKER = (
    f"{_LATER}; metrics.jsonl is written in any case, and wandb offline needs no server"
)
_NO_FLASH = f"(the flash-attn package) {_LATER}; sdpa has PyTorch's own flash kernel"
_FP8 = f"{_LATER}; bf16 is the narrowest format that is"


# A table. Names as typed elsewhere | why not here | what to type instead, where {value} is what
# was typed | the same for particular values.
# fmt: off
_ROWS: tuple[tuple[str, str, str] | tuple[str, str, str, dict[str, str]], ...] = (
    # keys: number formats
    ("fp16 use_fp16", f"{_HF}; eke's is precision", "precision=fp16", {"false": "precision=fp32"}),
    ("bf16 use_bf16", f"{_HF}; eke's is precision", "precision=bf16", {"false": "precision=fp32"}),
    ("tf32 allow_tf32 use_tf32",
     f"{_HF}; eke's is precision.tf32", "precision.tf32=on", {"false": "precision.tf32=off"}),
    ("no_tf32",
     "is a flag of older examples", "precision.tf32=off", {"false": "precision.tf32=on"}),
    ("fp8", _FP8, "precision=bf16", {"false": "precision=fp32"}),
    ("mixed_precision torch_dtype dtype amp model.torch_dtype model.dtype",
     "is chosen by precision here; weights stay float32", "precision={value}",
     {"no": "precision=fp32", "false": "precision=fp32", "true": "precision=fp16"}),
    ("half_precision_backend fp16_backend fp16_opt_level",
     "belongs to apex, which eke does not use; torch's autocast is", "precision=fp16"),
    ("fp16_full_eval bf16_full_eval",
     f"{_HF}; evaluation runs in the precision of training", "precision=bf16"),
    # keys: batch
    ("per_device_train_batch_size per_gpu_train_batch_size",
     f"{_HF}; eke's is batch.per_device", "batch.per_device={value}"),
    ("per_device_eval_batch_size",
     f"{_HF}; eke's is batch.eval_per_device", "batch.eval_per_device={value}"),
    ("batch_size bs train_batch_size micro_batch_size batch.size",
     "could be one device's or all devices' batch; eke's is batch.per_device",
     "batch.per_device={value}"),
    ("global_batch_size effective_batch_size total_batch_size",
     "is another tool's name; eke's is batch.target", "batch.target={value}"),
    ("gradient_accumulation_steps grad_accum accumulate_grad_batches",
     f"{_HF}; eke's is batch.accumulation", "batch.accumulation={value}"),
    ("auto_find_batch_size",
     f"(trying batch sizes until one fits) {_LATER}; say one", "batch.per_device=8"),
    # keys: optimizer and schedule
    ("optim optimizer_name optimizer.name",
     "is the Hugging Face Trainer's name; eke's is optimizer", "optimizer={value}"),
    ("learning_rate optimizer.learning_rate",
     f"{_HF}; eke's is optimizer.lr", "optimizer.lr={value}"),
    ("adam_beta1 optimizer.adam_beta1",
     f"{_HF}; eke's is optimizer.beta1", "optimizer.beta1={value}"),
    ("adam_beta2 optimizer.adam_beta2",
     f"{_HF}; eke's is optimizer.beta2", "optimizer.beta2={value}"),
    ("adam_epsilon optimizer.epsilon", f"{_HF}; eke's is optimizer.eps", "optimizer.eps={value}"),
    ("betas optimizer.betas", "is two keys here", "optimizer.beta1=0.9"),
    ("lr_scheduler_type lr_scheduler scheduler schedule.name",
     f"{_HF}; eke's is schedule", "schedule={value}"),
    ("warmup_ratio schedule.warmup_ratio",
     f"{_HF}; eke's is schedule.warmup_frac", "schedule.warmup_frac={value}"),
    ("gradient_clip_val grad_clip clip_grad_norm",
     f"{_HF}; eke's is train.max_grad_norm", "train.max_grad_norm={value}"),
    # keys: length, logging, checkpoints
    ("num_train_epochs num_epochs max_epochs",
     f"{_HF}; eke's is train.epochs", "train.epochs={value}"),
    ("max_steps num_steps max_train_steps train.max_steps",
     f"{_HF}; eke's is train.steps", "train.steps={value}"),
    ("logging_steps", f"{_HF}; eke's is train.log_every", "train.log_every={value}"),
    ("eval_steps", f"{_HF}; eke's is train.eval_every", "train.eval_every={value}"),
    ("save_steps", f"{_HF}; eke's is train.checkpoint_every", "train.checkpoint_every={value}"),
    ("save_total_limit",
     f"{_HF}; eke's is train.keep_checkpoints", "train.keep_checkpoints={value}"),
    ("logging_strategy", f"{_HF}; rows are kept for every step", "train.log_every=10"),
    ("eval_strategy evaluation_strategy do_eval",
     f"{_HF}; eke evaluates before the first and after the last step", "train.eval_every=null"),
    ("save_strategy",
     f"{_HF}; eke's is a number of steps", "train.checkpoint_every=200",
     {"no": "train.checkpoint_every=null", "false": "train.checkpoint_every=null"}),
    ("resume_from_checkpoint resume",
     "is what eke does by itself: the same command continues its run", "rerun=false"),
    ("overwrite_output_dir",
     f"{_HF}; eke never overwrites a finished run, it can repeat it", "rerun=true",
     {"false": "rerun=false"}),
    ("output_dir out_dir save_dir logging_dir",
     f"{_HF}; eke's is paths.runs, with one folder per run in it", "paths.runs={value}"),
    ("run_name name",
     "is the identity of the configuration here; group runs by a name", "tracker.group={value}"),
    # keys: memory, attention, compile, kernels
    ("gradient_checkpointing activation_checkpointing use_gradient_checkpointing",
     f"{_HF}; eke's is memory", "memory=checkpointing", {"false": "memory=none"}),
    ("gradient_checkpointing_kwargs use_reentrant",
     "is decided by eke: non-reentrant, PyTorch's advice", "memory=checkpointing"),
    ("torch_empty_cache_steps memory.empty_cache_every",
     f"{_LATER}; checkpointing is what saves memory", "memory=checkpointing"),
    ("attn_implementation attn model.attn_implementation attention.backend",
     "is chosen by attention here", "attention={value}"),
    ("use_flash_attention_2 flash_attention use_flash_attn flash_attn",
     _NO_FLASH, "attention=sdpa", {"false": "attention=eager"}),
    ("torch_compile use_compile torchdynamo",
     f"{_HF}; eke's is compile", "compile={value}",
     {"true": "compile=inductor", "false": "compile=none"}),
    ("torch_compile_backend compile.backend", "is chosen by compile here", "compile={value}"),
    ("torch_compile_mode compile.mode",
     f"(another mode than inductor's default) {_LATER}", "compile=inductor"),
    ("use_liger_kernel liger kernels",
     f"(Liger's fused kernels) {_LATER}; inductor fuses what it can", "compile=inductor",
     {"none": "compile=none", "false": "compile=none"}),
    ("use_ipex ipex jit_mode_eval",
     "was removed from transformers; its work is in PyTorch now", "compile=inductor"),
    ("peft lora use_peft load_in_4bit load_in_8bit",
     _ADAPTERS, "recipe=low_memory", {"none": "recipe=none", "false": "recipe=none"}),
    ("offload cpu_offload offload_optimizer",
     f"(states in host memory) {_LATER}; recipe=low_memory saves most today", "recipe=low_memory",
     {"none": "recipe=none", "false": "recipe=none"}),
    # keys: processes and devices
    ("deepspeed fsdp fsdp_config ddp zero zero_stage sharded_ddp ddp_backend",
     _SHARDED, "distributed=none"),
    ("num_gpus gpus n_gpu ngpus devices nproc_per_node world_size",
     "is counted in processes, one per device; eke's is distributed.num_processes",
     "distributed.num_processes={value}"),
    ("nnodes num_nodes distributed.num_nodes",
     f"(several machines) {_LATER}", "distributed.num_processes=1"),
    ("use_cpu no_cuda cpu",
     f"{_HF}; eke's is hardware", "hardware=cpu", {"false": "hardware=auto"}),
    ("device accelerator",
     "is chosen by hardware here", "hardware={value}",
     {"cuda": "hardware=auto", "gpu": "hardware=auto", "cuda:0": "hardware=auto"}),
    # keys: data and data loading
    ("dataloader_num_workers num_workers",
     f"{_HF}; eke's is dataloader.workers", "dataloader.workers={value}"),
    ("dataloader_pin_memory",
     f"{_HF}; eke's is dataloader.pin_memory", "dataloader.pin_memory=on",
     {"false": "dataloader.pin_memory=off"}),
    ("dataloader_prefetch_factor prefetch_factor",
     f"{_HF}; eke's is dataloader.prefetch", "dataloader.prefetch={value}"),
    ("dataloader_persistent_workers persistent_workers",
     f"{_HF}; eke's is dataloader.persistent", "dataloader.persistent={value}"),
    ("max_seq_length max_seq_len max_length block_size sequence_length",
     f"{_HF}; eke's is data.seq_len", "data.seq_len={value}"),
    ("max_train_samples num_train_samples",
     f"{_HF}; eke's is data.num_samples", "data.num_samples={value}"),
    ("max_eval_samples", f"{_HF}; eke's is data.num_eval_samples", "data.num_eval_samples={value}"),
    ("dataset_name dataset data.name dataset_config_name task_name",
     f"(data sets of the hub) {_LATER}; use a local text file",
     "data=text data.path=FILE_OR_FOLDER"),
    ("train_file data_path data_dir", f"{_HF}; eke's is data.path", "data=text data.path={value}"),
    ("group_by_length packing",
     f"{_LATER} as a choice; text is packed, so that no token is padding", "data=python_source"),
    # keys: model
    ("model_name_or_path model_name model.name_or_path model.pretrained pretrained",
     f"(pretrained weights) {_LATER}; eke has sizes with random weights", "model={value}"),
    ("model_type", "is chosen by model here", "model={value}"),
    ("model.num_layers model.n_layer n_layer num_layers",
     "is another model's name; eke's is model.num_hidden_layers",
     "model.num_hidden_layers={value}"),
    ("model.n_head n_head model.num_heads num_heads",
     "is another model's name; eke's is model.num_attention_heads",
     "model.num_attention_heads={value}"),
    ("model.n_embd model.d_model n_embd d_model model.hidden_dim",
     "is another model's name; eke's is model.hidden_size", "model.hidden_size={value}"),
    ("model.d_ff model.n_inner d_ff",
     "is another model's name; eke's is model.intermediate_size",
     "model.intermediate_size={value}"),
    # keys: tracking
    ("report_to logger",
     f"{_HF}; eke's is tracker", "tracker={value}", {"all": "tracker=wandb", "[]": "tracker=none"}),
    ("wandb_project wandb.project project_name",
     f"{_HF}; eke's is tracker.project", "tracker.project={value}"),
    ("wandb_entity wandb.entity", f"{_HF}; eke's is tracker.entity", "tracker.entity={value}"),
    ("wandb_mode wandb.mode", f"{_HF}; eke's is tracker.mode", "tracker.mode={value}"),
    # options: number formats
    ("precision=16 precision=float16 precision=half precision=16-mixed precision=fp16-mixed "
     "precision=f16",
     "is called fp16 here", "precision=fp16"),
    ("precision=bfloat16 precision=bf16-mixed precision=bf16_mixed",
     "is called bf16 here", "precision=bf16"),
    ("precision=32 precision=float32 precision=float precision=no precision=none "
     "precision=full precision=32-true",
     "is called fp32 here", "precision=fp32"),
    ("precision=bf16_pure precision=bf16-true",
     f"(bfloat16 weights) {_LATER}; bf16 keeps float32 weights", "precision=bf16"),
    ("precision=fp8 precision=8 precision=int8 precision=4", _FP8, "precision=bf16"),
    ("precision=auto precision=mixed precision=amp",
     "does not say which 16-bit format; bf16 needs no loss scaling", "precision=bf16"),
    # options: optimizers
    ("optimizer=adamw_hf",
     "was removed from transformers 5: it was slower than torch's AdamW", "optimizer=adamw"),
    ("optimizer=adamw_torch optimizer=adamw_torch_xla",
     "is the Hugging Face Trainer's name for torch's AdamW", "optimizer=adamw"),
    ("optimizer=adamw_torch_fused",
     "is the Hugging Face Trainer's name for torch's fused AdamW", "optimizer=adamw_fused"),
    ("optimizer=adam optimizer=torch_adam",
     "couples decay and gradient; eke has the decoupled one", "optimizer=adamw"),
    ("optimizer=adamw_apex_fused",
     f"(NVIDIA apex) {_LATER}; torch's own fused AdamW does the same in one kernel",
     "optimizer=adamw_fused"),
    ("optimizer=adamw_bnb_8bit optimizer=adamw_8bit optimizer=paged_adamw_8bit "
     "optimizer=paged_adamw_32bit optimizer=paged_adamw optimizer=adamw_torchao_8bit "
     "optimizer=adamw_torchao_4bit optimizer=adamw_torch_8bit optimizer=adamw_torch_4bit "
     "optimizer=adam8bit",
     _8BIT, "optimizer=adafactor"),
    ("optimizer=adamw_anyprecision optimizer=adamw_bf16_sr",
     f"(bfloat16 optimizer states) {_LATER}; adafactor is what saves optimizer memory today",
     "optimizer=adafactor"),
    ("optimizer=galore optimizer=galore_adamw optimizer=apollo optimizer=lomo",
     f"{_LATER}; adafactor is what saves optimizer memory today", "optimizer=adafactor"),
    ("optimizer=rmsprop optimizer=adagrad optimizer=ademamix optimizer=lion_32bit "
     "optimizer=lion optimizer=lion_8bit optimizer=muon optimizer=schedule_free optimizer=lamb "
     "optimizer=sophia",
     f"{_LATER}; adamw is the closest that is", "optimizer=adamw"),
    # options: memory, attention, compile
    ("memory=gradient_checkpointing memory=activation_checkpointing memory=full",
     "is called checkpointing here", "memory=checkpointing"),
    ("memory=checkpointing_selective memory=activation_offload memory=empty_cache "
     "memory=optimizer_in_backward memory=max_savings memory=offload",
     f"{_LATER}; checkpointing is what saves activations today", "memory=checkpointing"),
    ("attention=flash_attention_2 attention=flash_attention_3 attention=flash2 "
     "attention=flash3 attention=flash_attn attention=flash",
     _NO_FLASH, "attention=sdpa"),
    ("attention=xformers attention=mem_efficient attention=math attention=cudnn",
     "is a kernel that sdpa chooses by itself", "attention=sdpa"),
    ("attention=bettertransformer attention=better_transformer",
     "was removed from transformers: PyTorch's sdpa took its place", "attention=sdpa"),
    ("attention=flex attention=flex_attention",
     f"{_LATER}; sdpa is the closest that is", "attention=sdpa"),
    ("compile=nvfuser compile=aot_nvfuser compile=aot_ts_nvfuser compile=nvprims_nvfuser",
     "was removed from PyTorch; inductor took its place", "compile=inductor"),
    ("compile=aot_cudagraphs compile=cudagraphs",
     f"{_LATER}; inductor is the closest that is", "compile=inductor"),
    ("compile=ofi compile=ipex compile=onnxrt compile=tvm compile=openvino",
     _INFERENCE, "compile=inductor"),
    ("compile=fx2trt compile=tensorrt compile=torch_tensorrt compile=fx2trt_fp16",
     _INFERENCE, "compile=inductor"),
    ("compile=true compile=on", "does not say which backend", "compile=inductor"),
    ("compile=default compile=max-autotune compile=reduce-overhead",
     f"is a mode of inductor; another mode than the default {_LATER}", "compile=inductor"),
    # options: processes, trackers, engines, schedules, data, models
    ("distributed=dp distributed=ddp distributed=fsdp distributed=zero1 distributed=zero2 "
     "distributed=zero3 distributed=deepspeed distributed=tp distributed=pp distributed=ep "
     "distributed=fsdp2",
     _SHARDED, "distributed=none"),
    ("engine=trainer", f"(the Hugging Face Trainer) {_LATER}", "engine=loop"),
    ("tracker=tensorboard tracker=mlflow tracker=trackio tracker=comet_ml",
     _OTHER_TRACKER, "tracker=wandb"),
    ("tracker=all", "is wandb or nothing today", "tracker=wandb"),
    ("schedule=constant_with_warmup", "is called constant here", "schedule=constant"),
    ("schedule=warmup_stable_decay", "is called wsd here", "schedule=wsd"),
    ("schedule=cosine_with_restarts schedule=polynomial schedule=inverse_sqrt",
     f"{_LATER}; cosine is the closest that is", "schedule=cosine"),
    ("data=hub data=jsonl data=parquet data=csv data=wikitext",
     f"{_LATER}; plain text files are", "data=text data.path=FILE_OR_FOLDER"),
    ("hardware=cuda hardware=gpu", "is found by auto", "hardware=auto"),
    ("model=bert model=bert-base-cased", "is a family; its sizes have names", "model=bert_base"),
    ("model=t5", "is a family; its sizes have names", "model=t5_small"),
    ("model=llama", "is a family; its sizes have names", "model=llama_1b"),
    ("recipe=fastest", f"{_LATER}; choose the techniques", "precision=bf16 compile=inductor"),
)
# fmt: on

RETIRED: dict[str, Retired] = {
    name: Retired(*row) for names, *row in _ROWS for name in names.split()
}
"""Key path, or `group=option`, exactly as typed elsewhere -> why not here, and what instead."""


def find_retired(name: str) -> Retired | None:
    """The row of a key path or of `group=option`, whatever its case and dashes."""
    if name in RETIRED:
        return RETIRED[name]
    wanted = normal(name)
    return next((row for known, row in RETIRED.items() if normal(known) == wanted), None)
