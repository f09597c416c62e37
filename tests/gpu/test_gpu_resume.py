"""A run continued from a checkpoint: no further from an undisturbed one than two of those."""

from pathlib import Path

import pytest
from on_device import free_memory, plan_here
from trained import continue_job, steps_of, train_job

pytestmark = pytest.mark.gpu

TYPED = ("model.dropout=0.1", "train.steps=8", "train.checkpoint_every=4", "data.num_samples=64")

Steps = dict[int, tuple[float, float]]


def apart(one: Steps, other: Steps) -> float:
    """The largest relative difference of losses and gradient norms after the checkpoint."""
    return max(
        abs(a - b) / abs(a)
        for step in range(5, 9)
        for a, b in zip(one[step], other[step], strict=True)
    )


@pytest.mark.parametrize(
    "overrides",
    [("precision=fp32",), ("precision=bf16",), ("precision=fp16",), ("engine=trainer",)],
    ids=["fp32", "bf16", "fp16", "trainer"],
)
def test_resumed_run_is_as_close_as_a_repeated_run(
    overrides: tuple[str, ...], tmp_path: Path
) -> None:
    plan = plan_here(*TYPED, *overrides)
    whole, again = (train_job(plan, tmp_path / name) for name in ("whole", "again"))
    resumed = continue_job(whole, 4, tmp_path / "resumed")
    assert list(steps_of(resumed)) == [5, 6, 7, 8]
    noise = apart(steps_of(whole), steps_of(again))
    assert apart(steps_of(whole), steps_of(resumed)) <= 4 * noise, "of an undisturbed run"
    del whole, again, resumed
    free_memory()
