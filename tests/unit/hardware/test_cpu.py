"""Memory limits and names as Linux writes them, from files made up for the test."""

from pathlib import Path

import pytest

from eke.hardware.cpu import bfloat16_units, cpu_device, cpu_name, memory_available, memory_limit

GIB = 2**30


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def limit(tmp_path, monkeypatch):
    """`limit(cgroup_lines, {file: text})` on a machine with 64 GiB."""
    monkeypatch.setattr("eke.hardware.cpu._physical", lambda: 64 * GIB)

    def measure(lines: str, files: dict[str, str]) -> int | None:
        write(tmp_path / "proc/self/cgroup", lines)
        for name, text in files.items():
            write(tmp_path / "cgroup" / name, text)
        return memory_limit(tmp_path / "proc", tmp_path / "cgroup")

    return measure


@pytest.mark.parametrize(
    ("lines", "files", "gib"),
    [
        pytest.param("0::/job\n", {"job/memory.max": "max\n"}, 64, id="v2-unlimited"),
        pytest.param("0::/job\n", {"job/memory.max": f"{8 * GIB}\n"}, 8, id="v2"),
        pytest.param(
            "0::/slurm/job/step\n",
            {"slurm/job/memory.max": f"{4 * GIB}\n", "slurm/job/step/memory.max": "max\n"},
            4,
            id="v2-ancestor-is-tighter",
        ),
        pytest.param("0::/\n", {"memory.max": f"{2 * GIB}\n"}, 2, id="v2-container-root"),
        pytest.param("0::/gone\n", {"memory.max": f"{2 * GIB}\n"}, 2, id="v2-host-path"),
        pytest.param(
            "4:memory:/docker/x\n",
            {"memory/docker/x/memory.limit_in_bytes": f"{16 * GIB}\n"},
            16,
            id="v1",
        ),
        pytest.param(
            "5:cpu,memory:/x\n",
            {"memory/x/memory.limit_in_bytes": f"{7 * GIB}\n"},
            7,
            id="v1-controllers-together",
        ),
        pytest.param(
            "4:memory:/\n",
            {"memory/memory.limit_in_bytes": "9223372036854771712\n"},
            64,
            id="v1-unlimited",
        ),
        pytest.param(
            "4:memory:/a\n0::/b\n",
            {
                "memory/a/memory.limit_in_bytes": f"{6 * GIB}\n",
                "unified/b/memory.max": f"{5 * GIB}\n",
            },
            5,
            id="hybrid",
        ),
        pytest.param("0::/job\n", {"job/memory.max": f"{128 * GIB}\n"}, 64, id="above-physical"),
        pytest.param("nonsense\n", {}, 64, id="unreadable"),
    ],
)
def test_memory_is_the_tightest_limit(limit, lines, files, gib):
    assert limit(lines, files) == gib * GIB


@pytest.mark.parametrize("physical", [3 * GIB, None])
def test_missing_proc_uses_machine_memory_or_unknown(physical, tmp_path, monkeypatch):
    monkeypatch.setattr("eke.hardware.cpu._physical", lambda: physical)
    assert memory_limit(tmp_path, tmp_path) == physical


@pytest.fixture
def left(tmp_path):
    """`left(cgroup_lines, {file: text})` on a machine of which 10 GiB are available."""

    def measure(lines: str, files: dict[str, str]) -> int | None:
        write(tmp_path / "proc/meminfo", f"MemFree: 5 kB\nMemAvailable: {10 * GIB // 1024} kB\n")
        write(tmp_path / "proc/self/cgroup", lines)
        for name, text in files.items():
            write(tmp_path / "cgroup" / name, text)
        return memory_available(tmp_path / "proc", tmp_path / "cgroup")

    return measure


@pytest.mark.parametrize(
    ("lines", "files", "gib"),
    [
        pytest.param("0::/job\n", {"job/memory.max": "max\n"}, 10, id="the-machine"),
        pytest.param(
            "0::/job\n",
            {
                "job/memory.max": f"{8 * GIB}\n",
                "job/memory.current": f"{6 * GIB}\n",
                "job/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            },
            3,
            id="v2-files-can-be-taken-back",
        ),
        pytest.param(
            "4:memory:/x\n",
            {
                "memory/x/memory.limit_in_bytes": f"{7 * GIB}\n",
                "memory/x/memory.usage_in_bytes": f"{5 * GIB}\n",
                "memory/x/memory.stat": "inactive_file 9\ntotal_inactive_file 0\n",
            },
            2,
            id="v1",
        ),
        pytest.param(
            "0::/job/step\n",
            {
                "job/memory.max": f"{4 * GIB}\n",
                "job/memory.current": f"{4 * GIB}\n",
                "job/memory.stat": "inactive_file 0\n",
                "job/step/memory.max": "max\n",
            },
            0,
            id="v2-ancestor-is-full",
        ),
        pytest.param(
            "0::/job\n", {"job/memory.max": f"{2 * GIB}\n"}, 10, id="a-limit-without-its-use"
        ),
    ],
)
def test_available_memory_excludes_other_processes(left, lines, files, gib):
    assert left(lines, files) == gib * GIB


def test_available_memory_may_be_unknown_and_is_rounded_down(tmp_path):
    assert memory_available(tmp_path, tmp_path) is None
    write(tmp_path / "meminfo", f"MemAvailable: {(GIB + 200 * 2**20) // 1024} kB\n")
    assert memory_available(tmp_path, tmp_path) == GIB


@pytest.mark.parametrize(
    ("text", "name"),
    [
        pytest.param(
            "processor\t: 0\nmodel name\t: AMD  EPYC 9555\nflags\t: fpu\n",
            "AMD EPYC 9555",
            id="x86",
        ),
        pytest.param("processor\t: 0\nBogoMIPS\t: 50.00\n", "aarch64", id="arm-has-no-name"),
        pytest.param(None, "aarch64", id="no-proc"),
    ],
)
def test_cpu_name(tmp_path, monkeypatch, text, name):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    if text is not None:
        write(tmp_path / "cpuinfo", text)
    assert cpu_name(tmp_path) == name


def test_cpu_is_one_device_without_capability_or_peaks():
    device = cpu_device("why")
    assert (device.kind, device.count, device.note) == ("cpu", 1, "why")
    assert device.capability is None
    assert device.peak_flops == ()
    assert device.memory_bytes is None or device.memory_bytes > 2**20


@pytest.mark.parametrize(
    ("text", "units"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16\n", ("avx512_bf16",)),
        ("flags : avx512_bf16 amx_tile amx_bf16\n", ("amx_bf16", "avx512_bf16")),
        ("Features\t: fp asimd bf16 i8mm\n", ("bf16",)),
        ("flags : fpu avx2\n", ()),
        ("model name : bf16 machine\n", ()),
    ],
)
def test_matrix_units_for_bfloat16(text, units, tmp_path) -> None:
    write(tmp_path / "cpuinfo", f"processor : 0\n{text}")
    assert bfloat16_units(tmp_path) == units
