"""The optimizer within the backward pass: which gradients live when, and what is saved."""

import itertools

import pytest
import torch
from saved import load_checkpoint, save_checkpoint
from support import TINY, last_wins
from trained import start_job

import eke.training.loop.loop as loop
from eke.models.sizes import state_bytes
from eke.training.loop.training_state import TrainingState
from eke.training.optimizer.update import InBackwardUpdate, PlainUpdate

BASE = (
    *TINY, "model=tiny", "data=synthetic", "data.seq_len=8", "data.num_samples=32",
    "data.num_eval_samples=1", "batch.per_device=2", "train.steps=6", "train.max_grad_norm=null",
    "train.save_final=false", "train.timing_warmup_steps=2",
)  # fmt: skip
WITHIN = "memory=optimizer_in_backward"


@pytest.fixture
def make_job(make_plan, tmp_path):
    """Overrides -> a job that has not begun."""
    numbers = itertools.count()

    def make(*overrides: str) -> TrainingState:
        plan = make_plan(*last_wins(*BASE, *overrides))
        return start_job(plan, tmp_path / str(next(numbers)))

    return make


def train_steps(job: TrainingState, start: int, stop: int) -> list[tuple[float, float]]:
    """Loss and norm of these steps."""
    job.model.train()
    batches = job.data.train_steps(start)
    for step in range(start, stop):
        loop.train_step(job, batches, step)
    return [
        (note.loss.item(), note.grad_norm.item()) for note in job.meter.notes[-(stop - start) :]
    ]


def test_optimizer_in_backward_holds_one_gradient(make_job) -> None:
    """And the largest is as large as the plan says (tied weights: one gradient)."""
    job = make_job(WITHIN)
    alive = []

    def note(*_):
        alive.append([p.grad.nbytes for p in job.parameters if p.grad is not None])

    job.optimizer.register_step_pre_hook(note)
    train_steps(job, 0, 1)
    assert [len(sizes) for sizes in alive] == [1] * len(job.parameters)
    config = job.plan.config
    assert max(sizes[0] for sizes in alive) == state_bytes(config).gradients
    assert all(p.grad is None for p in job.parameters)


def test_peak_is_lower_by_the_gradients(make_job) -> None:
    """One short sample: the step's peak is weights, gradients and next to nothing else."""
    short = (
        "model.hidden_size=64", "model.num_hidden_layers=8", "model.intermediate_size=256",
        "batch.per_device=1", "data.seq_len=4", "optimizer=sgd", "optimizer.momentum=0",
    )  # fmt: skip
    peaks, gradients = {}, {}
    for option in ("memory=none", WITHIN):
        job = make_job(*short, option)
        loop.train(job)
        peaks[option] = job.profiled_peak
        config = job.plan.config
        gradients[option] = state_bytes(config).gradients
    saved = gradients["memory=none"] - gradients[WITHIN]
    assert peaks["memory=none"] - peaks[WITHIN] == pytest.approx(saved, rel=0.15)


def test_checkpoint_resumes_bit_exact_in_both_modes(make_job, tmp_path) -> None:
    """One optimizer with the ordinary state: a run may even continue without the technique."""
    whole = train_steps(make_job(), 0, 6)
    first = make_job(WITHIN)
    assert train_steps(first, 0, 3) == whole[:3]
    path = save_checkpoint(tmp_path / "c", 3, first.bare_model, first.optimizer, None, keep=1)
    for option in (WITHIN, "memory=none"):
        job = make_job(option)
        assert load_checkpoint(path, job.bare_model, job.optimizer, None) == 3
        assert train_steps(job, 3, 6) == whole[3:]


def test_record_counts_optimizer_steps_in_backward(make_job, monkeypatch) -> None:
    job = make_job(WITHIN)
    assert isinstance(job.update, InBackwardUpdate)
    loop.train(job)
    assert job.effective["optimizer_steps_in_backward"] == len(job.parameters)
    assert not job.warnings

    monkeypatch.setattr(
        "eke.training.loop.training_state.InBackwardUpdate",
        lambda optimizer, weights, _: PlainUpdate(job.plan, job.model, optimizer, None, weights),
    )
    job = make_job(WITHIN)
    loop.train(job)
    assert job.effective["optimizer_steps_in_backward"] == 0
    assert any("optimizer_in_backward" in warning for warning in job.warnings)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_pure"])
def test_gradient_norm_matches_the_loop_in_any_format(precision, make_job) -> None:
    """Of the first step: rounded to bfloat16 it would be off by up to 2^-9 of each weight's."""
    (_, plain), (_, within) = (
        train_steps(make_job(f"precision={precision}", option), 0, 1)[0]
        for option in ("memory=none", WITHIN)
    )
    assert within == pytest.approx(plain, rel=1e-6)


def test_without_gradients_the_norm_is_zero() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    update = InBackwardUpdate(torch.optim.SGD([weight], lr=0.1), [weight], knows_norm=True)
    assert update.apply().item() == 0
    (weight * 2).sum().backward()
    assert update.apply().item() == pytest.approx(8**0.5)
    assert weight.tolist() == pytest.approx([0.8, 0.8])
