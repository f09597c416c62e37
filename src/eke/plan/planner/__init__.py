"""The plan: what will be run, decided and explained before anything heavy is imported."""

from eke.plan.planner.batches import possible_batches, samples_to_keep
from eke.plan.planner.gqa import shares_heads
from eke.plan.planner.inputs import check_inputs
from eke.plan.planner.lengths import Micro, drawn, evaluated
from eke.plan.planner.plan import BatchPlan, ComputePlan, Decision, Plan, StepPlan
from eke.plan.planner.plan_record import outline_record
from eke.plan.planner.planner import make_plan, replan, with_batch
from eke.plan.planner.show import render_plan
from eke.plan.planner.software import check_software, software_changes, with_own_software
from eke.plan.planner.store import plan_to_plain, read_plan, write_plan
from eke.plan.planner.swap import remove_swap, swap_files, swap_folder

__all__ = [
    "BatchPlan",
    "ComputePlan",
    "Decision",
    "Micro",
    "Plan",
    "StepPlan",
    "check_inputs",
    "check_software",
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
    "software_changes",
    "swap_files",
    "swap_folder",
    "with_batch",
    "with_own_software",
    "write_plan",
]
