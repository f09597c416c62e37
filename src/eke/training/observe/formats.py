"""Number formats that were planned, and what of them the objects really have."""

import torch

from eke.training.distributed.deepspeed import piece_numbers
from eke.training.distributed.deepspeed_update import DeepSpeedUpdate
from eke.training.loop.state import Job
from eke.training.model.attention import Seen
from eke.training.model.float8 import count_float8
from eke.training.model.fp32_master_weights import master_bytes


def note_formats(job: Job) -> None:
    """Weights, float32 copies and float8 layers, after the first full steps."""
    compute = job.plan.compute
    # Those of the model itself: what is trained beside it may be wider (peft's adapters).
    dtypes = {str(p.dtype).removeprefix("torch.") for p in job.bare_model.parameters()}
    if compute.weights not in dtypes:
        found = ", ".join(sorted(dtypes))
        job.warn(f"precision.weights={compute.weights} had no effect: they are {found}")
    copies = _bytes_of_copies(job)
    if copies or compute.master:
        job.effective["master_bytes"] = copies
    if compute.master and not copies:
        job.warn("precision.master=on had no effect: the optimizer steps on the weights themselves")
    if compute.float8 != "off":
        note_float8(job)


def _bytes_of_copies(job: Job) -> int:
    """Bytes of the float32 weights that the optimizer steps on, where they are not the model's."""
    if isinstance(job.update, DeepSpeedUpdate):  # ZeRO-3 shows its optimizer none of them
        return torch.float32.itemsize * sum(piece_numbers(job.update.engine))
    return master_bytes(job.bare_model, job.optimizer)


def note_float8(job: Job) -> None:
    """How many linear layers multiply in float8."""
    layers = count_float8(job.bare_model)
    job.effective["float8_layers"] = layers.converted
    job.effective["linear_layers"] = layers.total
    job.effective["float8_emulated"] = layers.emulated > 0
    if not layers.converted:
        job.warn(
            f"precision.float8={job.plan.compute.float8} had no effect: none of {layers.total} "
            "linear layers could be converted"
        )


def note_evaluation_formats(job: Job, seen: Seen) -> None:
    """What the first batch of evaluation computed with."""
    job.effective["eval_matmul_dtypes"] = list(seen.matmul_dtypes)
    compute = job.plan.compute
    wanted = compute.eval_autocast or compute.weights
    if wanted not in seen.matmul_dtypes:
        job.warn(
            f"precision.evaluation={job.plan.config.precision.evaluation.value} had no effect: "
            f"matrix multiplications ran in {', '.join(seen.matmul_dtypes) or 'nothing'}"
        )
