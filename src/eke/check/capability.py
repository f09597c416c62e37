"""What rules say about a device's generation, and about the compiler that generated code needs."""

import shutil

from eke.check.rule import Facts


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
    """Whether code for this machine's CPU, which inductor writes in C++, cannot be compiled."""
    return (
        facts.device.kind == "cpu"
        and not facts.planning
        and not any(shutil.which(name) for name in ("g++", "clang++", "c++"))
    )
