"""What rules say about a device's generation, and about the compiler that generated code needs."""

import os
import shutil

from eke.rules.rule import Facts


def capability_of(facts: Facts) -> str:
    """The device's CUDA compute capability, as a clause."""
    device = facts.device
    if device.capability is None:
        return f"{device.name} is a CPU"
    major, minor = device.capability
    return f"{device.name} has compute capability {major}.{minor}"


def older_than(facts: Facts, needed: tuple[int, int]) -> bool:
    """Whether the device is a GPU of an earlier generation."""
    return facts.device.kind == "cuda" and (facts.device.capability or (0, 0)) < needed


def lacks_compiler(facts: Facts) -> bool:
    """Whether what is generated for the device cannot be compiled here.

    For a CPU inductor writes C++. For a GPU Triton writes machine code itself, but compiles the C
    of its driver at first use (3.9, backends/nvidia/driver.py).
    """
    if facts.planning or not facts.device.present:
        return False
    if facts.device.kind == "cpu":
        return not _found("g++", "clang++", "c++")
    return "CC" not in os.environ and not _found("gcc", "clang")


def without_compiler(facts: Facts) -> str:
    """What is missing then, as a clause."""
    if facts.device.kind == "cpu":
        return "no C++ compiler was found, and for a CPU inductor generates C++"
    return "no C compiler was found (CC, gcc, clang), and Triton compiles its driver by one"


def with_compiler(facts: Facts) -> str:
    """What installs it, behind the override that does without."""
    return f"   (or: apt install {'g++' if facts.device.kind == 'cpu' else 'gcc'})"


def _found(*names: str) -> bool:
    return any(shutil.which(name) for name in names)
