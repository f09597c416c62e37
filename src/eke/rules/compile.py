"""Rules about torch.compile."""

from eke.config.schema import CompileMode
from eke.rules.capability import (
    capability_of,
    lacks_compiler,
    older_than,
    with_compiler,
    without_compiler,
)
from eke.rules.memory import accumulates
from eke.rules.rule import Facts, Rule, Verdict

INDUCTOR_CAPABILITY = (7, 0)
COMPILER = "https://docs.pytorch.org/docs/stable/torch.compiler.html"
ISSUES = "https://github.com/pytorch/pytorch/issues"


def _inductor(facts: Facts) -> bool:
    return facts.config.compile.option == "inductor"


def replays_graphs(facts: Facts) -> bool:
    """Whether the step's kernels are recorded once and then played again."""
    return facts.device.kind == "cuda" and facts.config.compile.replays_graphs


def _accumulates(facts: Facts) -> bool:
    """An open micro-batch is not judged: batch=auto asks of each it could choose."""
    batch = facts.config.batch
    return batch.per_device is not None and accumulates(
        batch, facts.config.distributed.num_processes
    )


def _replayer(facts: Facts) -> str:
    """What it is that replays graphs: the compiler, or a mode of inductor."""
    compiler = facts.config.compile
    mode = f"compile.mode={compiler.mode.value}"
    return mode if _inductor(facts) else f"compile={compiler.option}"


def without_graphs(facts: Facts) -> str:
    """The override that replays no CUDA graphs, and leaves the rest of the compiler's choice."""
    if not _inductor(facts):
        return "compile=none"
    if facts.config.compile.mode is CompileMode.max_autotune:
        return "compile.mode=max_autotune_no_cudagraphs"
    return "compile.mode=default"


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
        when=lambda f: _inductor(f) and f.config.compile.replays_graphs and f.device.kind == "cpu",
        value=lambda f: f.config.compile.mode.value,
        why=lambda f: f"{f.device.name} is a CPU, and what is replayed are CUDA graphs",
        fix=without_graphs,
        source="https://docs.pytorch.org/docs/stable/generated/torch.compile.html",
    ),
    Rule(
        id="graphs_take_one_micro_batch",
        verdict=Verdict.impossible,
        path="compile",
        when=lambda f: replays_graphs(f) and _accumulates(f),
        value=lambda f: f.config.compile.option,
        why=lambda f: (
            f"{_replayer(f)} leaves a micro-batch's gradients in the memory of its CUDA graphs, "
            "which the next micro-batch of the step uses again before they are added up"
        ),
        fix=lambda f: f"{without_graphs(f)}   (or one micro-batch: a larger batch.per_device)",
        source=f"{ISSUES}/169545",
        versions="torch 2.13",
    ),
    Rule(
        id="graphs_take_the_whole_model",
        verdict=Verdict.impossible,
        path="compile.regional",
        when=lambda f: replays_graphs(f) and f.config.compile.regional,
        value=lambda f: f.config.compile.regional,
        why=lambda f: (
            f"{_replayer(f)} makes CUDA graphs of each layer, and in an evaluation those of one "
            "layer take the memory of the output of the layer before, which is their input"
        ),
        fix=lambda f: "compile.regional=false",
        source=f"{ISSUES}/152887",
        versions="torch 2.13",
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
