"""What one step computed with: number formats, kernels of attention and of the loss."""

from typing import Any

from eke.config.schema import Attention, Backend
from eke.training.loop.state import Job
from eke.training.model.attention import ATTENTION, Seen
from eke.training.model.kernels import replaced_modules
from eke.training.model.loss import has_fused_loss, is_sparse
from eke.training.model.loss_head import loss_head
from eke.training.model.sdpa_backend import EXPECTED

FUSED_LOSS = "linear_cross_entropy"

MANY = 0.9
"""Share of positions with a label from which leaving out the others is not worth a choice."""


def note_kernels(job: Job, seen: Seen) -> None:
    """What one step computed with, and a warning where that is not what was asked for."""
    plan = job.plan
    job.effective["matmul_dtypes"] = list(seen.matmul_dtypes)
    wanted = plan.compute.matmul
    compiled = plan.config.compile.option != "none"
    if wanted not in seen.matmul_dtypes and (seen.matmul_dtypes or not compiled):
        job.warn(
            f"precision={plan.choices.get('precision', '')} had no effect: matrix multiplications "
            f"ran in {', '.join(seen.matmul_dtypes) or 'nothing'}"
        )
    _note_attention(job, seen)
    _note_fused(job, seen)


def _note_attention(job: Job, seen: Seen) -> None:
    """Implementation of the model and kernels that ran; a compiler may fuse a kernel away."""
    attention = job.plan.config.attention
    config: Any = job.bare_model.config
    implementation = str(getattr(config, "_attn_implementation", ""))
    job.effective["attention_implementation"] = implementation
    if job.plan.config.model.family == "mixtral":
        job.effective["experts_implementation"] = getattr(config, "_experts_implementation", None)
    ran = set(seen.attention_kernels)
    job.effective["attention_kernels"] = sorted(ran)
    if implementation != ATTENTION[attention.option]:
        job.warn(f"attention={attention.option} had no effect: the model runs {implementation}")
        return
    compiled = job.plan.config.compile.option != "none"
    if compiled and not ran:
        return  # eager and math are ordinary operations, which the compiler fuses with others
    expected = expected_kernels(attention)
    if not ran or ran - expected:
        pinned = attention.backend is not Backend.auto
        asked = f".backend={attention.backend.value}" if pinned else f"={attention.option}"
        kernels = ", ".join(sorted(ran)) or "no known kernel"
        job.warn(f"attention{asked} had no effect: attention ran in {kernels}")


def expected_kernels(attention: Attention) -> frozenset[str]:
    """The kernels of `KernelProbe` of which one or several are then to run."""
    if attention.option == "sdpa":
        return EXPECTED[attention.backend]
    return frozenset({attention.option})


def _note_fused(job: Job, seen: Seen) -> None:
    """How the loss was computed, and how many modules are Liger's."""
    job.effective["loss_kernels"] = list(seen.loss_kernels)
    _note_sparse(job)
    if has_fused_loss(job.plan) and FUSED_LOSS not in seen.loss_kernels:
        job.warn("kernels.fused_linear_cross_entropy=true had no effect: the loss took all logits")
    if job.plan.config.kernels.option == "liger":
        count = replaced_modules(job.bare_model)
        job.effective["liger_modules"] = count
        if not count:
            job.warn("kernels=liger had no effect: no module's forward pass is Liger's")


def _note_sparse(job: Job) -> None:
    """How many of a micro-batch's positions were projected onto the vocabulary."""
    head = loss_head(job.bare_model) if is_sparse(job.plan) else None
    if head is None or head.projected is None:
        return  # compiled code does not count
    projected, of = head.projected
    job.effective["projected_positions"] = f"{projected} of {of}"
    if projected > MANY * of:
        few = f"{projected} of {of} positions have a label"
        job.warn(f"kernels.sparse_prediction=true saves next to nothing: {few}")
