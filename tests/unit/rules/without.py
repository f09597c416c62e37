"""Plans and trainings that no rule was asked about, or all but one."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import TINY, last_wins
from trained import steps_of, train_job
from unit.plan.cases import plan_of

from eke.config.compose import compose
from eke.plan.planner import Plan
from eke.rules import RULES, check
from eke.training.loop.training_state import TrainingState
from eke.workflows.planning import plan_for

LIGHT = (
    *TINY,
    "data=synthetic",
    "data.seq_len=16",
    "data.num_samples=16",
    "data.num_eval_samples=4",
    "batch.per_device=4",
    "train.steps=2",
    "train.save_final=false",
)
"""Two steps in a fraction of a second."""

SHORT = ("data.num_eval_samples=4", "batch.per_device=2", "train.steps=1", "train.save_final=false")


def light_plan(*overrides: str) -> Plan:
    """The plan of these overrides, whatever the rules say of them."""
    return plan_of(*last_wins(*LIGHT, *overrides))


def trained(folder: Path, *overrides: str) -> TrainingState:
    """The job after its last step, whatever the rules say of it."""
    return train_job(light_plan(*overrides), folder)


def trace(job: TrainingState) -> tuple[dict[int, tuple[float, float]], dict[str, torch.Tensor]]:
    """Loss and gradient norm of each step, and the weights it ended with."""
    return steps_of(job), {n: t.detach().clone() for n, t in job.bare_model.state_dict().items()}


def is_same(one: TrainingState, other: TrainingState) -> bool:
    """Whether two runs are the same to the last bit."""
    (steps, weights), (other_steps, other_weights) = trace(one), trace(other)
    return (
        steps == other_steps
        and weights.keys() == other_weights.keys()
        and all(torch.equal(weights[name], other_weights[name]) for name in weights)
    )


def switch_off(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rules but this one are asked."""
    others = tuple(r for r in RULES if r.id != rule)
    monkeypatch.setattr("eke.workflows.auto_batch.check", lambda facts: check(facts, others))


def plan_without(rule: str, overrides: Iterable[str], monkeypatch: pytest.MonkeyPatch) -> Plan:
    """The plan for a CPU with all rules but one, of a model whose width the overrides say."""
    switch_off(rule, monkeypatch)
    wide = [o for o in TINY if "hidden_size" not in o and "heads" not in o]
    typed = last_wins(*wide, *SHORT, *overrides, "hardware=cpu")
    return plan_for(compose(list(typed)), planning=False)


@contextmanager
def exchanging(model: torch.nn.Module, note: Callable[[], object]) -> Iterator[torch.nn.Module]:
    """The model as one rank's; `note` is called where it would exchange gradients."""

    def exchange(state, bucket):
        note()
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        shared = torch.nn.parallel.DistributedDataParallel(model)
        shared.register_comm_hook(None, exchange)
        yield shared
    finally:
        dist.destroy_process_group()
