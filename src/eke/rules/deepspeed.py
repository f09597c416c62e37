"""Rules about DeepSpeed: ZeRO stages, state in files, offloading."""

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
from eke.config.schema import AutoBool, Checkpointing, NvmeOffload, Weights, WeightsPlace
from eke.hardware import file_system
from eke.models.sizes import STAGE, SwapBytes, state_bytes, state_files
from eke.models.sizes.optimizers import AUTO, ZERO_FLAT_SHARDS_REASON
from eke.rules.precision import stores_bf16
from eke.rules.rule import Rule, RuleInputs, Severity, instead_of, without_benefit, without_effect
from eke.rules.training import existing_parent

_RECOMPUTES_FROZEN = (0, 19, 3)
"""First DeepSpeed that recomputes frozen weights correctly under ZeRO-3. 0.19.2 fails.
Source: https://github.com/deepspeedai/DeepSpeed/pull/8148"""

_VERSION = "deepspeed 0.19.8"

_ROOMY_FRAC = 0.5
"""Share of device memory below which the training state leaves enough for a small batch."""


def _is_zero(facts: RuleInputs) -> bool:
    return facts.distributed.option in STAGE


def _unsharded(facts: RuleInputs) -> int:
    """Return the bytes of training state in one process without DeepSpeed."""
    return state_bytes(facts.config).total


def _installed() -> str:
    """Return the installed version, or the tested version if there is none."""
    try:
        return version("deepspeed")
    except PackageNotFoundError:
        return _VERSION.split()[1]


def _loses_frozen_weights(facts: RuleInputs) -> bool:
    config = facts.config
    frozen = config.peft.option != "none" or bool(config.model.freeze)
    frozen = frozen and config.distributed.option == "zero3"
    if facts.planning or not frozen or config.memory.checkpointing is Checkpointing.off:
        return False
    numbers = [int(n) for n in re.findall(r"\d+", _installed())[:3]]
    return tuple(numbers) < _RECOMPUTES_FROZEN


_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "lustre", "beegfs", "gpfs", "ceph", "glusterfs", "9p",
          "fuse.sshfs", "afs", "orangefs", "panfs")  # fmt: skip
"""Network file systems, as named in /proc/mounts."""


def _offload(facts: RuleInputs) -> NvmeOffload | None:
    """Return the settings for offloading to a disk, None if DeepSpeed cannot do it."""
    offload = facts.config.offload
    sharing = facts.distributed.option
    return offload if isinstance(offload, NvmeOffload) and sharing == "zero3" else None


def _is_local(facts: RuleInputs) -> bool:
    """Return whether the disk is on this machine. A plan may be for another one."""
    return _offload(facts) is not None and not facts.planning


def _folder(facts: RuleInputs) -> Path:
    """Return the folder or its nearest existing parent. The run creates the rest."""
    offload = facts.config.offload
    assert isinstance(offload, NvmeOffload), "only called for offload=nvme"
    return existing_parent(user_path(offload.path))


def _kind(facts: RuleInputs) -> str:
    return file_system(_folder(facts))


def _files(facts: RuleInputs) -> SwapBytes:
    found = state_files(facts.config)
    assert found is not None, "only called with offload=nvme"
    return found


def _needed(facts: RuleInputs) -> int:
    """Return the bytes of the files of all processes on this machine."""
    return _files(facts).files * facts.distributed.num_processes


def _lockable_bytes() -> int | None:
    """Return the bytes that this process may lock, None if unlimited (root)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY or os.geteuid() == 0 else soft


@functools.cache
def has_libaio_header(flags: str) -> bool:
    """Return whether the compiler finds libaio.h, which DeepSpeed compiles against."""
    compiler = next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)
    if compiler is None:
        return False
    command = [compiler, *shlex.split(flags), "-E", "-x", "c++", "-", "-o", os.devnull]
    code = "#include <libaio.h>\n"
    done = subprocess.run(command, input=code, text=True, capture_output=True, check=False)
    return done.returncode == 0


def _next_best(facts: RuleInputs) -> Fix:
    """Return the next best place for the state."""
    weights = facts.config.offload
    whole = isinstance(weights, NvmeOffload) and weights.weights is not WeightsPlace.device
    return Fix("offload=params_cpu") if whole else Fix("offload=optimizer_cpu")


_OFFLOAD_DOCS = "https://www.deepspeed.ai/docs/config-json/#parameter-offloading"


def _stage(facts: RuleInputs) -> Fix:
    """Return the lowest stage that can offload this, with the same number of processes."""
    zero = "zero2" if facts.config.offload.option == "optimizer_cpu" else "zero3"
    processes = facts.distributed.num_processes
    return Fix(f"distributed={zero}", f"distributed.num_processes={processes}")


_deepspeed_rule = functools.partial(Rule, versions=_VERSION)

RULES = dict(
    zero_needs_elementwise_optimizer=_deepspeed_rule(
        key="optimizer",
        when=lambda f: _is_zero(f) and f.optimizer.fails_on_zero,
        why=lambda f: f"under distributed={f.distributed.option}: {f.optimizer.fails_on_zero}",
        source="arXiv:1910.02054, section 5, and notes/deepspeed.md",
    ),
    zero_keeps_masters=_deepspeed_rule(
        key="precision.master",
        when=lambda f: _is_zero(f) and stores_bf16(f) and f.config.precision.master is AutoBool.off,
        why=lambda f: f"distributed={f.distributed.option} always keeps float32 copies of weights",
        source="notes/deepspeed.md",
    ),
    zero_rounds_adapters=_deepspeed_rule(
        key="precision.weights",
        when=lambda f: _is_zero(f) and stores_bf16(f) and f.config.peft.option != "none",
        why="DeepSpeed would round adapters to bfloat16. All other strategies keep float32",
        fix=instead_of(("bf16_pure",), "precision=bf16", "precision.weights=float32"),
        source="deepspeed.runtime.engine, _cast_module_mixed_precision",
    ),
    zero3_recomputes_frozen_weights=Rule(
        key="memory.checkpointing",
        when=_loses_frozen_weights,
        why=lambda f: (
            f"DeepSpeed {_installed()} empties frozen weights during recomputation. "
            f"{'.'.join(map(str, _RECOMPUTES_FROZEN))} fixes it"
        ),
        fix=Fix(
            "memory.checkpointing=off", remark="or: pip install -U deepspeed, or distributed=zero2"
        ),
        source="https://github.com/huggingface/transformers/issues/47254",
        versions="deepspeed before 0.19.3",
    ),
    zero_with_compile=_deepspeed_rule(
        key="compile",
        when=lambda f: _is_zero(f) and f.config.compile.option != "none",
        why="DeepSpeed's engine would run the uncompiled model",
        source="notes/deepspeed.md",
    ),
    zero_of_one=without_benefit(
        key="distributed",
        when=lambda f: (
            _is_zero(f) and f.distributed.num_processes == 1 and not f.config.offload.is_on
        ),
        why="one process has nothing to shard. DeepSpeed adds a float32 copy of the weights "
        "(4 bytes per parameter)",
        fix=Fix("distributed=none", remark="or: offload=optimizer_cpu"),
        source="arXiv:1910.02054, section 5",
    ),
    deepspeed_not_needed=without_benefit(
        key="distributed",
        when=lambda f: (
            _is_zero(f) and f.on_cuda and _unsharded(f) < _ROOMY_FRAC * (f.device.memory_bytes or 0)
        ),
        why=lambda f: (
            f"{format_bytes(_unsharded(f))} of training state fits on one {f.device.name} "
            f"({format_bytes(f.device.memory_bytes or 0)}). Sharding only makes it slower"
        ),
        fix=lambda f: Fix(
            "distributed=ddp" if f.distributed.num_processes > 1 else "distributed=none",
            *(("offload=none",) if f.config.offload.is_on else ()),
        ),
        source="https://huggingface.co/docs/transformers/v4.25.1/en/perf_train_gpu_one#deepspeed-zero",
        sized=True,
    ),
    zero_knows_no_embeddings=Rule(
        verdict=Severity.no_effect,
        key="optimizer.embeddings_32bit",
        when=lambda f: (
            STAGE.get(f.distributed.option) in (1, 2)
            and f.config.offload.option == "none"
            and getattr(f.config.optimizer, "embeddings_32bit", False)
        ),
        why=f"{ZERO_FLAT_SHARDS_REASON}, so embeddings are not recognised: all moments have 8 bits",
        fix=Fix("optimizer.embeddings_32bit=false", remark="or distributed=ddp"),
        source="https://huggingface.co/docs/bitsandbytes/optimizers",
        versions=_VERSION,
    ),
    ds_config_without_zero=without_effect(
        key="distributed.deepspeed_config",
        when=lambda f: not _is_zero(f),
        why=lambda f: f"distributed={f.distributed.option} does not use DeepSpeed",
        fix=Fix("distributed.deepspeed_config=null", remark="or: distributed=zero2"),
        source="https://www.deepspeed.ai/docs/config-json",
    ),
    cpu_adam_needs_compiler=_deepspeed_rule(
        key="optimizer",
        # In a plan the implementation is DeepSpeed's AdamW for the host.
        when=lambda f: (
            not f.planning
            and _is_zero(f)
            and f.config.offload.is_on
            and f.optimizer.implementation == AUTO
            and shutil.which("g++") is None
        ),
        why="DeepSpeed compiles its host Adam at first use. g++ is not installed",
        fix=Fix("optimizer.implementation=fused", remark="torch's own, or install g++"),
        source="https://www.deepspeed.ai/tutorials/advanced-install",
    ),
    offload_needs_zero=Rule(
        key="offload",
        when=lambda f: f.config.offload.is_on and not _is_zero(f),
        why=lambda f: f"needs DeepSpeed. distributed={f.distributed.option} does not use it",
        fix=_stage,
        source=_OFFLOAD_DOCS,
    ),
    offload_needs_zero3=_deepspeed_rule(
        key="offload",
        when=lambda f: (
            f.distributed.option in ("zero1", "zero2")
            and f.config.offload.option in ("params_cpu", "nvme")
        ),
        why=lambda f: (
            f"needs ZeRO stage 3. {f.distributed.option} is stage {STAGE[f.distributed.option]}"
            + " and would keep state in host memory" * (f.config.offload.option == "nvme")
        ),
        fix=Fix("distributed=zero3"),
        source=_OFFLOAD_DOCS,
    ),
    offload_on_cpu=without_effect(
        key="offload",
        when=lambda f: _is_zero(f) and f.on_cpu and f.config.offload.option != "nvme",
        why="the device is the CPU. Its memory is host memory",
        source="arXiv:2101.06840",
    ),
    nvme_holds_plain_state=_deepspeed_rule(
        key="offload",
        when=lambda f: (
            _offload(f)
            and (
                f.config.precision.weights is not Weights.float32
                or not f.optimizer.returns_from_files
            )
        ),
        why="supports float32 weights with AdamW, Lion or SGD, not scales of 8-bit states or "
        "float32 copies",
        fix=_next_best,
        source="tests/equivalence/test_nvme.py",
    ),
    nvme_weights_stay_in_memory=_deepspeed_rule(
        key="offload.weights",
        when=lambda f: (offload := _offload(f)) and offload.weights is WeightsPlace.disk,
        why="with some models DeepSpeed fails in the first step after an evaluation "
        "(param already assigned swap buffer id)",
        fix=Fix("offload.weights=host"),
        source="tests/equivalence/test_nvme.py",
    ),
    nvme_folder_writable=Rule(
        key="offload.path",
        when=lambda f: (
            _is_local(f) and not (_folder(f).is_dir() and os.access(_folder(f), os.W_OK | os.X_OK))
        ),
        why=lambda f: f"{_folder(f)} {'is not writable' if _folder(f).is_dir() else 'is a file'}",
        fix=Fix("offload.path=FOLDER", remark="on a local disk"),
        source="https://www.deepspeed.ai/docs/config-json/#asynchronous-io",
    ),
    nvme_folder_is_a_disk=Rule(
        key="offload.path",
        when=lambda f: _is_local(f) and _kind(f) in ("tmpfs", "ramfs"),
        why=lambda f: f"is in a {_kind(f)}, which is host memory",
        fix=_next_best,
        source="https://www.kernel.org/doc/html/latest/filesystems/tmpfs.html",
    ),
    nvme_folder_is_local=without_benefit(
        key="offload.path",
        when=lambda f: _is_local(f) and _kind(f) in _REMOTE,
        why=lambda f: (
            f"is on a network file system ({_kind(f)}). Each process transfers "
            f"{format_bytes(_files(f).files)} per step"
        ),
        fix=_next_best,
        source="arXiv:2104.07857, section 5.2",
        sized=True,
    ),
    nvme_has_space=_deepspeed_rule(
        key="offload.path",
        when=lambda f: _is_local(f) and _needed(f) > shutil.disk_usage(_folder(f)).free,
        why=lambda f: (
            f"needs {format_bytes(_needed(f))}, "
            f"{format_bytes(shutil.disk_usage(_folder(f)).free)} free"
        ),
        fix=Fix("offload.path=FOLDER", remark="on a larger disk"),
        source="models/sizes/state.py",
        sized=True,
    ),
    nvme_state_is_large=without_effect(
        key="offload",
        when=lambda f: _offload(f) and _files(f).files == 0,
        why="no tensor reaches the minimum size for disk (1 MiB, or offload.block_bytes)",
        fix=_next_best,
        source="deepspeed.runtime.swap_tensor.utils, MIN_AIO_BYTES",
        versions=_VERSION,
        sized=True,
    ),
    nvme_buffers_are_locked=_deepspeed_rule(
        key="offload.piece_numbers",
        when=lambda f: (
            _is_local(f) and (limit := _lockable_bytes()) is not None and _files(f).pinned > limit
        ),
        why=lambda f: (
            f"needs {format_bytes(_files(f).pinned)} of locked memory. The limit is "
            f"{format_bytes(_lockable_bytes() or 0)} (ulimit -l)"
        ),
        fix=Fix(remark="ulimit -l unlimited   (in the shell, or by the machine's administrator)"),
        source="deepspeed csrc/pin_memory/page_alloc.cpp: mlock",
        sized=True,
    ),
    nvme_needs_libaio=_deepspeed_rule(
        key="offload",
        when=lambda f: _is_local(f) and not has_libaio_header(os.environ.get("CFLAGS", "")),
        why="DeepSpeed compiles async_io at first use. libaio.h or a C++ compiler is missing",
        fix=lambda f: Fix(*_next_best(f).words, remark="or: apt-get install libaio-dev g++"),
        source="https://www.deepspeed.ai/tutorials/advanced-install",
    ),
)
