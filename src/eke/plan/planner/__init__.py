"""Plan of a run: every decision with its reason, made without slow imports."""

from eke.plan.planner.inputs import (
    MODEL,
    change_of,
    check_inputs,
    check_software,
    software_changes,
    with_own_software,
)
from eke.plan.planner.lengths import MicroBatchShape, evaluated, simulated_micro_batches
from eke.plan.planner.plan import (
    Decision,
    Plan,
    RecipeDecision,
    ShownDecision,
    cut_of,
    describe_model,
    length_of_run,
    plan_to_plain,
    plans_of_sources,
    read_plan,
    remarks_on_cuts,
    render_plan,
    write_plan,
)
from eke.plan.planner.planner import (
    PLACES,
    avoids_cudnn,
    make_plan,
    maps_memory,
    outline_record,
    remove_swap,
    replan,
    shares_heads,
    swap_files,
    swap_folder,
    with_batch,
)
from eke.plan.planner.samples import possible_batches, samples_to_keep
