"""Rules about training state in files: the folder, its disk, and what writes it."""

import functools
import os
import resource
import shlex
import shutil
import subprocess
from pathlib import Path

from eke.common.paths import user_path
from eke.common.units import format_bytes
from eke.config.schema import NvmeOffload, Weights, WeightsPlace
from eke.hardware import file_system
from eke.models.sizes import SwapBytes, describe, state_files
from eke.rules.deepspeed import VERSION
from eke.rules.rule import Facts, Rule, Verdict
from eke.rules.training import existing_parent

DOCS = "https://www.deepspeed.ai/docs/config-json/#asynchronous-io"

IN_MEMORY = ("tmpfs", "ramfs")
"""File systems whose files are memory."""

REMOTE = ("nfs", "nfs4", "cifs", "smb3", "lustre", "beegfs", "gpfs", "ceph", "glusterfs", "9p",
          "fuse.sshfs", "afs", "orangefs", "panfs")  # fmt: skip
"""File systems behind a network, as /proc/mounts names them."""

APT = "apt-get install libaio-dev"


def _offload(facts: Facts) -> NvmeOffload | None:
    """The settings, where state is to lie on a disk and DeepSpeed can put it there."""
    offload = facts.config.offload
    sharing = facts.config.distributed.option
    return offload if isinstance(offload, NvmeOffload) and sharing == "zero3" else None


def _is_here(facts: Facts) -> bool:
    """Whether the disk is this machine's: a plan may be for another one."""
    return _offload(facts) is not None and not facts.planning


def _folder(facts: Facts) -> Path:
    """The folder, or the nearest one above it that is there: it is made at the start."""
    offload = facts.config.offload
    assert isinstance(offload, NvmeOffload), "asked for a folder that nobody named"
    return existing_parent(user_path(offload.path))


def _path(facts: Facts) -> str:
    return getattr(facts.config.offload, "path", "")


def _unwritable(facts: Facts) -> bool:
    if not _is_here(facts):
        return False
    folder = _folder(facts)
    return not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK))


def _kind(facts: Facts) -> str:
    return file_system(_folder(facts))


def _files(facts: Facts) -> SwapBytes:
    found = state_files(facts.config)
    assert found is not None, "asked for files where there are none"
    return found


def _needed(facts: Facts) -> int:
    """Bytes of the files of all processes, which are on this machine."""
    return _files(facts).files * facts.config.distributed.num_processes


def _pinned(facts: Facts) -> int:
    return _files(facts).pinned


def lockable_bytes() -> int | None:
    """Memory that this process may lock; None where there is no limit (root has none)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY or os.geteuid() == 0 else soft


def _cannot_lock(facts: Facts) -> bool:
    limit = lockable_bytes()
    return _is_here(facts) and limit is not None and _pinned(facts) > limit


@functools.cache
def has_libaio_header(flags: str) -> bool:
    """Whether the compiler finds libaio.h: DeepSpeed compiles against it at every start.

    Args:
        flags: CFLAGS, where a library in an unusual place is named.
    """
    compiler = next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)
    if compiler is None:
        return False
    command = [compiler, *shlex.split(flags), "-E", "-x", "c++", "-", "-o", os.devnull]
    asked = "#include <libaio.h>\n"
    done = subprocess.run(command, input=asked, text=True, capture_output=True, check=False)
    return done.returncode == 0


def _lacks_libaio(facts: Facts) -> bool:
    return _is_here(facts) and not has_libaio_header(os.environ.get("CFLAGS", ""))


def _instead(facts: Facts) -> str:
    """The next best place."""
    weights = facts.config.offload
    whole = isinstance(weights, NvmeOffload) and weights.weights is not WeightsPlace.device
    return "offload=params_cpu" if whole else "offload=optimizer_cpu"


def _is_plain(facts: Facts) -> bool:
    """Whether all of the state comes back from files: float32 weights, moments of their shape."""
    config = facts.config
    returns = describe(config.optimizer).returns_from_files
    return config.precision.weights is Weights.float32 and returns


def _weights_on_disk(facts: Facts) -> bool:
    offload = _offload(facts)
    return offload is not None and offload.weights is WeightsPlace.disk


RULES = (
    Rule(
        id="nvme_holds_plain_state",
        verdict=Verdict.impossible,
        path="offload",
        when=lambda f: _offload(f) is not None and not _is_plain(f),
        value=lambda f: f.config.offload.option,
        why=lambda f: (
            "brings back the moments of float32 weights, by AdamW, Lion or SGD, and not the scales "
            "of 8-bit states or float32 copies of narrower weights"
        ),
        fix=_instead,
        source="tests/equivalence/test_nvme.py",
        versions=VERSION,
    ),
    Rule(
        id="nvme_weights_stay_in_memory",
        verdict=Verdict.impossible,
        path="offload.weights",
        when=_weights_on_disk,
        value=lambda f: WeightsPlace.disk.value,
        why=lambda f: (
            "with some models DeepSpeed fails in the first training step after an evaluation: a "
            "weight that was read ahead is read again (param already assigned swap buffer id)"
        ),
        fix=lambda f: "offload.weights=host",
        source="tests/equivalence/test_nvme.py",
        versions=VERSION,
    ),
    Rule(
        id="nvme_folder_writable",
        verdict=Verdict.impossible,
        path="offload.path",
        when=_unwritable,
        value=_path,
        why=lambda f: (
            f"{_folder(f)} cannot be written" if _folder(f).is_dir() else f"{_folder(f)} is a file"
        ),
        fix=lambda f: "offload.path=FOLDER   (on a local disk)",
        source=DOCS,
    ),
    Rule(
        id="nvme_folder_is_a_disk",
        verdict=Verdict.impossible,
        path="offload.path",
        when=lambda f: _is_here(f) and _kind(f) in IN_MEMORY,
        value=_path,
        why=lambda f: f"lies in a {_kind(f)}, which is host memory: nothing would leave it",
        fix=_instead,
        source="https://www.kernel.org/doc/html/latest/filesystems/tmpfs.html",
    ),
    Rule(
        id="nvme_folder_is_local",
        verdict=Verdict.no_benefit,
        path="offload.path",
        when=lambda f: _is_here(f) and _kind(f) in REMOTE,
        value=_path,
        why=lambda f: (
            f"lies behind a network ({_kind(f)}): every step reads and writes "
            f"{format_bytes(_files(f).files)} there for each process"
        ),
        fix=_instead,
        source="arXiv:2104.07857, section 5.2",
        sized=True,
    ),
    Rule(
        id="nvme_has_space",
        verdict=Verdict.impossible,
        path="offload.path",
        when=lambda f: _is_here(f) and _needed(f) > shutil.disk_usage(_folder(f)).free,
        value=_path,
        why=lambda f: (
            f"needs {format_bytes(_needed(f))} for the training state; the disk has "
            f"{format_bytes(shutil.disk_usage(_folder(f)).free)} free"
        ),
        fix=lambda f: "offload.path=FOLDER   (on a larger disk)",
        source="models/sizes/swapping.py",
        versions=VERSION,
        sized=True,
    ),
    Rule(
        id="nvme_state_is_large",
        verdict=Verdict.no_effect,
        path="offload",
        when=lambda f: _offload(f) is not None and _files(f).files == 0,
        value=lambda f: f.config.offload.option,
        why=lambda f: (
            "no part of the state reaches the 1 MiB, or the offload.block_bytes, from which on "
            "DeepSpeed writes to a disk"
        ),
        fix=_instead,
        source="deepspeed.runtime.swap_tensor.utils, MIN_AIO_BYTES",
        versions=VERSION,
        sized=True,
    ),
    Rule(
        id="nvme_buffers_are_locked",
        verdict=Verdict.impossible,
        path="offload.piece_numbers",
        when=_cannot_lock,
        value=lambda f: getattr(f.config.offload, "piece_numbers", ""),
        why=lambda f: (
            f"{format_bytes(_pinned(f))} of buffers must be locked in memory; this process may "
            f"lock {format_bytes(lockable_bytes() or 0)} (ulimit -l)"
        ),
        fix=lambda f: "ulimit -l unlimited   (in the shell, or by the machine's administrator)",
        source="deepspeed csrc/pin_memory/page_alloc.cpp: mlock",
        versions=VERSION,
        sized=True,
    ),
    Rule(
        id="nvme_needs_libaio",
        verdict=Verdict.impossible,
        path="offload",
        when=_lacks_libaio,
        value=lambda f: f.config.offload.option,
        why=lambda f: (
            "DeepSpeed's async_io is compiled against libaio, at its first use on a machine; "
            "libaio.h or a C++ compiler is missing"
        ),
        fix=lambda f: f"{_instead(f)}   (or: {APT} g++)",
        source="https://www.deepspeed.ai/tutorials/advanced-install",
        versions=VERSION,
    ),
)
