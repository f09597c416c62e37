"""What Hugging Face's guides report, row by row, and the command that is the same in eke."""

from dataclasses import dataclass

SOURCE = "https://huggingface.co/docs/transformers/v4.20.1/en/perf_train_gpu_one"
SETTING = "BERT-large, 512 random sequences of 512 tokens, one V100 with 16 GB, HF Trainer"


@dataclass(frozen=True)
class Published:
    """One measurement of the guide."""

    technique: str
    overrides: str
    """Beside `experiment=guide_single_gpu`."""
    samples_per_s: float | None
    """None where the guide gives memory alone."""
    memory_mb: int
    """Of the whole GPU, as NVML counts it: kernels, weights, cache and all."""


_SMALL = "batch=guide_accumulation memory=checkpointing precision=fp16"

ROWS = (
    Published("none", "batch=guide", 8.86, 14949),
    Published("gradient accumulation", "batch=guide_accumulation", 7.75, 8681),
    Published(
        "accumulation, checkpointing", "batch=guide_accumulation memory=checkpointing", 5.99, 6775
    ),
    Published("fp16", "batch=guide precision=fp16", 18.64, 13939),
    Published("accumulation, checkpointing, fp16", _SMALL, 10.09, 7275),
    Published("Adafactor", "batch=guide optimizer=adafactor", 7.96, 12295),
    Published("all of these with Adafactor", f"{_SMALL} optimizer=adafactor", 9.06, 4847),
    Published("8-bit Adam", "batch=guide optimizer=adamw_8bit", 9.15, 13085),
    Published("all of these with 8-bit Adam", f"{_SMALL} optimizer=adamw_8bit", 10.35, 5363),
    Published("the same with Accelerate", f"{_SMALL} optimizer=adamw_8bit engine=loop", None, 5363),
)
