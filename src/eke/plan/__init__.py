"""The plan: what will be run, decided and explained before anything heavy is imported."""

from eke.plan.batches import possible_batches, samples_to_keep
from eke.plan.heads import shares_heads
from eke.plan.lengths import Micro, drawn, evaluated
from eke.plan.make import make_plan, replan, with_batch
from eke.plan.outline import outline_record
from eke.plan.plan import BatchPlan, ComputePlan, Decision, Plan, StepPlan
from eke.plan.show import render_plan
from eke.plan.store import plan_to_plain, read_plan, write_plan
from eke.plan.swap import remove_swap, swap_files, swap_folder

__all__ = [
    "BatchPlan",
    "ComputePlan",
    "Decision",
    "Micro",
    "Plan",
    "StepPlan",
    "drawn",
    "evaluated",
    "make_plan",
    "outline_record",
    "plan_to_plain",
    "possible_batches",
    "read_plan",
    "remove_swap",
    "render_plan",
    "replan",
    "samples_to_keep",
    "shares_heads",
    "swap_files",
    "swap_folder",
    "with_batch",
    "write_plan",
]
