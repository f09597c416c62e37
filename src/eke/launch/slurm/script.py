"""The batch script of an array: submitit writes what SLURM is asked for, eke what runs."""

import shlex
import sys
from pathlib import Path
from typing import Any

from eke.common.paths import source_folder
from eke.common.process_env import SAFE_PATH
from eke.config.schema import GpuRequest, Slurm
from eke.launch.nodes.worker_node import ALONE_S
from eke.launch.slurm.request import Request
from eke.launch.slurm.submission import job_log
from eke.plan.record import EXIT_RESUMABLE

REQUEUE_CODE = 99
"""What the watcher of a run exits with to have its job put back into the queue."""

STRAGGLERS_S = int(ALONE_S) + 300
"""How long the tasks of a step may go on once one has ended. They end within seconds of each other,
and within ALONE_S where the first one is lost; one that dies before it can be heard of (its node
has no such Python, say) would have the others hold their nodes for `distributed.timeout_s`."""

_AFTER = f"""\
code=$?
job="${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}"
if [ "$code" -eq {REQUEUE_CODE} ]; then
  code={EXIT_RESUMABLE}
  # A job that somebody cancels, or that SLURM itself puts back, is no longer running by now.
  if scontrol show job -o "$job" | grep -Eq 'JobState=(RUNNING|SIGNALING)'; then
    scontrol requeue "$job" && sleep 60
  fi
fi
exit "$code\""""


def script_text(
    request: Request, profile: Slurm, name: str, submission: Path, num_runs: int
) -> str:
    """The text that sbatch gets.

    Args:
        request: what each run asks for.
        profile: how this cluster is spoken to.
        name: of the job, unlike any other.
        submission: the file that says which element is which run.
        num_runs: elements of the array.
    """
    from submitit.slurm import slurm

    text: str = slurm._make_sbatch_string(  # submitit's own executors write theirs with it
        command=watcher_command(profile, submission),
        folder=submission.parent,
        map_count=num_runs,
        **sbatch_parameters(request, profile, name, submission.parent),
    )
    return text


def watcher_command(profile: Slurm, submission: Path) -> str:
    """What srun starts, as a shell reads it."""
    python = profile.python or shlex.quote(sys.executable)
    words = f"{python} {SAFE_PATH} -u -m eke.launch.slurm.watcher {shlex.quote(str(submission))}"
    return f"{profile.command_prefix} {words}".strip()


def sbatch_parameters(request: Request, profile: Slurm, name: str, folder: Path) -> dict[str, Any]:
    """Arguments of submitit's for what a run asks for; what is empty is left to the cluster."""
    # SLURM replaces %a and the like wherever they are in a path; two are one.
    log = str(job_log(Path(str(folder).replace("%", "%%")), "%A_%a"))
    chosen: dict[str, Any] = {
        "partition": request.partition,
        "account": request.account,
        "qos": request.qos,
        "constraint": request.constraint,
        "mem": request.memory,
    }
    options = {name: value if value else True for name, value in profile.options.items()}
    gpus = f"{profile.gpu_type}:{request.gpus}" if profile.gpu_type else request.gpus
    if request.gpus:
        is_gres = profile.gpu_request is GpuRequest.gres
        chosen |= {"gres": f"gpu:{gpus}"} if is_gres else {"gpus_per_node": gpus}
    stragglers = [f"--wait={STRAGGLERS_S}"] if request.nodes > 1 else []
    return {
        "job_name": name,
        "time": request.minutes,
        "nodes": request.nodes,
        "ntasks_per_node": 1,
        "cpus_per_task": request.cpus,
        "signal_delay_s": profile.grace_s,
        "array_parallelism": profile.max_parallel,
        "stderr_to_stdout": True,
        "setup": _setup(profile),
        "teardown": [_AFTER],
        # Into the script's own log, whatever name submitit has for it.
        "srun_args": [
            *("--output", log, "--open-mode=append", "--export=ALL"),
            *(*stragglers, *profile.srun),
        ],
        # submitit would name a wckey of its own, which a cluster that checks them refuses.
        "wckey": None,
        "additional_parameters": {"requeue": True, "output": log, **options},
        **{key: value for key, value in chosen.items() if value},
    }


def _setup(profile: Slurm) -> list[str]:
    source = shlex.quote(source_folder())
    return [
        # scancel reaches this shell, too: it has to stay until the run has saved.
        "trap : TERM",
        *profile.setup,
        # Whatever the lines above have switched on: what comes after srun has to run.
        "set +eu +o pipefail",
        f'export PYTHONPATH={source}"${{PYTHONPATH:+:$PYTHONPATH}}"',
        # A step has all of a job's cores only if it is told so (SLURM 22.05 and later).
        'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"',
    ]
