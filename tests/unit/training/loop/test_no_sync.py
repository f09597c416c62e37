"""Between two writes of metrics no step asks for the value of a tensor.

On a GPU such a read makes the host wait until the device has caught up, and then the device for the
host. Here is only a CPU, so reads are counted. `item`, `bool`, `float`, `int` and PyTorch's own in
C++ all end in the operation `_local_scalar_dense`, which a dispatch mode sees; `tolist`, `numpy`
and `cpu` reach into memory directly and are replaced. Batches are prepared before the count begins:
collation reads its own tensors, which have not been on the device yet. The first two steps, which
`eke.training.observe.observe_run` looks at, are not counted either.
"""

import itertools
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support import TINY, last_wins
from torch.utils._python_dispatch import TorchDispatchMode
from trained import start_job

import eke.training.loop.loop as loop
from eke.training.loop.training_state import TrainingState

NUM_STEPS = 3
BASE = (
    *TINY, "model=tiny_bert", "task=sequence_classification", "data=synthetic", "data.seq_len=16",
    "data.num_samples=32", "batch.per_device=2", "train.steps=20",
)  # fmt: skip


class ReadTrap(TorchDispatchMode):
    """Counts reads of tensor values while it is entered, but for tensors that live on the host."""

    def __init__(self, host: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self.host = host
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ == "_local_scalar_dense":
            self.note(args[0])
        return func(*args, **(kwargs or {}))

    def note(self, tensor: torch.Tensor) -> None:
        self.reads += id(tensor) not in self.host


@contextmanager
def trapped(monkeypatch: pytest.MonkeyPatch, host: frozenset[int] = frozenset()):
    """Everything inside is watched."""
    trap = ReadTrap(host)
    with monkeypatch.context() as patches, trap:
        for name in ("tolist", "numpy", "cpu"):
            patches.setattr(torch.Tensor, name, _counted(trap, getattr(torch.Tensor, name)))
        yield trap


def _counted(trap: ReadTrap, original: Callable[..., Any]) -> Callable[..., Any]:
    def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        trap.note(tensor)
        return original(tensor, *args, **kwargs)

    return read


@pytest.fixture
def job_after_two_steps(make_plan, tmp_path) -> Callable[..., TrainingState]:
    """Overrides -> a job whose optimizer has its states."""

    def make(*overrides: str) -> TrainingState:
        job = start_job(make_plan(*last_wins(*BASE, *overrides)), tmp_path)
        job.model.train()
        batches = job.data.train_steps(0)
        for step in range(2):
            loop.train_step(job, batches, step)
        loop.write_metrics(job)
        return job

    return make


def reads_per_step(job: TrainingState, monkeypatch: pytest.MonkeyPatch) -> float:
    """Reads in three steps without a write, per step."""
    batches = iter(list(itertools.islice(job.data.train_steps(2), NUM_STEPS)))
    # torch's foreach and for-loop optimizers keep their step counters on the host, to read them.
    states = job.optimizer.state.values()
    host = frozenset(id(state["step"]) for state in states if "step" in state)
    with trapped(monkeypatch, host) as trap:
        for step in range(2, 2 + NUM_STEPS):
            loop.train_step(job, batches, step)
    assert len(job.meter.notes) == NUM_STEPS, "the steps were not trained, or were written"
    return trap.reads / NUM_STEPS


LLAMA, GPT2 = ("model=tiny", "task=causal_lm"), ("model=tiny_gpt2", "task=causal_lm")
RAGGED = "data.lengths=uniform"
QUIET = {
    "fp32-accumulated": ("batch.accumulation=3",),
    "bf16-foreach": ("precision=bf16", "optimizer=adamw_foreach", "memory=checkpointing"),
    "bf16-copies-sgd": ("precision=bf16", "precision.casts=per_step", "optimizer=sgd"),
    "bf16-pure-forloop": ("precision=bf16_pure", "train.max_grad_norm=null",
                          "optimizer=adamw_forloop"),
    "bf16-master": ("precision=bf16_pure", "precision.master=on", "attention=eager"),
    "selective-adafactor": ("memory=checkpointing_selective", "optimizer=adafactor"),
    "in-backward": ("memory=optimizer_in_backward", "train.max_grad_norm=null"),
    "masked-lm": ("task=masked_lm",),
    "t5": ("model=tiny_t5", "task=seq2seq_lm"),
    "ragged-llama": (*LLAMA, RAGGED),
    "packed-llama": (*LLAMA, RAGGED, "data.packing=on"),
    "packed-gpt2": (*GPT2, RAGGED, "data.packing=on", "attention=eager"),
    "padding-free-llama": (*LLAMA, RAGGED, "data.packing=padding_free", "batch.accumulation=2"),
    "padding-free-gpt2": (*GPT2, RAGGED, "data.packing=padding_free"),
}  # fmt: skip
"""Reads add up, so a case may hold several techniques."""


@pytest.mark.parametrize("overrides", QUIET.values(), ids=QUIET.keys())
def test_no_tensor_value_is_read_between_writes(
    overrides, job_after_two_steps, monkeypatch
) -> None:
    assert reads_per_step(job_after_two_steps(*overrides), monkeypatch) == 0


READ_BY_TRANSFORMERS = {
    # masking_utils._ignore_bidirectional_mask_sdpa: does the mask hide anything? T5: the encoder's
    # mask, and the decoder's of the encoder.
    "padded-bert": (("data.lengths=uniform",), 1),
    "padded-t5": (("model=tiny_t5", "task=seq2seq_lm", "data.lengths=uniform"), 2),
}
"""transformers 5.23's own reads in one forward pass. When they are gone, move these to QUIET."""


@pytest.mark.parametrize(
    ("overrides", "expected"), READ_BY_TRANSFORMERS.values(), ids=READ_BY_TRANSFORMERS.keys()
)
def test_loop_adds_no_reads_to_transformers(
    overrides, expected, job_after_two_steps, monkeypatch
) -> None:
    job = job_after_two_steps(*overrides, "batch.accumulation=2")
    assert reads_per_step(job, monkeypatch) == 2 * expected


@pytest.mark.parametrize(
    ("optimizer", "expected"), [("adamw_fused", 0), ("adamw_foreach", 1), ("sgd", 1)]
)
def test_loss_scaling_reads_one_value_per_step(
    optimizer, expected, job_after_two_steps, monkeypatch
) -> None:
    """precision=fp16: GradScaler must know whether a gradient overflowed before it may step.

    A fused kernel is handed the flag and looks itself; for all others the host reads it, once per
    optimizer step. That is inherent: the host decides whether to call the optimizer.
    """
    job = job_after_two_steps("precision=fp16", f"optimizer={optimizer}", "batch.accumulation=2")
    assert job.formats.scaler is not None
    assert reads_per_step(job, monkeypatch) == expected


WAYS = {
    "item": lambda t: t.item(),
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "cpu": lambda t: t.cpu(),
    "bool": bool,
    "float": float,
    "int": int,
    "index": lambda t: [0, 1][t.long()],
    "branch": lambda t: 1 if t == 0 else 2,
    "contains": lambda t: 0 in t,
}


def test_planted_reads_are_detected(job_after_two_steps, monkeypatch) -> None:
    job = job_after_two_steps()
    apply = job.update.apply

    def apply_and_look() -> torch.Tensor:
        norm = apply()
        for way in WAYS.values():
            before = trap.reads
            way(torch.zeros_like(norm))
            found.append(trap.reads - before)
        return norm

    found: list[int] = []
    monkeypatch.setattr(job.update, "apply", apply_and_look)
    batches = job.data.train_steps(2)
    with trapped(monkeypatch) as trap:
        loop.train_step(job, batches, 2)
    assert dict(zip(WAYS, found, strict=True)) == dict.fromkeys(WAYS, 1)
