"""What optimizers need while they step, beside their state: gone when the step is over.

Multiples of the largest tensor, or of all, as profiled on a CPU (docs/lab.md) and read from each
library; kernels of a GPU that need none have 0 as their low end.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from eke.config.schema import SGD, Optimizer
from eke.models.sizes.algorithms import FLOAT32_BYTES


@dataclass(frozen=True)
class Step:
    """What an optimizer steps on, in bytes, as it sees the tensors."""

    optimizer: Optimizer
    largest: int
    """The largest trained tensor."""
    group: int
    """The largest group of one role."""
    total: int
    """All of them."""
    hidden: int
    """The largest matrix of a layer."""
    in_8_bits: int
    """The largest tensor whose states are quantised."""
    number_bytes: int
    """Of one number of a tensor."""
    on_cpu: bool
    """It runs on a CPU."""

    @property
    def wide(self) -> int:
        """How much larger a float32 copy is."""
        return FLOAT32_BYTES // self.number_bytes


Temporaries = Callable[[Step], tuple[int, int]]
"""A step -> the expected bytes, and the most; the least are none."""


def unknown(step: Step) -> tuple[int, int]:
    """Nothing up to everything twice."""
    return step.largest, 2 * step.total


def foreach(step: Step) -> tuple[int, int]:
    """Torch's _multi_tensor_adamw has the square roots of a group's second moments at once."""
    return step.group, step.group + step.largest


def forloop(step: Step) -> tuple[int, int]:
    """Of one tensor after the other."""
    return 2 * step.largest, 3 * step.largest


def one_kernel(step: Step) -> tuple[int, int]:
    """None that is known of."""
    return 0, step.largest


LOOPS: dict[str, Temporaries] = {
    "foreach": foreach,
    "forloop": forloop,
    "fused": one_kernel,
    "deepspeed_cpu": one_kernel,
}
"""Implementation of torch's AdamW, as planned -> temporaries of one step."""


def adafactor(step: Step) -> tuple[int, int]:
    """The squared gradient, the update and, of narrow weights, two copies (transformers')."""
    copies = 2 if step.wide == 1 else 4
    expected = (copies * step.largest + step.hidden) * step.wide
    return expected, (copies + 2) * step.largest * step.wide


def sgd(step: Step) -> tuple[int, int]:
    """Decayed gradients: of one tensor on a CPU, of a group at once (foreach) on a GPU."""
    fields = cast(SGD, step.optimizer)
    size = step.largest if step.on_cpu else step.group
    return size if fields.weight_decay or fields.nesterov else 0, step.group + step.largest


def bitsandbytes(step: Step) -> tuple[int, int]:
    """One kernel on a GPU; bitsandbytes 0.50 computes in plain PyTorch on a CPU.

    Source: backends/cpu/ops.py. In 32 bits the gradient, a denominator and the update; in 8 bits
    two moments besides (Lion: one, and a product), all float32; of narrow weights a copy, too.
    """
    if not step.on_cpu:
        return 0, step.largest
    copy = 0 if step.wide == 1 else 1
    at_once = max((3 + copy) * step.largest, (5 + copy) * step.in_8_bits) * step.wide
    return at_once, (6 + copy) * step.largest * step.wide


def muon(step: Step) -> tuple[int, int]:
    """Newton-Schulz iterations of one matrix in bfloat16; AdamW's kernel has no temporaries."""
    narrowed = 1 if step.number_bytes > 2 else 2
    return 3 * step.hidden * narrowed, 6 * step.hidden * step.wide + step.largest


def schedule_free(step: Step) -> tuple[int, int]:
    """A normalised gradient of everything: the library's foreach."""
    return step.total, 2 * step.total


def low_rank(step: Step) -> tuple[int, int]:
    """AdamW by tensor, projections, and singular vectors of one matrix in float32."""
    return 2 * step.largest + step.hidden, 4 * step.largest + 8 * step.hidden * step.wide


def torchao(step: Step) -> tuple[int, int]:
    """Compiled, one tensor at a time: moments in float32 at worst."""
    return step.largest * step.wide, 6 * step.largest * step.wide
