"""Cases of rules/compile.py: the command and the device that break each rule."""

import dataclasses

from unit.rules.devices import CPU, H200, V100

from eke.hardware import Device

CASES: dict[str, tuple[tuple[str, ...], Device]] = {
    "inductor_needs_volta": (("compile=inductor",), dataclasses.replace(V100, capability=(6, 0))),
    "inductor_needs_compiler": (("compile=inductor",), CPU),
    "cudagraphs_need_cuda": (("compile=cudagraphs",), CPU),
    "mode_is_inductors": (("compile=eager", "compile.mode=max_autotune"), CPU),
    "graph_modes_need_cuda": (("compile=inductor", "compile.mode=reduce_overhead"), CPU),
    "graphs_take_one_micro_batch": (
        ("compile=inductor", "compile.mode=reduce_overhead", "batch.accumulation=2"), H200,
    ),
    "graphs_take_the_whole_model": (
        ("compile=inductor", "compile.mode=max_autotune", "compile.regional=true"), H200,
    ),
    "regional_needs_compiler": (("compile.regional=true",), CPU),
}  # fmt: skip

FIX_IS_WORDS: set[str] = {"inductor_needs_compiler"}
"""Rules whose fix is no override that a test can type."""
