"""Common values for fine-tuning a checkpoint by method, each with its source."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from eke.config.schema import Adapters, Config, PretrainedModel
from eke.models.families import family_of
from eke.models.sizes import is_ia3, optimizer_entry


@dataclass(frozen=True)
class _FineTuningDefault:
    """Default value, and smallest (0: no limit) and largest common values."""

    value: float
    low: float
    high: float
    source: str


LR, DECAY, CLIP = "optimizer.lr", "optimizer.weight_decay", "train.max_grad_norm"
WARMUP, SAMPLES = "schedule.warmup_frac", "samples per step"
SET_BY: Mapping[str, tuple[str, ...]] = {key: (key,) for key in (LR, DECAY, CLIP)} | {
    WARMUP: (WARMUP, "schedule.warmup_steps"),
    SAMPLES: ("batch.per_device", "batch.accumulation", "batch.target"),
}
"""Quantity -> keys that set it."""

_HF = "transformers' TrainingArguments"
BERT, ROBERTA = "BERT, arXiv:1810.04805, appendix A", "RoBERTa, arXiv:1907.11692, table 10"
LLAMA2, T5 = "Llama 2, arXiv:2307.09288, section 3.1", "T5, arXiv:1910.10683, section 3.1.2"
QLORA, QLORA_CODE = "QLoRA, arXiv:2305.14314, table 9", "QLoRA, github.com/artidoro/qlora, qlora.py"
_IA3 = "T-Few, arXiv:2205.05638"
_CLIPPED = _FineTuningDefault(1.0, 1.0, 1.0, _HF)

_USUAL: Mapping[str, Mapping[str, _FineTuningDefault]] = {
    "full fine-tuning of decoders": {
        LR: _FineTuningDefault(5e-5, 2e-5, 5e-5, f"{_HF}; 2e-5 in {LLAMA2}"),
        DECAY: _FineTuningDefault(0.1, 0.0, 0.1, LLAMA2),
        CLIP: _CLIPPED,
        WARMUP: _FineTuningDefault(0.03, 0.0, 0.03, "Alpaca, github.com/tatsu-lab/stanford_alpaca"),
        SAMPLES: _FineTuningDefault(8, 8, 64, f"8 per device in {_HF}; 64 in {LLAMA2}"),
    },
    "full fine-tuning of encoder-decoders": {
        LR: _FineTuningDefault(5e-5, 5e-5, 1e-3, f"{_HF}; 0.001 with Adafactor in {T5}"),
        SAMPLES: _FineTuningDefault(8, 8, 128, f"8 per device in {_HF}; 128 in {T5}"),
    },
    "full fine-tuning of encoders": {
        LR: _FineTuningDefault(
            5e-5, 1e-5, 5e-5, f"2e-5 to 5e-5 in {BERT}; 1e-5 to 3e-5 in {ROBERTA}"
        ),
        DECAY: _FineTuningDefault(0.01, 0.0, 0.1, f"{BERT}; 0.1 in {ROBERTA}"),
        CLIP: _CLIPPED,
        WARMUP: _FineTuningDefault(0.06, 0.0, 0.06, ROBERTA),
        SAMPLES: _FineTuningDefault(16, 16, 32, f"16 or 32 in {BERT}, and {ROBERTA}"),
    },
    "LoRA": {
        LR: _FineTuningDefault(2e-4, 1e-4, 2e-4, f"{QLORA}; 0.0001 from 33B on"),
        DECAY: _FineTuningDefault(
            0.0, 0.0, 0.01, f"{QLORA_CODE}; 0.01 in LoRA, arXiv:2106.09685, table 11"
        ),
        CLIP: _FineTuningDefault(
            0.3, 0.3, 1.0, f"QLoRA, arXiv:2305.14314, appendix B.2; 1 in {_HF}"
        ),
        WARMUP: _FineTuningDefault(0.03, 0.0, 0.03, QLORA_CODE),
        SAMPLES: _FineTuningDefault(16, 16, 64, f"{QLORA}; up to 64 at 65B"),
    },
    "IA3": {
        LR: _FineTuningDefault(3e-3, 3e-3, 3e-3, _IA3),
        WARMUP: _FineTuningDefault(0.06, 0.0, 0.06, f"60 of 1000 steps in {_IA3}"),
        SAMPLES: _FineTuningDefault(8, 8, 8, _IA3),
    },
}
"""Method -> quantity -> common value."""


def fine_tuning_defaults(config: Config) -> Mapping[str, _FineTuningDefault]:
    """Return the common values by quantity for the method, {} for random weights."""
    if not isinstance(config.model, PretrainedModel):
        return {}
    family, task, kind = family_of(config), config.task.option, "full fine-tuning of encoders"
    if isinstance(config.peft, Adapters):  # DoRA and QLoRA count as LoRA
        kind = "IA3" if is_ia3(config) else "LoRA"
    elif family.is_encoder_decoder or task == "seq2seq_lm":
        kind = "full fine-tuning of encoder-decoders"
    elif family.is_decoder or task == "causal_lm":
        kind = "full fine-tuning of decoders"
    # Learning rates, decay and clipping of the sources are for updates of AdamW's size.
    alike = optimizer_entry(config.optimizer).steps_like_adamw(config.optimizer)
    row = {key: each for key, each in _USUAL[kind].items() if alike or key not in (LR, DECAY, CLIP)}
    return {key: replace(each, source=f"{kind} ({each.source})") for key, each in row.items()}
