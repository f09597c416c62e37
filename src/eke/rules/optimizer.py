"""Rules about optimizers."""

from eke.models.sizes import (
    Description,
    Role,
    algorithm,
    describe,
    is_quantised,
    projection_rank,
    structure,
)
from eke.rules.capability import (
    capability_of,
    lacks_compiler,
    older_than,
    with_compiler,
    without_compiler,
)
from eke.rules.rule import Facts, Rule, Verdict

TRITON_CAPABILITY = (7, 0)


def _option(facts: Facts) -> str:
    return facts.config.optimizer.option


def _known(facts: Facts) -> Description:
    return describe(facts.config.optimizer)


def _library(facts: Facts) -> str:
    """The package that the optimizer is of."""
    return _known(facts).package.partition(".")[0]


def _quantises_nothing(facts: Facts) -> bool:
    optimizer = facts.config.optimizer
    if algorithm(optimizer).quantises is None:
        return False
    return not any(is_quantised(optimizer, weight) for weight in structure(facts.config).weights)


def _shortest_side(facts: Facts) -> int:
    """Of the matrices inside Transformer layers; 0 where there are none."""
    weights = structure(facts.config).weights
    return min((min(w.shape) for w in weights if w.role is Role.hidden), default=0)


def _rank_limit(facts: Facts) -> int:
    """The least rank at which states in the subspace, with its projection, are no smaller.

    AdamW keeps 2 x long x short numbers of a matrix, a projection 2 x long x rank + rank x short.
    """
    weights = [w for w in structure(facts.config).weights if w.role is Role.hidden]
    return min(
        (-(-2 * max(w.shape) * min(w.shape) // (2 * max(w.shape) + min(w.shape))) for w in weights),
        default=0,
    )


def _rank_saves_nothing(facts: Facts) -> bool:
    if not algorithm(facts.config.optimizer).projects:
        return False
    return projection_rank(facts.config) >= _rank_limit(facts)


def _smaller_rank(facts: Facts) -> str:
    """A quarter of the shortest side, where that is a rank at all."""
    rank = _shortest_side(facts) // 4
    return f"optimizer.rank={rank}" if 0 < rank < _rank_limit(facts) else "optimizer=adamw"


def _has_bf16_weights(facts: Facts) -> bool:
    weights = getattr(facts.config.precision, "weights", None)
    return getattr(weights, "value", weights) == "bfloat16"


RULES: tuple[Rule, ...] = (
    Rule(
        id="muon_needs_matrices",
        verdict=Verdict.impossible,
        path="optimizer",
        when=lambda f: _known(f).needs_matrices and f.config.peft.option == "ia3",
        value=lambda f: f.config.optimizer.option,
        why=lambda f: "updates matrices inside Transformer layers; peft=ia3 trains vectors alone",
        fix=lambda f: "optimizer=adamw",
        source="https://docs.pytorch.org/docs/stable/generated/torch.optim.Muon.html",
    ),
    Rule(
        id="apex_needs_cuda",
        verdict=Verdict.impossible,
        path="optimizer",
        when=lambda f: _known(f).cuda_only and f.device.kind == "cpu",
        value=_option,
        why=lambda f: f"{_library(f)} has kernels for CUDA only; {f.device.name} is a CPU",
        fix=lambda f: f"optimizer={_known(f).twin}",
        source="https://nvidia.github.io/apex/optimizers.html",
    ),
    Rule(
        id="torchao_needs_compiler",
        verdict=Verdict.impossible,
        path="optimizer",
        when=lambda f: _known(f).compiles and lacks_compiler(f),
        value=_option,
        why=lambda f: f"{_library(f)} compiles its step; {without_compiler(f)}",
        fix=lambda f: f"optimizer=adamw_8bit{with_compiler(f)}",
        source="https://github.com/pytorch/ao/tree/main/torchao/optim",
        versions="torchao 0.18",
    ),
    Rule(
        id="torchao_needs_volta",
        verdict=Verdict.impossible,
        path="optimizer",
        when=lambda f: _known(f).compiles and older_than(f, TRITON_CAPABILITY),
        value=_option,
        why=lambda f: (
            f"{_library(f)} compiles its step to Triton, which needs CUDA compute capability 7.0 "
            f"or newer; {capability_of(f)}"
        ),
        fix=lambda f: "optimizer=adamw_8bit",
        source="https://docs.pytorch.org/docs/stable/torch.compiler.html",
    ),
    Rule(
        id="paging_needs_cuda",
        verdict=Verdict.no_effect,
        path="optimizer",
        when=lambda f: _known(f).pages and f.device.kind == "cpu",
        value=_option,
        why=lambda f: "pages are moved between a GPU and its host; on a CPU there is one memory",
        fix=lambda f: "optimizer=adamw_8bit",
        source="bitsandbytes, optim/optimizer.py, get_state_buffer",
        versions="bitsandbytes 0.50",
    ),
    Rule(
        id="rounding_needs_bf16_weights",
        verdict=Verdict.no_effect,
        path="optimizer",
        when=lambda f: _known(f).rounds_at_random and not _has_bf16_weights(f),
        value=_option,
        why=lambda f: "weights are float32, which a step stores as it computes them: unrounded",
        fix=lambda f: "optimizer=adamw",
        source="torchao, optim/adam.py: bf16_stochastic_round and p.dtype is torch.bfloat16",
        versions="torchao 0.18",
    ),
    Rule(
        id="schedule_free_has_no_schedule",
        verdict=Verdict.unsafe,
        path="schedule",
        when=lambda f: _known(f).averages and f.config.schedule.option != "constant",
        value=lambda f: f.config.schedule.option,
        why=lambda f: (
            f"optimizer={_option(f)} averages weights instead of lowering its learning rate; with "
            "both, the last weights hardly move and the average stays behind"
        ),
        fix=lambda f: "schedule=constant",
        source="arXiv:2405.15682",
    ),
    Rule(
        id="all_tensors_are_too_small_for_8_bits",
        verdict=Verdict.no_effect,
        path="optimizer",
        when=_quantises_nothing,
        value=_option,
        why=lambda f: (
            "no tensor of this model is quantised: they have fewer than "
            f"{getattr(f.config.optimizer, 'min_8bit_size', 4096)} numbers, are embeddings, or "
            "are not whole blocks"
        ),
        fix=lambda f: f"optimizer={_known(f).unquantised}",
        source="bitsandbytes, optim/optimizer.py, init_state; torchao, optim/adam.py, _new_buffer",
        versions="bitsandbytes 0.50, torchao 0.18",
        sized=True,
    ),
    Rule(
        id="rank_saves_nothing",
        verdict=Verdict.no_effect,
        path="optimizer.rank",
        when=_rank_saves_nothing,
        value=lambda f: projection_rank(f.config),
        why=lambda f: (
            "its projections and moments are as large as AdamW's moments, of a matrix whose "
            f"shorter side is {_shortest_side(f)}; below {_rank_limit(f)} they are smaller"
        ),
        fix=_smaller_rank,
        source="2 x long x rank + rank x short against 2 x long x short numbers",
        sized=True,
    ),
)
