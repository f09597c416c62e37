"""The plan: what will be run, decided and explained before anything heavy is imported."""

from eke.plan.make import make_plan
from eke.plan.outline import outline_record
from eke.plan.plan import BatchPlan, ComputePlan, Decision, Plan, StepPlan
from eke.plan.show import render_plan
from eke.plan.store import plan_to_plain, read_plan, write_plan

__all__ = [
    "BatchPlan",
    "ComputePlan",
    "Decision",
    "Plan",
    "StepPlan",
    "make_plan",
    "outline_record",
    "plan_to_plain",
    "read_plan",
    "render_plan",
    "write_plan",
]
