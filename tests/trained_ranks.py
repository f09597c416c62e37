"""Runs that several processes train to their end, as `python train.py` has them trained."""

from collections.abc import Mapping
from pathlib import Path

from live import curve
from rank_server import RankServer, modules_of
from support import PATIENCE_S, environment

from eke.common.paths import RunPaths
from eke.launch.processes.run_attempt import finish_attempt
from eke.launch.processes.run_dir import lock_run_folder
from eke.plan.planner import Plan, write_plan
from eke.plan.record import Record, read_attempts


def train_in_ranks(
    server: RankServer, plan: Plan, runs: Path, environment: Mapping[str, str]
) -> tuple[Path, Record, list[int]]:
    """The run's folder, its record, and the ranks' exit codes.

    Args:
        server: forks the ranks.
        plan: of the run.
        runs: where its folder is to be; no record of it may be there.
        environment: of each rank.
    """
    paths = RunPaths(runs / plan.run_id)
    assert not paths.record.exists()
    with lock_run_folder(paths):
        write_plan(paths, plan)
        before = len(read_attempts(paths))
        codes = server.train(
            paths,
            plan.batch.world_size,
            environment,
            modules=modules_of(plan),
            timeout=2 * PATIENCE_S,  # DeepSpeed's C++ is compiled at its first use
        )
        record = finish_attempt(paths, plan, next(filter(None, codes), 0), before)
    return paths.folder, record, codes


def undisturbed_curve(server: RankServer, plan: Plan, tmp: Path) -> list[tuple[float, float]]:
    """The curve of a run on this machine that nothing interrupts, in a folder of its own."""
    folder, record, _ = train_in_ranks(server, plan, tmp / "runs", environment(tmp))
    assert record.outcome == "ok", record
    return curve(folder)
