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


KERNELS_MB = 1343
"""Of the whole GPU after one number was put there, which loads the kernels."""


@dataclass(frozen=True)
class Claim:
    """What a guide says of one option, with its number."""

    command: str
    text: str
    source: str


MANY = "https://huggingface.co/docs/transformers/v4.20.1/en/perf_train_gpu_many"
NOW = "https://huggingface.co/docs/transformers/perf_train_gpu_one"
_GPT2 = "GPT-2, 200 steps of 4 samples on each of two TITAN RTX"

CLAIMS = (
    Claim("precision=tf32", "up to 3x throughput", SOURCE),
    Claim("optimizer=adamw", "8 bytes of state per parameter: 24 GB for t5-3b", SOURCE),
    Claim("optimizer=adafactor", "slightly more than 4 bytes of state per parameter", SOURCE),
    Claim("optimizer=adamw_8bit", "2 bytes of state per parameter: 6 GB for t5-3b", SOURCE),
    Claim("optimizer=sgd", "4 bytes of state per parameter, with momentum", SOURCE),
    Claim("memory=checkpointing", "about 20 % slower", SOURCE),
    Claim("memory=empty_cache", "about 10 % slower", NOW),
    Claim("distributed=dp", f"110 s with NVLink ({_GPT2})", MANY),
    Claim("distributed=ddp", f"101 s with NVLink, 131 s without ({_GPT2})", MANY),
    Claim(
        "peft=lora",
        "84 GB of optimizer state become 2.4 GB, for 7 billion parameters and 200 million in "
        "adapters, at 12 bytes each",
        NOW,
    ),
)

MEASURED_ALONE = {
    "precision=fp16": ("fp16", "none"),
    "optimizer=adafactor": ("Adafactor", "none"),
    "optimizer=adamw_8bit": ("8-bit Adam", "none"),
    "memory=checkpointing": ("accumulation, checkpointing", "gradient accumulation"),
}
"""Option -> the row that has it, and the row that differs in nothing else."""


def published(command: str) -> list[str]:
    """What the guides measured or claim of one option, a line each."""
    lines = []
    if command in MEASURED_ALONE:
        rows = {row.technique: row for row in ROWS}
        one, other = (rows[name] for name in MEASURED_ALONE[command])
        lines.append(
            f"{one.samples_per_s} samples/s instead of {other.samples_per_s}, {one.memory_mb} MB "
            f"instead of {other.memory_mb} MB (the table above)"
        )
    lines += [f"{claim.text} ({claim.source})" for claim in CLAIMS if claim.command == command]
    return lines
