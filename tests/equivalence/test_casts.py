"""precision.casts=per_step: 16-bit copies of float32 weights, made once for all micro-batches."""

from dataclasses import replace

import pytest
import torch
from equivalence_cases import CASES, RAGGED
from support import TINY, last_wins
from torch.utils._python_dispatch import TorchDispatchMode
from trained import start_job

ONCE = "precision.casts=per_step"
LLAMA, BERT = CASES["causal_lm-llama"], CASES["masked_lm-bert"]


def start(make_plan, folder, *overrides):
    """A job before its first step."""
    return start_job(make_plan(*last_wins(*TINY, *RAGGED, "batch.per_device=3", *overrides)), folder)


def gradients(job) -> dict[str, torch.Tensor]:
    """Of the first step, by name."""
    from eke.training.loop.loop import next_step
    from eke.training.loop.step import take_step

    cut, totals = next_step(job, job.data.train_steps(0, 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(job.update), "apply", lambda *_: None)
        take_step(job, cut, totals.num_targets, 0, 0.0, lambda phase: None)
    return {n: p.grad.double() for n, p in job.bare_model.named_parameters() if p.grad is not None}


def distance(found, exact) -> float:
    """Relative, of all gradients as one vector."""
    assert found.keys() == exact.keys()
    squares = sum(((found[n] - exact[n]) ** 2).sum() for n in exact)
    return float((squares / sum((g**2).sum() for g in exact.values())) ** 0.5)


@pytest.mark.parametrize("case", [LLAMA, BERT], ids=["llama", "bert"])
def test_gradients_are_as_near_the_truth_as_autocasts(case, make_plan, tmp_path) -> None:
    found = {}
    for name in ("precision=fp32", "precision=bf16", f"precision=bf16 {ONCE}"):
        job = start(make_plan, tmp_path / name, *case, "batch.accumulation=4", *name.split())
        if name == "precision=fp32":
            job.bare_model.double()
        found[name] = gradients(job)
    exact, cast, copied = found.values()
    print(case, distance(cast, exact), distance(copied, exact))
    for n in exact:
        print(n, float((cast[n]-exact[n]).norm()/exact[n].norm()), float((copied[n]-exact[n]).norm()/exact[n].norm()))
    assert 0 < distance(copied, exact) < 1.5 * distance(cast, exact)
