"""Whether anything was compiled."""

from eke.training.loop.state import Job
from eke.training.model.compile import num_graphs


def note_compiler(job: Job) -> None:
    """Warn where the compiler has captured nothing by the end of the second step."""
    option = job.plan.config.compile.option
    if option != "none" and not num_graphs(job.plan):
        job.warn(f"compile={option} had no effect: no graph was captured")
