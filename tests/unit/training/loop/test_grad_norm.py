"""The gradients' norm: written by default, and never computed where nobody wants to know it."""

from collections import Counter

import pytest
from support import last_wins
from torch.utils._python_dispatch import TorchDispatchMode
from trained import BRIEF, train_job

from eke.plan.record import metrics

NORMS = ("_foreach_norm", "linalg_vector_norm")
SILENT = ("train.record_grad_norm=false", "train.max_grad_norm=null")
WORK = last_wins(*BRIEF, "train.steps=3", "train.max_grad_norm=null")


class Operations(TorchDispatchMode):
    """Counts those that are entered in."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def rows_of(folder) -> list[metrics.Row]:
    rows, unreadable = metrics.read_rows(folder / "metrics.jsonl")
    assert unreadable == 0
    return metrics.latest(rows, metrics.LOSS)


WAYS = {
    "loop": (),
    "accumulation": ("batch.per_device=2", "batch.accumulation=2"),
    "in_backward": ("memory=optimizer_in_backward",),
    "trainer": ("engine=trainer",),
}


@pytest.mark.parametrize(
    "way",
    [
        "accumulation",
        "in_backward",
        pytest.param("loop", marks=pytest.mark.slow),
        pytest.param("trainer", marks=pytest.mark.slow),
    ],
)
def test_disabled_grad_norm_keeps_losses_and_skips_norms(way, make_plan, tmp_path) -> None:
    found = {}
    for name, more in {"with": (), "without": SILENT}.items():
        plan = make_plan(*last_wins(*WORK, *WAYS[way], *more))
        with Operations() as operations:
            train_job(plan, tmp_path / name)
        found[name] = rows_of(tmp_path / name), sum(operations.counts[n] for n in NORMS)
    (with_rows, with_norms), (without_rows, without_norms) = found["with"], found["without"]
    assert [r[metrics.LOSS] for r in with_rows] == [r[metrics.LOSS] for r in without_rows]
    assert all(metrics.GRAD_NORM in row for row in with_rows)
    assert not any(metrics.GRAD_NORM in row for row in without_rows)
    assert (with_norms > 0, without_norms) == (True, 0)


@pytest.mark.slow
@pytest.mark.parametrize("sharing", ["ddp", "fsdp"])
def test_ranks_skip_the_grad_norm(sharing, train_ranks, tmp_path) -> None:
    folder = train_ranks(*WORK, *SILENT, f"distributed={sharing}", "distributed.num_processes=2")
    rows = rows_of(folder)
    assert len(rows) == 3
    assert not any(metrics.GRAD_NORM in row for row in rows)


@pytest.mark.parametrize(
    ("typed", "why"),
    [
        (("train.max_grad_norm=1.0",), "train.max_grad_norm = 1.0 needs the gradient norm"),
        (("precision=fp16",), "float16 needs the gradient norm"),
        (("distributed=zero2", "distributed.num_processes=2"), "DeepSpeed always computes"),
    ],
)
def test_required_grad_norm_warns_that_disabling_has_no_effect(typed, why, make_plan) -> None:
    plan = make_plan(*last_wins(*WORK, *SILENT, *typed), planning=True)
    (warning,) = [text for text in plan.warnings if "record_grad_norm" in text]
    assert why in warning


@pytest.mark.slow
def test_float16_always_records_the_grad_norm(make_plan, tmp_path) -> None:
    plan = make_plan(*last_wins(*WORK, *SILENT, "precision=fp16"))
    job = train_job(plan, tmp_path / "run")
    assert all(metrics.GRAD_NORM in row for row in rows_of(job.paths.folder))
