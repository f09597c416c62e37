"""Plans for the tests of this folder: a composed configuration, and the rest filled in by hand."""

from dataclasses import replace
from functools import cache

from unit.models.sizes.configs import make_config

from eke.common.paths import conf_folder
from eke.hardware import Device
from eke.models.sizes import model_size
from eke.plan.planner.plan import BatchPlan, ComputePlan, Plan, StepPlan


def options_of(group: str) -> set[str]:
    """The options of one group, by their files."""
    return {path.stem for path in (conf_folder() / group).glob("*.yaml")}


def long_plan(num_steps: int, *overrides: str) -> Plan:
    """The same over so many steps of two samples each, in one epoch."""
    plan = hand_plan(*overrides)
    num_samples = num_steps * plan.batch.per_device
    steps = replace(plan.steps, total=num_steps, per_epoch=num_steps, num_train_samples=num_samples)
    return replace(plan, steps=steps)


@cache
def hand_plan(*overrides: str) -> Plan:
    """A plan for a CPU; shared, so do not change what it holds."""
    config = make_config(*overrides)
    return Plan(
        run_id="0" * 16,
        name="test",
        config=config,
        choices={},
        overrides=overrides,
        device=Device(kind="cpu", name="cpu"),
        batch=BatchPlan(per_device=2, accumulation=1, world_size=1, eval_per_device=2),
        steps=StepPlan(total=1, per_epoch=1, warmup=0, num_train_samples=2, num_eval_samples=2),
        compute=ComputePlan(
            autocast=None,
            loss_scaling=False,
            tf32=False,
            optimizer_implementation="",
            pin_memory=False,
        ),
        size=model_size(config),
        decisions=(),
        warnings=(),
        data_warnings=(),
        machine={},
        data_fingerprint="",
    )
