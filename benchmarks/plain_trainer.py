"""Hugging Face Trainer as it comes, from transformers alone: what eke's throughput is held against.

python benchmarks/plain_trainer.py SHAPE [--precision bf16] [--size small] [--steps N] [--warmup N]
    [--loop hand] [--flags best] [--batch N] [--lr X] [--samples FILE] [--weights FILE]

Trains SHAPE (`bert_large`: sequence classification; `llama_1b`: next tokens) from random weights on
random tokens, with Trainer's defaults but for the batch, and prints one line of JSON. Nothing of
eke is imported. The seconds are those of the steps after the warm-up, the device waited for at
both ends. `--flags best`: those of the guides' flags that save time (BEST). Samples and weights of
somebody else's training, saved by torch, are taken in their order. `--loop hand`: the same by
hand_loop.py, which is plain PyTorch.
"""

import argparse
import json
import resource
import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
from hand_loop import train_by_hand
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
    ("llama_1b", "medium"): Shape(
        *LLAMA,
        {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512, "vocab_size": 512,
         "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
        per_device=8, seq_len=128, labels=False,
    ),
    ("llama_1b", "full"): Shape(
        *LLAMA,
        {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192,
         "vocab_size": 128256, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
        per_device=4, seq_len=1024, labels=False,
    ),
    ("llama_1b", "small"): Shape(
        *LLAMA,
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "vocab_size": 320,
         "tie_word_embeddings": True},
        per_device=4, seq_len=64, labels=False,
    ),
}  # fmt: skip
"""Sizes of google-bert/bert-large-uncased and meta-llama/Llama-3.2-1B (their config.json)."""


BEST: dict[str, Any] = {
    "optim": "adamw_torch_fused",
    "dataloader_num_workers": 2,
    "dataloader_pin_memory": True,
}
"""Beside the format: https://huggingface.co/docs/transformers/perf_train_gpu_one, without what
saves memory and costs time. `tf32` on a GPU that has it."""


@dataclass(frozen=True)
class Work:
    """What is trained, beside the shape."""

    precision: str
    steps: int
    warmup: int
    best: bool = False
    batch: int | None = None
    lr: float | None = None
    samples: str | None = None
    weights: str | None = None
    by_hand: bool = False

    @property
    def log_every(self) -> int:
        """Steps between two looks at the loss, for which the device is waited for."""
        return max(1, self.steps // 4)

    def flags(self) -> dict[str, Any]:
        """Arguments of Trainer."""
        on_gpu = torch.cuda.is_available()
        flags: dict[str, Any] = {"bf16": self.precision == "bf16", "fp16": self.precision == "fp16"}
        if self.lr is not None:
            flags["learning_rate"] = self.lr
        if self.samples is not None:
            flags["train_sampling_strategy"] = "sequential"
        if self.best:
            flags |= BEST | {"dataloader_pin_memory": on_gpu}
            if on_gpu and torch.cuda.get_device_capability() >= (8, 0):
                flags["tf32"] = True
        return flags


class Clock(TrainerCallback):  # type: ignore[misc]  # transformers 5.23: no types
    """The end of each step on the device's clock, which is waited for after warm-up and at the end.

    On the host's clock alone a step would take as long as launching it does.
    """

    def __init__(self, warmup: int) -> None:
        self.warmup = warmup
        self.ends: list[Any] = []
        self.waited: list[float] = []
        """When the device had done all steps of the warm-up, and all there are; host seconds."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Trainer has done one more step."""
        self.step_ended(state.global_step == state.max_steps)

    def step_ended(self, is_last: bool) -> None:
        """One more step is done, as far as the host knows."""
        self.ends.append(now_on_device())
        if len(self.ends) == self.warmup or is_last:
            wait_for_device()
            self.waited.append(time.perf_counter())

    def step_seconds(self) -> list[float]:
        """Of each step after the warm-up."""
        steps = zip(self.ends[self.warmup - 1 :], self.ends[self.warmup :], strict=False)
        if torch.cuda.is_available():
            return [start.elapsed_time(end) / 1e3 for start, end in steps]
        return [end - start for start, end in steps]


def now_on_device() -> Any:
    """This moment: an event in the GPU's stream, or seconds."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch 2.13
    event.record()
    return event


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


def measure(shape: Shape, work: Work) -> dict[str, Any]:
    """Train, and say how fast and in how much memory."""
    steps, warmup, batch = work.steps, work.warmup, work.batch or shape.per_device
    torch.manual_seed(0)
    model = shape.model(shape.config(**shape.sizes, pad_token_id=0))
    if work.weights is not None:
        model.load_state_dict(torch.load(work.weights, weights_only=True))
    if not shape.labels:
        model.config.use_cache = False
    if work.samples is not None:
        samples = torch.load(work.samples, weights_only=True)
    else:
        samples = make_samples(shape, model.config.vocab_size, batch * 16)
    clock = Clock(warmup)
    train = train_by_hand if work.by_hand else train_by_trainer
    losses, optimizer = train(model, samples, batch, work, clock)
    seconds = clock.waited[1] - clock.waited[0]
    return {
        "outcome": "ok",
        "samples_per_s": (steps - warmup) * batch / seconds,
        "median_step_s": statistics.median(clock.step_seconds()),
        "peak_allocated_bytes": (
            torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
        ),
        "process_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "losses": losses,
        "parameters": sum(p.numel() for p in model.parameters()),
        "optimizer": optimizer,
    }


def train_by_trainer(
    model: Any, samples: list[dict[str, Any]], batch: int, work: Work, clock: Clock
) -> tuple[list[float], str]:
    """Train with transformers.Trainer; returns the losses it logged, and its optimizer's name."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=work.steps,
            per_device_train_batch_size=batch,
            logging_steps=work.log_every,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            **work.flags(),
        )
        trainer = Trainer(model, arguments, train_dataset=samples, callbacks=[clock])
        trainer.remove_callback(PrinterCallback)  # it prints every log line
        trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return losses, type(getattr(trainer.optimizer, "optimizer", trainer.optimizer)).__name__


def main() -> None:
    """Measure one shape and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("shape", choices=sorted({name for name, _ in SHAPES}))
    parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="fp32")
    parser.add_argument("--size", choices=["full", "medium", "small"], default="full")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--loop", choices=["trainer", "hand"], default="trainer")
    parser.add_argument("--flags", choices=["default", "best"], default="default")
    parser.add_argument("--batch", type=int, help="samples per step; the shape's own without")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--samples", help="a list of samples, saved by torch")
    parser.add_argument("--weights", help="a state_dict, saved by torch")
    asked = parser.parse_args()
    if (asked.shape, asked.size) not in SHAPES:
        parser.error(f"{asked.shape} has no size {asked.size}")
    if not 0 < asked.warmup < asked.steps:
        parser.error("--warmup must be between 1 and --steps - 1")
    by_hand = asked.loop == "hand"
    if by_hand and (asked.precision == "fp16" or asked.flags == "best"):
        parser.error("--loop hand has no scaled losses for fp16, and none of Trainer's flags")
    shape = SHAPES[asked.shape, asked.size]
    work = Work(
        asked.precision, asked.steps, asked.warmup, asked.flags == "best", asked.batch, asked.lr,
        asked.samples, asked.weights, by_hand,
    )  # fmt: skip
    print(json.dumps(measure(shape, work)))


if __name__ == "__main__":
    main()
