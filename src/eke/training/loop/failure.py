"""Classification of the exception that ended a run."""

import errno
import os
import sys
import traceback

import torch

from eke.common.errors import (
    ChangedError,
    ConfigError,
    EkeError,
    Fix,
    Problem,
    disk_full_hint,
    format_os_error,
)
from eke.common.python_runtime import describe_missing_api
from eke.common.text import first_line
from eke.models.checkpoints.architecture import class_of
from eke.models.families import family_of
from eke.plan.planner import Plan
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
"""Messages of RuntimeErrors for lack of memory: PyTorch's CPU allocator, error names of cuBLAS,
cuSOLVER, cuSPARSE and cuDNN, and NCCL, which quotes CUDA."""


class Diverged(Exception):
    """The loss is not finite."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the device or the host ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in OUT_OF_MEMORY)


def classify(error: BaseException, phase: str, plan: Plan | None = None) -> tuple[Outcome, Failure]:
    """Return outcome and explanation of an exception that reached the worker in a phase.

    Before the first step, pass `plan`: a library's error is then a problem of the configuration.
    """
    if isinstance(error, Stopped):
        return error.outcome, Failure(phase, str(error))
    if isinstance(error, Diverged):
        return Outcome.diverged, Failure(phase, str(error))
    if isinstance(error, ChangedError):
        last = str(error).rstrip().splitlines()[-1]  # after the traceback of a loader process
        return Outcome.refused, Failure(phase, last.rpartition("ChangedError: ")[2])
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, ConfigError):
        return Outcome.refused, Failure(phase, error.short(), trace)
    if isinstance(error, EkeError):
        said = str(error)
        if said.startswith("Caught "):  # in a loader process
            said = said.rstrip().splitlines()[-1].partition("Error: ")[2]
        return Outcome.crashed, Failure(phase, said)
    if is_out_of_memory(error):  # first: NCCL reports lost ranks in the same words
        return Outcome.oom, Failure(phase, f"out of memory in {phase}: {first_line(error)}", trace)
    if is_lost_contact(error):
        message = f"another process of this run has ended or hangs: {first_line(error)}"
        return Outcome.crashed, Failure(phase, message, trace, lost_contact=True)
    if isinstance(error, OSError) and disk_full_hint(error):
        return Outcome.crashed, Failure(phase, format_os_error(error))
    return _code_failure(error, phase, plan, trace)


def _code_failure(
    error: BaseException, phase: str, plan: Plan | None, trace: str
) -> tuple[Outcome, Failure]:
    """Return outcome and explanation of an error in code of eke or of a library."""
    name, said = type(error).__name__, first_line(error)
    message = describe_missing_api(error) or (name if said == repr(error) else f"{name}: {said}")
    if type(error).__module__.startswith("torch._inductor"):
        # A file left empty by a crash or a full disk ends every later run.
        folder = os.environ["TORCHINDUCTOR_CACHE_DIR"]
        fix = "export TORCHINDUCTOR_CACHE_DIR=NEW_FOLDER   (or compile=none)"
        message += f". If the compiler's files in {folder} are damaged: {fix}"
    elif plan is not None and not describe_missing_api(error) and _is_of_library(error):
        return Outcome.refused, Failure(phase, _problem(error, message, plan).short(), trace)
    return Outcome.crashed, Failure(phase, message, trace)


_FILES = ("eke.training.checkpoint", "eke.training.batches", "eke.data", "eke.results")
"""Parts of eke whose errors come from files or other programs instead of a model."""

_TECHNIQUES = {
    "torch.utils.checkpoint": "memory",
    "torch._dynamo": "compile",
    "torch._inductor": "compile",
    "peft": "peft",
    "bitsandbytes": "peft",
    "liger_kernel": "kernels",
}
"""Module -> group whose option uses the module and can be set to `none`."""


def _modules(error: BaseException) -> list[str]:
    """Return the module of each frame outside the standard library, innermost last."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    names = [str(frame.f_globals.get("__name__", "")) for frame in frames]
    return [name for name in names if name.partition(".")[0] not in sys.stdlib_module_names]


def _is_of_library(error: BaseException) -> bool:
    """Return whether a library called by eke raised the error while building or running a model."""
    of_machine = OSError, torch.AcceleratorError, torch.distributed.DistError
    if isinstance(error, of_machine) or not isinstance(error, Exception):
        return False
    modules = [f"{module}." for module in _modules(error)]
    is_of_eke = [module.startswith("eke.") for module in modules]
    return any(is_of_eke) and not is_of_eke[-1] and not any(m.startswith(_FILES) for m in modules)


def _problem(error: BaseException, message: str, plan: Plan) -> ConfigError:
    """Return a library's error as a problem, with an override if one technique caused it."""
    config, modules = plan.config, _modules(error)
    options = {group: getattr(config, group).option for group in sorted({*_TECHNIQUES.values()})}
    used = " ".join(f"{group}={option}" for group, option in options.items() if option != "none")
    kind = getattr(config.model, "model_type", "") or next(iter(family_of(config).checkpoints), "")
    own = getattr(config.model, "target", "") or type(config.data).__name__
    known = kind and config.targets.option != "custom"
    model = (class_of(kind, config.targets.option) or kind) if known else own
    library = modules[-1].partition(".")[0]
    why = f"{library} rejects {model}{f' with {used}' if used else ''}: {message}"
    for module in reversed(modules):
        group = next((g for m, g in _TECHNIQUES.items() if f"{module}.".startswith(f"{m}.")), "")
        if group and options[group] != "none":
            problem = Problem(group, options[group], why, Fix(f"{group}=none"), "rejected_model")
            return ConfigError(problem)
        if module.startswith("transformers."):
            break  # code of the model, whichever library called it
    return ConfigError(Problem("model", config.model.option, why, id="rejected_model"))
