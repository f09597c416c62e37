"""Rules about DeepSpeed: ZeRO stages, training state in files, offloading."""

import functools
import os
import re
import resource
import shlex
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from eke.common.errors import Fix
from eke.common.paths import user_path
from eke.common.text import format_bytes
from eke.config.schema import Checkpointing, NvmeOffload, Switch, Weights, WeightsPlace
from eke.hardware import file_system
from eke.models.sizes import STAGE, SwapBytes, state_bytes, state_files
from eke.models.sizes.optimizers import AUTO, PIECES
from eke.rules.precision import is_narrow
from eke.rules.rule import Facts, Rule, instead_of, without_benefit, without_effect
from eke.rules.training import existing_parent

RECOMPUTES_FROZEN = (0, 19, 3)
"""DeepSpeed from which frozen weights can be recomputed under ZeRO-3; 0.19.2 fails.
Source: https://github.com/deepspeedai/DeepSpeed/pull/8148"""

VERSION = "deepspeed 0.19.8"

ROOMY_FRAC = 0.5
"""Share of the device's memory below which the training state leaves enough for a small batch."""


def is_zero(facts: Facts) -> bool:
    """Whether DeepSpeed shards the model."""
    return facts.distributed.option in STAGE


def offloads(facts: Facts) -> bool:
    """Whether anything is offloaded from the device's memory."""
    return facts.config.offload.option != "none"


def _whole(facts: Facts) -> int:
    """Bytes of the training state in one process without DeepSpeed."""
    return state_bytes(facts.config).total


def _installed() -> str:
    """Version of the package; the tested one where there is none."""
    try:
        return version("deepspeed")
    except PackageNotFoundError:
        return VERSION.split()[1]


def _loses_frozen_weights(facts: Facts) -> bool:
    config = facts.config
    frozen = config.peft.option != "none" or bool(config.model.freeze)
    frozen = frozen and config.distributed.option == "zero3"
    if facts.planning or not frozen or config.memory.checkpointing is Checkpointing.off:
        return False
    numbers = [int(n) for n in re.findall(r"\d+", _installed())[:3]]
    return tuple(numbers) < RECOMPUTES_FROZEN


IN_MEMORY = ("tmpfs", "ramfs")
"""File systems whose files are memory."""

REMOTE = ("nfs", "nfs4", "cifs", "smb3", "lustre", "beegfs", "gpfs", "ceph", "glusterfs", "9p",
          "fuse.sshfs", "afs", "orangefs", "panfs")  # fmt: skip
"""File systems behind a network, as /proc/mounts names them."""


def _offload(facts: Facts) -> NvmeOffload | None:
    """The settings, where state is to lie on a disk and DeepSpeed can put it there."""
    offload = facts.config.offload
    sharing = facts.distributed.option
    return offload if isinstance(offload, NvmeOffload) and sharing == "zero3" else None


def _is_here(facts: Facts) -> bool:
    """Whether the disk is this machine's: a plan may be for another one."""
    return _offload(facts) is not None and not facts.planning


def _folder(facts: Facts) -> Path:
    """The folder, or the nearest one above it that is there: it is made at the start."""
    offload = facts.config.offload
    assert isinstance(offload, NvmeOffload), "only called for offload=nvme"
    return existing_parent(user_path(offload.path))


def _kind(facts: Facts) -> str:
    return file_system(_folder(facts))


def _files(facts: Facts) -> SwapBytes:
    found = state_files(facts.config)
    assert found is not None, "only called with offload=nvme"
    return found


def _needed(facts: Facts) -> int:
    """Bytes of the files of all processes, which are on this machine."""
    return _files(facts).files * facts.distributed.num_processes


def lockable_bytes() -> int | None:
    """Memory that this process may lock; None where there is no limit (root has none)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY or os.geteuid() == 0 else soft


@functools.cache
def has_libaio_header(flags: str) -> bool:
    """Whether the compiler finds libaio.h with these CFLAGS: DeepSpeed compiles against it."""
    compiler = next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)
    if compiler is None:
        return False
    command = [compiler, *shlex.split(flags), "-E", "-x", "c++", "-", "-o", os.devnull]
    asked = "#include <libaio.h>\n"
    done = subprocess.run(command, input=asked, text=True, capture_output=True, check=False)
    return done.returncode == 0


def _instead(facts: Facts) -> Fix:
    """The next best place."""
    weights = facts.config.offload
    whole = isinstance(weights, NvmeOffload) and weights.weights is not WeightsPlace.device
    return Fix("offload=params_cpu") if whole else Fix("offload=optimizer_cpu")


OFFLOAD_DOCS = "https://www.deepspeed.ai/docs/config-json/#parameter-offloading"


def _stage(facts: Facts) -> Fix:
    """The lowest stage that can offload this, in the same number of processes."""
    zero = "zero2" if facts.config.offload.option == "optimizer_cpu" else "zero3"
    processes = facts.distributed.num_processes
    return Fix(f"distributed={zero}", f"distributed.num_processes={processes}")


RULES = (
    Rule(
        id="zero_needs_elementwise_optimizer",
        key="optimizer",
        when=lambda f: is_zero(f) and f.optimizer.fails_on_pieces,
        why=lambda f: f"under distributed={f.distributed.option}: {f.optimizer.fails_on_pieces}",
        fix=Fix("optimizer=adamw"),
        source="arXiv:1910.02054, section 5; notes/deepspeed.md",
        versions=VERSION,
    ),
    Rule(
        id="zero_keeps_masters",
        key="precision.master",
        when=lambda f: is_zero(f) and is_narrow(f) and f.config.precision.master is Switch.off,
        why=lambda f: (
            f"distributed={f.distributed.option} steps on float32 copies of its share of "
            "bfloat16 weights"
        ),
        fix=Fix("precision.master=auto"),
        source="notes/deepspeed.md",
        versions=VERSION,
    ),
    Rule(
        id="zero_rounds_adapters",
        key="precision.weights",
        when=lambda f: is_zero(f) and is_narrow(f) and f.config.peft.option != "none",
        why="DeepSpeed would make adapters bfloat16, too, which are float32 everywhere else",
        fix=instead_of(("bf16_pure",), "precision=bf16", "precision.weights=float32"),
        source="deepspeed.runtime.engine, _cast_module_mixed_precision",
        versions=VERSION,
    ),
    Rule(
        id="zero3_recomputes_frozen_weights",
        key="memory.checkpointing",
        when=_loses_frozen_weights,
        why=lambda f: (
            f"DeepSpeed {_installed()} empties frozen weights while they are recomputed; "
            f"{'.'.join(map(str, RECOMPUTES_FROZEN))} does not"
        ),
        fix=Fix(
            "memory.checkpointing=off", remark="or: pip install -U deepspeed; distributed=zero2"
        ),
        source="https://github.com/huggingface/transformers/issues/47254",
        versions="deepspeed before 0.19.3",
    ),
    Rule(
        id="zero_with_compile",
        key="compile",
        when=lambda f: is_zero(f) and f.config.compile.option != "none",
        why="DeepSpeed's engine would run the model as it is, uncompiled",
        fix=Fix("compile=none"),
        source="notes/deepspeed.md",
        versions=VERSION,
    ),
    without_benefit(
        id="zero_of_one",
        key="distributed",
        when=lambda f: is_zero(f) and f.distributed.num_processes == 1 and not offloads(f),
        why="one process has nothing to share with, and DeepSpeed keeps a float32 copy of the "
        "weights, 4 bytes a parameter more than distributed=none",
        fix=Fix("distributed=none", remark="or: offload=optimizer_cpu"),
        source="arXiv:1910.02054, section 5",
    ),
    without_benefit(
        id="deepspeed_not_needed",
        key="distributed",
        when=lambda f: (
            is_zero(f) and f.on_cuda and _whole(f) < ROOMY_FRAC * (f.device.memory_bytes or 0)
        ),
        why=lambda f: (
            f"the whole training state is {format_bytes(_whole(f))}; one {f.device.name} has "
            f"{format_bytes(f.device.memory_bytes or 0)}: what fits on one GPU only gets slower"
        ),
        fix=lambda f: Fix(
            "distributed=ddp" if f.distributed.num_processes > 1 else "distributed=none",
            *(("offload=none",) if offloads(f) else ()),
        ),
        source="https://huggingface.co/docs/transformers/v4.25.1/en/perf_train_gpu_one#deepspeed-zero",
        sized=True,
    ),
    without_effect(
        id="zero_knows_no_embeddings",
        key="optimizer.embeddings_32bit",
        when=lambda f: (
            STAGE.get(f.distributed.option) in (1, 2)
            and f.config.offload.option == "none"
            and getattr(f.config.optimizer, "embeddings_32bit", False)
        ),
        why=f"{PIECES}, none of which is known as an embedding: all moments have 8 bits",
        fix=Fix("optimizer.embeddings_32bit=false", remark="says what happens; or distributed=ddp"),
        source="https://huggingface.co/docs/bitsandbytes/optimizers",
        versions=VERSION,
    ),
    without_effect(
        id="ds_config_without_zero",
        key="distributed.deepspeed_config",
        when=lambda f: f.distributed.deepspeed_config is not None and not is_zero(f),
        why=lambda f: f"distributed={f.distributed.option} does not use DeepSpeed",
        fix=Fix("distributed.deepspeed_config=null", remark="or: distributed=zero2"),
        source="https://www.deepspeed.ai/docs/config-json",
    ),
    Rule(
        id="cpu_adam_needs_compiler",
        key="optimizer",
        # The plan's choice is DeepSpeed's AdamW for the host.
        when=lambda f: (
            not f.planning
            and is_zero(f)
            and offloads(f)
            and f.optimizer.implementation == AUTO
            and shutil.which("g++") is None
        ),
        why="DeepSpeed compiles its Adam for the host at first use; there is no g++ here",
        fix=Fix("optimizer.implementation=fused", remark="torch's own; or install g++"),
        source="https://www.deepspeed.ai/tutorials/advanced-install",
        versions=VERSION,
    ),
    Rule(
        id="offload_needs_zero",
        key="offload",
        when=lambda f: offloads(f) and not is_zero(f),
        why=lambda f: (
            f"it is DeepSpeed's; distributed={f.distributed.option} trains without DeepSpeed"
        ),
        fix=_stage,
        source=OFFLOAD_DOCS,
    ),
    Rule(
        id="offload_needs_zero3",
        key="offload",
        when=lambda f: (
            f.distributed.option in ("zero1", "zero2")
            and f.config.offload.option in ("params_cpu", "nvme")
        ),
        why=lambda f: (
            f"needs state that is cut by weight, as stage 3 has it; "
            f"{f.distributed.option} is stage {STAGE[f.distributed.option]}"
            + (
                ", and would silently keep it in host memory"
                if f.config.offload.option == "nvme"
                else ""
            )
        ),
        fix=Fix("distributed=zero3"),
        source=OFFLOAD_DOCS,
        versions=VERSION,
    ),
    without_effect(
        id="offload_on_cpu",
        key="offload",
        when=lambda f: (
            is_zero(f) and offloads(f) and f.on_cpu and f.config.offload.option != "nvme"
        ),
        why="the device is the host: what would leave the device's memory stays in it",
        fix=Fix("offload=none"),
        source="arXiv:2101.06840",
    ),
    Rule(
        id="nvme_holds_plain_state",
        key="offload",
        when=lambda f: (
            _offload(f)
            and (
                f.config.precision.weights is not Weights.float32
                or not f.optimizer.returns_from_files
            )
        ),
        why="brings back the moments of float32 weights, by AdamW, Lion or SGD, and not the scales "
        "of 8-bit states or float32 copies of narrower weights",
        fix=_instead,
        source="tests/equivalence/test_nvme.py",
        versions=VERSION,
    ),
    Rule(
        id="nvme_weights_stay_in_memory",
        key="offload.weights",
        when=lambda f: (offload := _offload(f)) and offload.weights is WeightsPlace.disk,
        why="with some models DeepSpeed fails in the first training step after an evaluation: a "
        "weight that was read ahead is read again (param already assigned swap buffer id)",
        fix=Fix("offload.weights=host"),
        source="tests/equivalence/test_nvme.py",
        versions=VERSION,
    ),
    Rule(
        id="nvme_folder_writable",
        key="offload.path",
        when=lambda f: (
            _is_here(f) and not (_folder(f).is_dir() and os.access(_folder(f), os.W_OK | os.X_OK))
        ),
        why=lambda f: (
            f"{_folder(f)} cannot be written" if _folder(f).is_dir() else f"{_folder(f)} is a file"
        ),
        fix=Fix("offload.path=FOLDER", remark="on a local disk"),
        source="https://www.deepspeed.ai/docs/config-json/#asynchronous-io",
    ),
    Rule(
        id="nvme_folder_is_a_disk",
        key="offload.path",
        when=lambda f: _is_here(f) and _kind(f) in IN_MEMORY,
        why=lambda f: f"lies in a {_kind(f)}, which is host memory: nothing would leave it",
        fix=_instead,
        source="https://www.kernel.org/doc/html/latest/filesystems/tmpfs.html",
    ),
    without_benefit(
        id="nvme_folder_is_local",
        key="offload.path",
        when=lambda f: _is_here(f) and _kind(f) in REMOTE,
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
        key="offload.path",
        when=lambda f: _is_here(f) and _needed(f) > shutil.disk_usage(_folder(f)).free,
        why=lambda f: (
            f"needs {format_bytes(_needed(f))} for the training state; the disk has "
            f"{format_bytes(shutil.disk_usage(_folder(f)).free)} free"
        ),
        fix=Fix("offload.path=FOLDER", remark="on a larger disk"),
        source="models/sizes/state.py",
        versions=VERSION,
        sized=True,
    ),
    without_effect(
        id="nvme_state_is_large",
        key="offload",
        when=lambda f: _offload(f) and _files(f).files == 0,
        why="no part of the state reaches the 1 MiB, or the offload.block_bytes, from which on "
        "DeepSpeed writes to a disk",
        fix=_instead,
        source="deepspeed.runtime.swap_tensor.utils, MIN_AIO_BYTES",
        versions=VERSION,
        sized=True,
    ),
    Rule(
        id="nvme_buffers_are_locked",
        key="offload.piece_numbers",
        when=lambda f: (
            _is_here(f) and (limit := lockable_bytes()) is not None and _files(f).pinned > limit
        ),
        value=lambda f: getattr(f.config.offload, "piece_numbers", ""),
        why=lambda f: (
            f"{format_bytes(_files(f).pinned)} of buffers must be locked in memory; this process "
            f"may lock {format_bytes(lockable_bytes() or 0)} (ulimit -l)"
        ),
        fix=Fix(remark="ulimit -l unlimited   (in the shell, or by the machine's administrator)"),
        source="deepspeed csrc/pin_memory/page_alloc.cpp: mlock",
        versions=VERSION,
        sized=True,
    ),
    Rule(
        id="nvme_needs_libaio",
        key="offload",
        when=lambda f: _is_here(f) and not has_libaio_header(os.environ.get("CFLAGS", "")),
        why="DeepSpeed's async_io is compiled against libaio, at its first use on a machine; "
        "libaio.h or a C++ compiler is missing",
        fix=lambda f: Fix(*_instead(f).words, remark="or: apt-get install libaio-dev g++"),
        source="https://www.deepspeed.ai/tutorials/advanced-install",
        versions=VERSION,
    ),
)
