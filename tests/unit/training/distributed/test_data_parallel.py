"""distributed=dp, as far as one CPU goes: torch passes the rows through.

So only the module, the plan and the cuts are tested here; tests/gpu trains it on two GPUs.
"""

from types import SimpleNamespace

import pytest
import torch
from support import TINY
from unit.plan.cases import GPU, SYNTHETIC, plan_of

from eke.training.batches.dataset import build_data
from eke.training.distributed.ranks import LossOnDevice, build_data_parallel
from eke.training.model.build_model import build_model
from eke.training.model.loss import build_loss
from eke.training.model.number_formats import build_formats
from eke.training.observe.record_settings import note_devices

CPU = torch.device("cpu")


def plan_for(*overrides: str):
    return plan_of(
        *TINY,
        *SYNTHETIC,
        "distributed=dp",
        "distributed.num_processes=3",
        "dataloader.pin_memory=off",
        *overrides,
        device=GPU,
    )


def test_one_process_feeds_all_devices() -> None:
    plan = plan_for("batch.per_device=2", "batch.accumulation=2")
    assert (plan.batch.world_size, plan.batch.devices) == (1, 3)
    assert plan.batch.samples_per_step == 12
    first = next(build_data(plan).train_steps(0))
    assert [batch.num_samples for batch in first] == [6, 6]
    assert next(iter(build_data(plan).eval_batches())).num_samples == 6


def test_target_is_divided_by_the_devices() -> None:
    assert plan_for("batch.per_device=2", "batch.target=24").batch.accumulation == 4


@pytest.mark.parametrize(("precision", "bound"), [("fp32", 0.0), ("bf16", 2**-6)])
def test_data_parallel_loss_matches_the_model(precision, bound) -> None:
    plan = plan_for(f"precision={precision}")
    model, loss = build_model(plan, CPU), build_loss(plan)
    batch = next(build_data(plan).train_steps(0))[0]
    called, summed = build_data_parallel(plan, model, loss, build_formats(plan, CPU))
    expected = loss(model, batch).item()
    difference = abs(summed(called, batch).item() - expected) / expected
    assert difference <= bound
    assert (difference > 0) == (precision == "bf16"), "autocast is entered where the model runs"


def test_unused_device_is_warned_about() -> None:
    plan = plan_for()
    warnings: list[str] = []
    module = LossOnDevice(torch.nn.Linear(1, 1), build_loss(plan), build_formats(plan, CPU))
    job = SimpleNamespace(
        plan=plan, effective={}, warn=warnings.append, model=SimpleNamespace(module=module)
    )
    module.devices |= {"cuda:0", "cuda:1", "cuda:2"}
    note_devices(job)
    assert job.effective["data_parallel_devices"] == ["cuda:0", "cuda:1", "cuda:2"]
    assert not warnings
    module.devices.discard("cuda:1")
    note_devices(job)
    assert [" 2 of 3 devices" in warning for warning in warnings] == [True]
