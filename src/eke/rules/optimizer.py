"""Rules about optimizers."""

from eke.common.errors import Fix
from eke.config.schema import Weights
from eke.models.families import Role
from eke.models.sizes import (
    option_of,
    projection_rank,
    quantises_state,
    structure,
    training_structure,
)
from eke.rules.rule import (
    VOLTA,
    Rule,
    RuleInputs,
    Severity,
    capability_of,
    needs_compiler,
    older_than,
    unsafe,
    without_effect,
)


def _library(facts: RuleInputs) -> str:
    return facts.optimizer.package.partition(".")[0]


def _shortest_side(facts: RuleInputs) -> int:
    """Return the shortest side of all matrices in Transformer layers, 0 without matrices."""
    weights = structure(facts.config).weights
    return min((min(w.shape) for w in weights if w.role is Role.hidden), default=0)


def _rank_limit(facts: RuleInputs) -> int:
    """Return the lowest rank whose states and projection save no memory over AdamW."""
    # AdamW stores 2 x long x short numbers of a matrix, a projection 2 x long x rank + rank x short
    weights = [w for w in structure(facts.config).weights if w.role is Role.hidden]
    return min(
        (-(-2 * max(w.shape) * min(w.shape) // (2 * max(w.shape) + min(w.shape))) for w in weights),
        default=0,
    )


def _trains_no_matrix(facts: RuleInputs) -> bool:
    """Return whether a known architecture trains only vectors, tables and heads."""
    weights = training_structure(facts.config).weights
    found = any(w.trained and w.role is Role.hidden for w in weights)
    return facts.model_family.is_known and not found


RULES = dict(
    muon_needs_matrices=Rule(
        key="optimizer",
        when=lambda f: (
            f.optimizer.needs_matrices and (f.config.peft.option == "ia3" or _trains_no_matrix(f))
        ),
        why=lambda f: (
            "needs trained matrices in Transformer layers. "
            f"{'model.freeze' if f.config.model.freeze else 'peft=ia3'} leaves none"
        ),
        sized=True,
        source="https://docs.pytorch.org/docs/stable/generated/torch.optim.Muon.html",
    ),
    implementation_is_adamws=without_effect(
        key="optimizer.implementation",
        when=lambda f: option_of(f.config.optimizer) == f.config.optimizer.option,
        why=lambda f: f"optimizer={f.config.optimizer.option} has one implementation",
        fix=Fix("optimizer.implementation=auto", remark="or optimizer=adamw, which has several"),
        source="eke.models.sizes.option_of",
    ),
    apex_needs_cuda=Rule(
        key="optimizer",
        when=lambda f: f.optimizer.cuda_only and f.on_cpu,
        value=lambda f: option_of(f.config.optimizer),
        why=lambda f: f"{_library(f)} needs CUDA. {f.device.name} is a CPU",
        fix=lambda f: Fix(
            "optimizer.implementation=fused"
            if option_of(f.config.optimizer) != f.config.optimizer.option
            else f"optimizer={f.optimizer.twin}"
        ),
        source="https://nvidia.github.io/apex/optimizers.html",
    ),
    torchao_needs_compiler=needs_compiler(
        "optimizer",
        lambda f: f.optimizer.compiles,
        Fix("optimizer=adamw_8bit"),
        "https://github.com/pytorch/ao/tree/main/torchao/optim",
        versions="torchao 0.18",
        use=lambda f: f"{_library(f)} compiles its step. ",
    ),
    torchao_needs_volta=Rule(
        key="optimizer",
        when=lambda f: f.optimizer.compiles and older_than(f, VOLTA),
        why=lambda f: (
            f"{_library(f)} uses Triton, which needs CUDA compute capability 7.0 or newer. "
            f"{capability_of(f)}"
        ),
        fix=Fix("optimizer=adamw_8bit"),
        source="https://docs.pytorch.org/docs/stable/torch.compiler.html",
    ),
    paging_needs_cuda=without_effect(
        key="optimizer",
        when=lambda f: f.optimizer.pages and f.on_cpu,
        why="paging moves state between a GPU and its host. This run uses a CPU",
        fix=Fix("optimizer=adamw_8bit"),
        source="bitsandbytes, optim/optimizer.py, get_state_buffer",
        versions="bitsandbytes 0.50",
    ),
    rounding_needs_bf16_weights=without_effect(
        key="optimizer",
        when=lambda f: (
            f.optimizer.stochastic_rounding and f.config.precision.weights is not Weights.bfloat16
        ),
        why="float32 weights are stored without rounding",
        source="torchao, optim/adam.py: bf16_stochastic_round and p.dtype is torch.bfloat16",
        versions="torchao 0.18",
    ),
    schedule_free_has_no_schedule=unsafe(
        key="schedule",
        when=lambda f: f.optimizer.averages and f.config.schedule.option != "constant",
        why=lambda f: (
            f"optimizer={f.config.optimizer.option} averages weights instead of decaying the "
            "learning rate. With both, the average lags behind"
        ),
        fix=Fix("schedule=constant"),
        source="arXiv:2405.15682",
    ),
    all_tensors_are_too_small_for_8_bits=without_effect(
        key="optimizer",
        when=lambda f: (
            f.optimizer.quantises
            and not any(quantises_state(f.config.optimizer, w) for w in structure(f.config).weights)
        ),
        why=lambda f: (
            "tensors are not quantised: they have fewer than "
            f"{getattr(f.config.optimizer, 'min_8bit_size', 4096)} numbers, are embeddings, or "
            "have incomplete blocks"
        ),
        fix=lambda f: Fix(f"optimizer={f.optimizer.unquantised}"),
        source="bitsandbytes, optim/optimizer.py, init_state, and torchao, optim/adam.py",
        versions="bitsandbytes 0.50, torchao 0.18",
        sized=True,
    ),
    rank_saves_nothing=Rule(
        verdict=Severity.no_effect,
        key="optimizer.rank",
        when=lambda f: f.optimizer.projects and projection_rank(f.config) >= _rank_limit(f),
        value=lambda f: projection_rank(f.config),
        why=lambda f: (
            f"needs as much memory as AdamW for a matrix with shorter side {_shortest_side(f)}. "
            f"Ranks below {_rank_limit(f)} save memory"
        ),
        # A quarter of the shortest side, if that is a valid rank.
        fix=lambda f: Fix(
            f"optimizer.rank={rank}"
            if 0 < (rank := _shortest_side(f) // 4) < _rank_limit(f)
            else "optimizer=adamw"
        ),
        source="2 x long x rank + rank x short against 2 x long x short numbers",
        sized=True,
    ),
)
