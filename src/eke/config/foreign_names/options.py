"""Options that exist only to be refused: other tools' names, and retired techniques."""

from eke.config.foreign_names.phrases import (
    FAMILY,
    FP8,
    HERE,
    INFERENCE,
    LATER,
    MODES,
    OTHER_TRACKER,
    PARALLEL,
    Row,
)

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
