"""What other libraries say and nobody can act on, kept out of the log."""

import logging
import os
import warnings

from eke.plan.planner import Plan
from eke.training.model.imports import import_transformers

QUIET = {
    "KINETO_LOG_LEVEL": "99",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
}
"""torch's native code, its profiler above all, writes notes that mean nothing to users; bars
fill a log."""

TALKERS = {
    "torchao": logging.ERROR,  # 0.18: kernels built for other devices, triton, on every import
    "torch.utils._pytree": logging.ERROR,  # 2.13: how torchao 0.18 registers its enums
    "bitsandbytes": logging.ERROR,  # 0.50: that faster CPU kernels are in a package of their own
    "DeepSpeed": logging.ERROR,  # 0.19: that it runs on the CPU it was asked to run on
}
"""Logger -> the lowest level worth reading."""


def quiet_environment() -> None:
    """Before torch is imported: what its native code reads once."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)


def quiet_imports() -> None:
    """Before torch is imported, and with it whatever else is installed."""
    for name, level in TALKERS.items():
        logging.getLogger(name).setLevel(level)


def quiet_libraries(plan: Plan) -> None:
    """Keep progress bars and advice of other libraries out of the log."""
    if plan.device.kind == "cpu":
        # DeepSpeed looks for a device of its own where it is not told.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    quiet_imports()
    import_transformers()
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
