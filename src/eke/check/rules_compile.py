"""Rules about torch.compile."""

from eke.check.capability import (
    capability_of,
    lacks_compiler,
    older_than,
    with_compiler,
    without_compiler,
)
from eke.check.rule import Facts, Rule, Verdict
from eke.schema import CompileMode

INDUCTOR_CAPABILITY = (7, 0)
COMPILER = "https://docs.pytorch.org/docs/stable/torch.compiler.html"
GRAPH_MODES = (CompileMode.reduce_overhead, CompileMode.max_autotune)


def _inductor(facts: Facts) -> bool:
    return facts.config.compile.option == "inductor"


RULES = (
    Rule(
        id="cudagraphs_need_cuda",
        verdict=Verdict.impossible,
        path="compile",
        when=lambda f: f.config.compile.option == "cudagraphs" and f.device.kind == "cpu",
        value=lambda f: f.config.compile.option,
        why=lambda f: (
            "CUDA graphs replay the kernels of an NVIDIA GPU; on a CPU PyTorch skips them and runs "
            f"operation by operation, and {f.device.name} is one"
        ),
        fix=lambda f: "compile=none",
        source="https://docs.pytorch.org/docs/stable/torch.compiler_cudagraph_trees.html",
    ),
    Rule(
        id="mode_is_inductors",
        verdict=Verdict.no_effect,
        path="compile.mode",
        when=lambda f: f.config.compile.mode is not CompileMode.default and not _inductor(f),
        value=lambda f: f.config.compile.mode.value,
        why=lambda f: f"modes are inductor's; compile={f.config.compile.option} has none",
        fix=lambda f: "compile.mode=default",
        source="https://docs.pytorch.org/docs/stable/generated/torch.compile.html",
    ),
    Rule(
        id="graph_modes_need_cuda",
        verdict=Verdict.no_effect,
        path="compile.mode",
        when=lambda f: (
            _inductor(f) and f.config.compile.mode in GRAPH_MODES and f.device.kind == "cpu"
        ),
        value=lambda f: f.config.compile.mode.value,
        why=lambda f: f"{f.device.name} is a CPU, and what is replayed are CUDA graphs",
        fix=lambda f: (
            "compile.mode=max_autotune_no_cudagraphs"
            if f.config.compile.mode is CompileMode.max_autotune
            else "compile.mode=default"
        ),
        source="https://docs.pytorch.org/docs/stable/generated/torch.compile.html",
    ),
    Rule(
        id="regional_needs_compiler",
        verdict=Verdict.no_effect,
        path="compile.regional",
        when=lambda f: f.config.compile.regional and f.config.compile.option == "none",
        value=lambda f: f.config.compile.regional,
        why=lambda f: "nothing is compiled, compile=none",
        fix=lambda f: "compile=inductor",
        source="https://docs.pytorch.org/tutorials/recipes/regional_compilation.html",
    ),
    Rule(
        id="inductor_needs_volta",
        verdict=Verdict.impossible,
        path="compile",
        when=lambda f: _inductor(f) and older_than(f, INDUCTOR_CAPABILITY),
        value=lambda f: f.config.compile.option,
        why=lambda f: (
            f"Triton kernels need CUDA compute capability 7.0 or newer; {capability_of(f)}"
        ),
        fix=lambda f: "compile=none",
        source=COMPILER,
    ),
    Rule(
        id="inductor_needs_compiler",
        verdict=Verdict.impossible,
        path="compile",
        when=lambda f: f.config.compile.option == "inductor" and lacks_compiler(f),
        value=lambda f: f.config.compile.option,
        why=without_compiler,
        fix=lambda f: f"compile=none{with_compiler(f)}",
        source=COMPILER,
    ),
)
