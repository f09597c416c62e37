"""What optimizers need while they step, beside their state: gone when the step is over.

Multiples of the largest tensor, or of all, as profiled on a CPU (docs/lab.md) and read from each
library; kernels of a GPU that need none have 0 as their low end.
"""

from collections.abc import Callable
from math import prod

from eke.forecast.ranges import NOTHING, spread
from eke.forecast.values import Range
from eke.plan import Plan
from eke.schema import SGD, Config, GaLore, Muon
from eke.sizes import (
    FLOAT32_BYTES,
    STAGE,
    Role,
    Weight,
    flat_pieces,
    has_master,
    is_quantised,
    projection_rank,
    weight_bytes,
)

Sizes = tuple[int, int, int, int, int]
"""Bytes of the largest trained tensor, of the largest group of one role, of all, of the largest
matrix of a layer, and of the largest tensor whose states are in 8 bits; as the optimizer sees
them."""


def optimizer_temporaries(plan: Plan, parts: tuple[Weight, ...]) -> Range:
    """Bytes beside weights, gradients and states while the optimizer steps.

    Args:
        plan: of the run.
        parts: `eke.sizes.training_structure` of the plan's configuration.
    """
    config = plan.config
    trained = [w for w in parts if w.trained]
    if not trained:
        return NOTHING
    number = FLOAT32_BYTES if has_master(config) else weight_bytes(config)
    if config.distributed.option in STAGE:  # flat pieces, one after the other
        trained, number = flat_pieces(config), FLOAT32_BYTES
    largest = number * max(prod(w.shape) for w in trained)
    in_8_bits = number * max(
        (prod(w.shape) for w in trained if is_quantised(config.optimizer, w)), default=0
    )
    sizes = (largest, *_groups(trained, number), _hidden(trained, number), in_8_bits)
    steps = config.memory.optimizer_in_backward
    if steps:  # one weight at a time
        sizes = (largest, largest, largest, *sizes[3:])
    cpu = plan.device.kind == "cpu"
    found = _temporaries(plan, sizes, number, cpu)
    if has_master(config) and not steps and config.distributed.option not in STAGE:
        # The gradients once more, in float32, while the optimizer steps on the copies.
        more = 0 if cpu else sizes[2] // 4
        found = spread(found.low, found.expected + sizes[2] // 2, found.high + sizes[2] + more)
    return found


def singular_vectors(config: Config, parts: tuple[Weight, ...]) -> int:
    """Bytes that GaLore holds beside its projections: they are slices of all singular vectors.

    Source: galore-torch 1.0, galore_projector.py, get_orthogonal_matrix; a slice keeps the whole.
    """
    if not isinstance(config.optimizer, GaLore):
        return 0
    rank, number = projection_rank(config), weight_bytes(config)
    short = [min(w.shape) for w in parts if w.trained and w.role is Role.hidden]
    return number * sum(side * max(0, side - rank) for side in short)


def _groups(trained: list[Weight], number: int) -> tuple[int, int]:
    by_role = [sum(prod(w.shape) for w in trained if w.role is role) for role in Role]
    return number * max(by_role), number * sum(by_role)


def _hidden(trained: list[Weight], number: int) -> int:
    return number * max((prod(w.shape) for w in trained if w.role is Role.hidden), default=0)


def _temporaries(plan: Plan, sizes: Sizes, number: int, cpu: bool) -> Range:
    config = plan.config
    largest, group, _, _, _ = sizes
    if plan.compute.optimizer_implementation == "foreach":
        # torch's _multi_tensor_adamw has the square roots of a group's second moments at once.
        return spread(0, group, group + largest)
    if plan.compute.optimizer_implementation == "forloop":
        return spread(0, 2 * largest, 3 * largest)
    if plan.compute.optimizer_implementation in ("fused", "deepspeed_cpu"):
        return spread(0, 0, largest)
    option = config.optimizer.option
    return TEMPORARIES.get(option, _unknown)(config, sizes, number, cpu)


def _wide(number: int) -> int:
    """How much larger a float32 copy is."""
    return FLOAT32_BYTES // number


def _unknown(config: Config, sizes: Sizes, number: int, cpu: bool) -> Range:
    """Nothing up to everything twice."""
    return spread(0, sizes[0], 2 * sizes[2])


def _adafactor(config: Config, sizes: Sizes, number: int, cpu: bool) -> Range:
    """The squared gradient, the update and, of narrow weights, two copies (transformers')."""
    largest, _, _, hidden, _ = sizes
    wide = _wide(number)
    copies = 2 if wide == 1 else 4
    return spread(0, (copies * largest + hidden) * wide, (copies + 2) * largest * wide)


def _sgd(config: Config, sizes: Sizes, number: int, cpu: bool) -> Range:
    """Decayed gradients: of one tensor on a CPU, of a group at once (foreach) on a GPU."""
    assert isinstance(config.optimizer, SGD)
    size = sizes[0] if cpu else sizes[1]
    size = size if config.optimizer.weight_decay or config.optimizer.nesterov else 0
    return spread(0, size, sizes[1] + sizes[0])


def _bitsandbytes(config: Config, sizes: Sizes, number: int, cpu: bool) -> Range:
    """One kernel on a GPU; bitsandbytes 0.50 computes in plain PyTorch on a CPU.

    Source: backends/cpu/ops.py. In 32 bits the gradient, a denominator and the update; in 8 bits
    two moments besides (Lion: one, and a product), all float32; of narrow weights a copy, too.
    """
    largest, in_8_bits, wide = sizes[0], sizes[4], _wide(number)
    copy = 0 if wide == 1 else 1
    at_once = max((3 + copy) * largest, (5 + copy) * in_8_bits) * wide
    return spread(0, at_once if cpu else 0, (6 + copy) * largest * wide if cpu else largest)


def _muon(config: Config, sizes: Sizes, number: int, cpu: bool) -> Range:
    """Newton-Schulz iterations of one matrix in bfloat16; AdamW's kernel has no temporaries."""
    assert isinstance(config.optimizer, Muon)
    largest, _, _, hidden, _ = sizes
    return spread(0, 3 * hidden * (1 if number > 2 else 2), 6 * hidden * _wide(number) + largest)


def _schedule_free(config: Config, sizes: Sizes, number: int, cpu: bool) -> Range:
    """A normalised gradient of everything: the library's foreach."""
    return spread(0, sizes[2], 2 * sizes[2])


def _low_rank(config: Config, sizes: Sizes, number: int, cpu: bool) -> Range:
    """AdamW by tensor, projections, and singular vectors of one matrix in float32."""
    largest, _, _, hidden, _ = sizes
    return spread(0, 2 * largest + hidden, 4 * largest + 8 * hidden * _wide(number))


def _torchao(config: Config, sizes: Sizes, number: int, cpu: bool) -> Range:
    """Compiled, one tensor at a time: moments in float32 at worst."""
    return spread(0, sizes[0] * _wide(number), 6 * sizes[0] * _wide(number))


TEMPORARIES: dict[str, Callable[[Config, Sizes, int, bool], Range]] = {
    "adafactor": _adafactor,
    "adamw_8bit": _bitsandbytes,
    "paged_adamw_8bit": _bitsandbytes,
    "lion": _bitsandbytes,
    "lion_8bit": _bitsandbytes,
    "adamw_torchao_8bit": _torchao,
    "adamw_torchao_4bit": _torchao,
    "adamw_bf16_sr": _torchao,
    "sgd": _sgd,
    "muon": _muon,
    "schedule_free": _schedule_free,
    "galore": _low_rank,
    "apollo": _low_rank,
}
"""Option of `optimizer` -> temporaries of one step; torch's AdamW goes by its implementation."""
