"""Without the rules about training state on a disk: what really goes wrong."""

import subprocess
import sys
from pathlib import Path

import pytest

from eke.hardware import file_system
from eke.training.distributed.build_operators import prepare_swap

SHARED_MEMORY = Path("/dev/shm")

LOCK_1_MIB = """
import ctypes, os, resource
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
if os.geteuid() == 0:
    os.setuid(65534)  # root has no limit
libc = ctypes.CDLL(None, use_errno=True)
buffer = ctypes.create_string_buffer(1 << 20)
if libc.mlock(buffer, len(buffer)):
    raise OSError(ctypes.get_errno(), "cannot lock")
"""


def test_folder_below_a_file_cannot_be_created(tmp_path) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(NotADirectoryError):
        prepare_swap({"zero_optimization": {}}, tmp_path / "a.txt" / "disk")


def shared_bytes() -> int:
    """What Linux counts as memory of file systems in memory, and of what processes share."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("Shmem:"))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(
    not SHARED_MEMORY.is_dir() or file_system(SHARED_MEMORY) != "tmpfs",
    reason="Linux has a tmpfs here, some containers do not",
)
def test_file_in_a_tmpfs_takes_memory() -> None:
    size, before = 32 * 1024**2, shared_bytes()
    file = SHARED_MEMORY / f"eke-{id(before)}"
    try:
        file.write_bytes(bytes(size))
        assert shared_bytes() - before > size / 2  # other processes come and go
    finally:
        file.unlink()


def test_kernel_enforces_the_locked_memory_limit() -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-c", LOCK_1_MIB], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "cannot lock" in done.stderr


def test_deepspeed_compiles_against_libaio(tmp_path, monkeypatch) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("CC", "no-such-compiler")
    builder = AsyncIOBuilder()
    monkeypatch.setattr(builder, "has_function", lambda *_, **__: False)  # it found no io_submit
    with pytest.raises(RuntimeError, match="async_io op due to it not being compatible"):
        builder.jit_load(verbose=False)
