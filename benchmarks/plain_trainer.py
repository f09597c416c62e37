"""Hugging Face Trainer as it comes, from transformers alone: what eke's throughput is held against.

python benchmarks/plain_trainer.py SHAPE [--precision bf16] [--size small] [--steps N] [--warmup N]

Trains SHAPE (`bert_large`: sequence classification; `llama_1b`: next tokens) from random weights on
random tokens, with Trainer's defaults but for the batch, and prints one line of JSON. Nothing of
eke is imported. The seconds are those of the steps after the warm-up, the device waited for at
both ends.
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


@dataclass(frozen=True)
class Shape:
    """A model and the batch it is trained with."""

    model: Any
    config: Any
    sizes: dict[str, int]
    per_device: int
    seq_len: int
    labels: bool
    """A label per sequence; else the tokens themselves."""


BERT, LLAMA = (BertForSequenceClassification, BertConfig), (LlamaForCausalLM, LlamaConfig)

SHAPES = {
    ("bert_large", "full"): Shape(
        *BERT,
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
         "intermediate_size": 4096},
        per_device=4, seq_len=512, labels=True,
    ),
    ("bert_large", "small"): Shape(
        *BERT,
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 128, "vocab_size": 320},
        per_device=4, seq_len=64, labels=True,
    ),
    ("llama_1b", "full"): Shape(
        *LLAMA,
        {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192,
         "vocab_size": 128256},
        per_device=4, seq_len=1024, labels=False,
    ),
    ("llama_1b", "small"): Shape(
        *LLAMA,
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "vocab_size": 320},
        per_device=4, seq_len=64, labels=False,
    ),
}  # fmt: skip
"""Sizes of google-bert/bert-large-uncased and meta-llama/Llama-3.2-1B (their config.json)."""


class Clock(TrainerCallback):  # type: ignore[misc]  # transformers 5.23: no types
    """The time at the end of each step, and the device waited for at the end of the warm-up."""

    def __init__(self, warmup: int) -> None:
        self.warmup = warmup
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Trainer has done one more step."""
        if len(self.ends) + 1 == self.warmup or state.global_step == state.max_steps:
            wait_for_device()
        self.ends.append(time.perf_counter())


def wait_for_device() -> None:
    """Kernels run on after the call that started them."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def make_samples(shape: Shape, vocab_size: int, count: int) -> list[dict[str, Any]]:
    """Random ids, as the guides' benchmark has them."""
    draw = torch.Generator().manual_seed(0)
    samples = []
    for number in range(count):
        ids = torch.randint(100, vocab_size, (shape.seq_len,), generator=draw)
        samples.append({"input_ids": ids, "labels": number % 2 if shape.labels else ids})
    return samples


def measure(shape: Shape, precision: str, steps: int, warmup: int) -> dict[str, Any]:
    """Train, and say how fast and in how much memory."""
    torch.manual_seed(0)
    model = shape.model(shape.config(**shape.sizes, pad_token_id=0))
    if not shape.labels:
        model.config.use_cache = False
    samples = make_samples(shape, model.config.vocab_size, shape.per_device * 16)
    clock = Clock(warmup)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=shape.per_device,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            bf16=precision == "bf16",
            fp16=precision == "fp16",
        )
        trainer = Trainer(model, arguments, train_dataset=samples, callbacks=[clock])
        trainer.remove_callback(PrinterCallback)  # it prints every log line
        trainer.train()
    seconds = clock.ends[-1] - clock.ends[warmup - 1]
    return {
        "outcome": "ok",
        "samples_per_s": (steps - warmup) * shape.per_device / seconds,
        "median_step_s": statistics.median(
            b - a for a, b in zip(clock.ends[warmup - 1 :], clock.ends[warmup:], strict=False)
        ),
        "peak_allocated_bytes": (
            torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
        ),
        "parameters": sum(p.numel() for p in model.parameters()),
        "optimizer": type(getattr(trainer.optimizer, "optimizer", trainer.optimizer)).__name__,
    }


def main() -> None:
    """Measure one shape and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("shape", choices=sorted({name for name, _ in SHAPES}))
    parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="fp32")
    parser.add_argument("--size", choices=["full", "small"], default="full")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=10)
    asked = parser.parse_args()
    if not 0 < asked.warmup < asked.steps:
        parser.error("--warmup must be between 1 and --steps - 1")
    shape = SHAPES[asked.shape, asked.size]
    print(json.dumps(measure(shape, asked.precision, asked.steps, asked.warmup)))


if __name__ == "__main__":
    main()
