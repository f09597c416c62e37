"""Process environment: log levels of libraries, folders of compiled code, resident memory.

PyTorch would use `/tmp/torchinductor_USER` even if another user created it, and compiled code runs
as this user. The folder is local, since home folders are often shared by different processors.
"""

import contextlib
import logging
import os
import resource
import tempfile
import time
import warnings
from pathlib import Path

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.files import own_folder
from eke.common.process_env import be_verbose
from eke.data.sources import cache_folder
from eke.plan.planner import Plan, maps_memory
from eke.training.model import import_transformers

QUIET = {
    "KINETO_LOG_LEVEL": "99",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
}
"""torch's native code, its profiler above all, writes notes that mean nothing to users; bars
fill a log."""

TALKERS = (
    "torchao",  # 0.18: kernels built for other devices, triton, on every import
    "torch.utils._pytree",  # 2.13: how torchao 0.18 registers its enums
    "bitsandbytes",  # 0.50: that faster CPU kernels are in another package
    "DeepSpeed",  # 0.19: that it runs on the CPU
)
"""Loggers of which only errors are shown."""


def quiet_imports() -> None:
    """Set levels of loggers, before torch is imported, and with it whatever else is installed."""
    for name in TALKERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    be_verbose()


def quiet_libraries(plan: Plan) -> None:
    """Keep progress bars and advice of other libraries out of the log."""
    if plan.device.kind == "cpu":  # otherwise DeepSpeed selects a device
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    quiet_imports()
    quiet_transformers()
    warnings.filterwarnings("ignore", category=FutureWarning)


def quiet_transformers() -> None:
    """Import it, and show no advice and no bars of it."""
    import_transformers()
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    be_verbose()


def configure_allocator(plan: Plan) -> None:
    """Set what the plan says of CUDA's allocator, before its first use."""
    if maps_memory(plan.config, plan.device):
        import torch

        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def choose_compiled_code_folders() -> None:
    """Set PyTorch's and Triton's variables that are not set, and check the folders of the others.

    Raises ConfigError: a configured folder belongs to another user.
    """
    local = Path(tempfile.gettempdir()) / f"eke-{os.geteuid()}"
    names = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    for variable, name in names.items():
        if given := os.environ.get(variable):
            try:
                own_folder(Path(given), private=True)
            except OSError as error:
                why = f"{error.strerror}; compiled code in it would run as you"
                fix = Fix(remark=f"export {variable}=FOLDER_OF_YOURS")
                raise ConfigError(Problem(variable, given, why, fix)) from error
            continue
        try:
            folder = own_folder(own_folder(local, private=True) / name, private=True)
        except OSError:  # another user made something of that name first
            folder = own_folder(cache_folder() / name, private=True)
        os.environ[variable] = str(folder)


def own_resident_bytes() -> int | None:
    """Resident memory now; None where /proc does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return None


def end_first() -> None:
    """Have the kernel end this process before any other when the machine's memory is short (Linux).

    See proc(5), oom_score_adj: 1000 is the most, and raising it needs no privilege.
    """
    with contextlib.suppress(OSError):  # not Linux, or not allowed: it is ended in its turn
        Path("/proc/self/oom_score_adj").write_text("1000")


def process_peak() -> int:
    """Highest resident memory so far, in bytes (Linux counts it in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def seconds_since_start() -> float | None:
    """Seconds since this process was started; None where /proc does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
        started = float(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, ValueError, IndexError, AttributeError):  # not Linux
        return None
