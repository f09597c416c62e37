"""Process environment: log levels of libraries, folders of compiled code, resident memory."""

import contextlib
import logging
import os
import resource
import tempfile
import time
import warnings
from pathlib import Path

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.files import make_private_dir
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
"""Variables that silence progress bars and notes of torch's native code, mainly its profiler."""

NOISY_LOGGERS = (
    "torchao",  # 0.18: kernels built for other devices, triton, on every import
    "torch.utils._pytree",  # 2.13: how torchao 0.18 registers its enums
    "bitsandbytes",  # 0.50: faster CPU kernels in another package
    "DeepSpeed",  # 0.19: use of the CPU
)
"""Loggers limited to errors, with the version and the suppressed warning."""


def quiet_imports() -> None:
    """Show only errors of other libraries. Call it before importing torch, which imports some."""
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    be_verbose()


def quiet_libraries(plan: Plan) -> None:
    """Keep progress bars and advice of other libraries out of the log."""
    if plan.device.kind == "cpu":  # otherwise DeepSpeed selects a device
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    quiet_imports()
    quiet_transformers()


def quiet_transformers() -> None:
    """Import transformers and disable its warnings and progress bars."""
    import_transformers()
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    be_verbose()


def configure_allocator(plan: Plan) -> None:
    """Apply the plan's settings of the CUDA allocator. Call it before the first allocation."""
    if maps_memory(plan.config, plan.device):
        import torch

        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def choose_compiled_code_folders() -> None:
    """Set unset folder variables of PyTorch and Triton. ConfigError: Another user owns a folder."""
    # PyTorch would use /tmp/torchinductor_USER even if another user created it, and compiled code
    # runs as this user. The folder is local: machines with different CPUs often share home folders.
    local = Path(tempfile.gettempdir()) / f"eke-{os.geteuid()}"
    names = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    for variable, name in names.items():
        if given := os.environ.get(variable):
            try:
                make_private_dir(Path(given), private=True)
            except OSError as error:
                why = f"{error.strerror}. Compiled code in it would run as this user."
                fix = Fix(remark=f"export {variable}=FOLDER_OF_YOURS")
                raise ConfigError(Problem(variable, given, why, fix, "untrusted_file")) from error
            continue
        try:
            folder = make_private_dir(make_private_dir(local, private=True) / name, private=True)
        except OSError:  # another user has already created a file of this name
            folder = make_private_dir(cache_folder() / name, private=True)
        os.environ[variable] = str(folder)


def own_resident_bytes() -> int | None:
    """Return the current resident bytes, None without /proc."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return None


def prefer_for_oom_kill() -> None:
    """Make the kernel kill this process first when the machine runs out of memory (Linux)."""
    with contextlib.suppress(OSError):  # not Linux, or not permitted: no priority
        # The largest value of oom_score_adj, see proc(5). Raising it needs no privilege.
        Path("/proc/self/oom_score_adj").write_text("1000")


def seconds_since_start() -> float | None:
    """Return the seconds since this process was started, None without /proc."""
    try:
        fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
        started = float(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, ValueError, IndexError, AttributeError):  # not Linux
        return None
