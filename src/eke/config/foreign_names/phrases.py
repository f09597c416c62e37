"""What several rows of the tables say."""

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
