"""One run on this machine, from its plan to its record."""

import yaml

from eke.errors import RunError
from eke.files import write_atomic
from eke.launch.folder import Place, claim, find_place
from eke.launch.follow import open_view
from eke.launch.ranks import ranks_are_started
from eke.launch.settle import settle
from eke.launch.supervise import supervise
from eke.paths import user_path
from eke.plan import Plan, plan_to_plain, remove_swap, swap_folder, write_plan
from eke.record import Record, read_attempts


def place_of(plan: Plan) -> Place:
    """Where this run is, or will be."""
    return find_place(user_path(plan.config.paths.runs), plan, plan.config.rerun)


def run_single(plan: Plan, place: Place) -> Record:
    """Run, or continue, the plan in its folder.

    Raises:
        BusyError: somebody works on this run.
        RunError: the folder cannot be written.
    """
    with claim(place.paths) as lock:
        try:
            write_plan(place.paths, plan)
            text = yaml.safe_dump(plan_to_plain(plan)["config"], sort_keys=False)
            write_atomic(place.paths.config, f"# {' '.join(plan.overrides)}\n{text}")
            before = len(read_attempts(place.paths))
            with open_view(place.paths, plan.steps.total) as view:
                to_start = 1 if ranks_are_started() else plan.batch.world_size
                code = supervise(place.paths, view, lock, to_start)
            remove_swap(swap_folder(plan, place.paths))  # what a killed worker has left
            return settle(place.paths, plan, code, before)
        except OSError as error:
            why = error.strerror or error
            raise RunError(f"{place.paths.folder} cannot be written: {why}") from error
