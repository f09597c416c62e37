"""DeepSpeed's C++ operators, compiled at first use, and training state in files."""

import fcntl
import functools
import hashlib
import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from eke.common.files import make_private_dir, open_file
from eke.data.sources import cache_folder
from eke.hardware.cpu import cpu_name
from eke.hardware.fingerprint import installed_versions

_log = logging.getLogger(__name__)

ADAM, FILES = "DeepSpeed's Adam", "DeepSpeed's file operator"
"""Names of the operators: AdamW on the host, and training state on disk."""

FOLDER = "TORCH_EXTENSIONS_DIR"
"""torch's variable with the folder of all builds."""

Engine = Any
"""`deepspeed.DeepSpeedEngine`, which has no type annotations."""

_LEFT_OUT = "-g"
"""DeepSpeed's flag for debugging symbols, which take a third of the compile time."""

SAY_AFTER_S = 3.0
"""Seconds to load a compiled operator. A longer wait is logged."""


class BuildLock:
    """Build lock, released on exit. torch's `FileBaton` may wait forever (pytorch#189245)."""

    def __init__(self, lock_file_path: str, *_: object, **__: object) -> None:
        self.path = f"{lock_file_path}.turn"  # torch itself does not wait for this file

    def try_acquire(self) -> bool:
        """Wait for the lock and return True. Then only missing operators are built."""
        self._descriptor = open_file(Path(self.path), os.O_RDWR | os.O_CREAT)
        with suppress(OSError):  # the file system has no locks
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        return True

    def release(self) -> None:
        """Release the lock."""
        os.close(self._descriptor)


def _load_files() -> None:
    """Load the file operator. RuntimeError: libaio or a compiler is missing."""
    from deepspeed.ops.op_builder import AsyncIOBuilder, PinMemoryBuilder

    # The second would load the first without these flags, with all of DeepSpeed's.
    _load(FILES, PinMemoryBuilder(), AsyncIOBuilder())


def load_adam() -> None:
    """Load AdamW for the host. RuntimeError: a compiler is missing."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    _load(ADAM, CPUAdamBuilder())


def _without_symbols(builder: Any) -> list[str]:
    return [flag for flag in type(builder).cxx_args(builder) if flag != _LEFT_OUT]


def read_processor_once() -> None:
    """Keep py-cpuinfo's answer. Each call spins for a second, and DeepSpeed has several calls."""
    cpuinfo: Any = importlib.import_module("cpuinfo")
    if not hasattr(cpuinfo.get_cpu_info, "cache_info"):
        cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)


def _load(what: str, *builders: Any) -> None:
    read_processor_once()
    with compiling(what):
        for builder in builders:
            builder.cxx_args = functools.partial(_without_symbols, builder)
            builder.load(verbose=False)


@contextmanager
def compiling(what: str) -> Iterator[None]:
    """Set eke's build folder and lock, and log a message if the build takes long."""
    cpp_extension: Any = importlib.import_module("torch.utils.cpp_extension")
    folder = build_folder()
    make_private_dir(folder)
    words = "compiling %s in C++: minutes, at the first use on a machine (%s)"
    said = threading.Timer(SAY_AFTER_S, _log.info, (words, what, folder))
    said.daemon = True
    said.start()
    start = time.monotonic()
    try:
        with (
            patch.object(cpp_extension, "FileBaton", BuildLock),
            patch.dict(os.environ, {FOLDER: str(folder)}),
        ):
            yield
    finally:
        said.cancel()
    if (seconds := time.monotonic() - start) > SAY_AFTER_S:
        _log.info("%s was ready after %.0f s; no step's time has that in it", what, seconds)


def build_folder() -> Path:
    """Return the build folder, under TORCH_EXTENSIONS_DIR or in eke's cache."""
    versions = installed_versions(("torch", "deepspeed"))
    # ninja's rules contain the folder of the headers: two environments would overwrite each other.
    what = f"{cpu_name()} {versions} {_LEFT_OUT} {sys.prefix}"
    key = hashlib.sha256(what.encode()).hexdigest()[:12]
    given = os.environ.get(FOLDER)
    return (Path(given) if given else cache_folder() / "torch_extensions") / key


def prepare_swap(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Build the file operator, and return DeepSpeed's settings with this run's folder."""
    make_private_dir(folder)
    _load_files()
    zero = dict(settings["zero_optimization"])
    for key, value in zero.items():
        if isinstance(value, dict) and "nvme_path" in value:
            zero[key] = {**value, "nvme_path": str(folder)}
    return {**settings, "zero_optimization": zero}


def in_files(engine: Engine, piece: int) -> bool:
    """Return whether this shard and its moments are in files, and empty, between steps."""
    swappable = getattr(engine.optimizer, "_swappable_optimizer_subgroup", None)  # only in stage 3
    return swappable is not None and bool(swappable(piece))


@contextmanager
def in_memory(engine: Engine, piece: int, write: bool = False) -> Iterator[bool]:
    """Load a shard and its moments, yield whether they were in a file, and `write` them back."""
    if not in_files(engine, piece):
        yield False
        return
    engine.optimizer._optimizer_states_and_gradient_swap_in(piece)
    try:
        yield True
    finally:
        if write:
            engine.optimizer._optimizer_states_and_gradient_swap_out(piece)
        else:
            engine.optimizer._release_swap_buffers(piece)


def swap_buffers(engine: Engine) -> tuple[list[Any], list[Any]]:
    """Return the host buffers of optimizer state and of weights in files."""
    swapper = getattr(engine.optimizer, "optimizer_swapper", None)
    mine = list(swapper.swap_buffer_manager.all_buffers) if swapper is not None else []
    weights = (getattr(p, "nvme_swapper", None) for p in engine.module.parameters())
    reader = next((found for found in weights if found is not None), None)
    if reader is None:
        return mine, []
    back = reader.partitioned_swap_buffer
    return mine, [reader.buffers, *([back] if back is not None else [])]


def _main() -> int:
    """Compile all operators: `python -m eke.training.distributed.build_operators`."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    load_adam()
    if AsyncIOBuilder().is_compatible():
        _load_files()
    else:
        _log.info("%s is skipped: libaio.h is missing", FILES)
    return 0


if __name__ == "__main__":
    sys.exit(_main())
