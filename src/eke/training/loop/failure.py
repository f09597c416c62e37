"""Classification of the exception that ended a run."""

import errno
import os
import traceback

import torch

from eke.common.errors import ChangedError, EkeError, no_room, of_system
from eke.common.runtime import lacking
from eke.plan.record import Failure, Outcome
from eke.training.distributed.ranks import is_lost_contact
from eke.training.loop.stop import Stopped

OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "std::bad_alloc",
    "unable to mmap",
    "_status_alloc_failed",
    "_allocation_failed",
)
"""How others than PyTorch's allocator for CUDA say it, all as a RuntimeError: its CPU allocator;
cuBLAS, cuSOLVER, cuSPARSE and cuDNN, by the names of their errors; NCCL, which quotes CUDA."""


class Diverged(Exception):
    """The loss is not finite."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory, of the device or the host, ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in OUT_OF_MEMORY)


def classify(error: BaseException, phase: str) -> tuple[Outcome, Failure]:
    """Outcome and explanation for an exception that reached the worker in a phase."""
    if isinstance(error, Stopped):
        return error.outcome, Failure(phase, str(error))
    if isinstance(error, Diverged):
        return Outcome.diverged, Failure(phase, str(error))
    if isinstance(error, ChangedError):
        last = str(error).rstrip().splitlines()[-1]  # a loader's process puts a traceback before it
        return Outcome.refused, Failure(phase, last.rpartition("ChangedError: ")[2])
    if isinstance(error, EkeError):
        said = str(error)
        if said.startswith("Caught "):  # in a loader's process, as above
            said = said.rstrip().splitlines()[-1].partition("Error: ")[2]
        return Outcome.crashed, Failure(phase, said)
    trace = "".join(traceback.format_exception(error))
    if is_out_of_memory(error):  # first: NCCL says so in the same words as that others are gone
        return Outcome.oom, Failure(phase, f"out of memory in {phase}: {_first_line(error)}", trace)
    if is_lost_contact(error):
        message = f"another process of this run is gone, or hangs: {_first_line(error)}"
        return Outcome.crashed, Failure(phase, message, trace, lost_contact=True)
    if isinstance(error, OSError) and no_room(error):
        return Outcome.crashed, Failure(phase, of_system(error))
    message = lacking(error) or f"{type(error).__name__}: {_first_line(error)}".removesuffix(": ")
    if type(error).__module__.startswith("torch._inductor"):
        # A file that a crash or a full disk left empty ends every later run.
        folder = os.environ["TORCHINDUCTOR_CACHE_DIR"]
        fix = "export TORCHINDUCTOR_CACHE_DIR=NEW_FOLDER   (or compile=none)"
        message += f"; if what the compiler keeps in {folder} is damaged: {fix}"
    return Outcome.crashed, Failure(phase, message, trace)


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].strip() if lines else ""
