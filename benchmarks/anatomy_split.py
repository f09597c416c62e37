"""Which part of a step an operation belongs to, and what kind of work it is. Needs no torch.

The guides' anatomy of operations (notes/claims.md): tensor contractions, statistical
normalisations, element-wise operators, after Ivanov et al. 2021, "Data Movement Is All You Need",
arXiv:2007.00072.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

PHASES = ("forward", "backward", "update")
"""`update`: whatever follows the begin of the backward pass and is not of it: clipping, step."""
KINDS = ("contraction", "normalisation", "elementwise", "other")
"""`other`: copies, embeddings, the loss's bookkeeping, the host's own time."""

NORM_SCOPE = "anatomy::norm"
"""Around the forward pass of each normalisation layer: an RMS norm is made of plain operations."""
_BACKWARD = "autograd::engine::evaluate_function"
_STEP = "Optimizer.step"
_DATA = "enumerate(DataLoader)"
"""Preparing the batch is no operation of the model: left out."""

_CONTRACTIONS = ("mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "mkldnn_linear", "dot")
_ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention")
"""One kernel for both products and the softmax between them: counted as a contraction."""
_NORMALISATIONS = ("softmax", "log_softmax", "layer_norm", "rms_norm")
_ELEMENTWISE = (
    *("add", "sub", "mul", "div", "neg", "pow", "sqrt", "rsqrt", "exp", "tanh", "sigmoid", "silu"),
    *("sum",),  # of a bias's gradient, for the most part: biases are element-wise
    *("gelu", "relu", "dropout", "masked_fill", "where", "threshold", "bernoulli", "sin", "cos"),
)


@dataclass(frozen=True)
class Event:
    """One operation of a trace."""

    name: str
    start_us: float
    self_us: float
    """Time of its own, without the operations that it called."""
    parent: "Event | None" = None
    sequence: int = -1
    """Number of the autograd node that it made or, in the backward pass, that called it."""

    def chain(self) -> Iterable["Event"]:
        """Itself, and whatever it ran inside of."""
        event: Event | None = self
        while event:
            yield event
            event = event.parent


def kind_of(name: str) -> str:
    """Kind of an operation by its name, as `aten::addmm` or `aten::_softmax_backward_data`."""
    plain = name.removeprefix("aten::")
    if plain.startswith(_ATTENTION):
        return "contraction"
    plain = plain.strip("_").removeprefix("native_").removeprefix("fused_")
    for tail in ("_backward_data", "_backward", "_forward"):
        plain = plain.removesuffix(tail)
    if not name.startswith("aten::"):
        return "other"
    if plain in _CONTRACTIONS:
        return "contraction"
    if plain in _NORMALISATIONS:
        return "normalisation"
    return "elementwise" if plain in _ELEMENTWISE else "other"


def split(events: list[Event]) -> dict[str, dict[str, float]]:
    """Microseconds by phase and kind; every pair is there.

    Args:
        events: of one optimizer step with one forward and one backward pass.
    """
    in_norms = {
        event.sequence
        for event in events
        if event.sequence >= 0 and _under(event, NORM_SCOPE) and not _under(event, _BACKWARD)
    }
    begins = min((e.start_us for e in events if e.name.startswith(_BACKWARD)), default=float("inf"))
    found: dict[str, defaultdict[str, float]] = {phase: defaultdict(float) for phase in PHASES}
    for event in events:
        if _under(event, _DATA):
            continue
        found[_phase(event, begins)][_kind(event, in_norms)] += event.self_us
    return {phase: {kind: found[phase][kind] for kind in KINDS} for phase in PHASES}


def _phase(event: Event, backward_begins: float) -> str:
    if _under(event, _BACKWARD):
        return "backward"
    after = event.start_us >= backward_begins
    return "update" if after or _under(event, _STEP) else "forward"


def _kind(event: Event, in_norms: set[int]) -> str:
    if not event.name.startswith("aten::"):
        return "other"
    if _under(event, NORM_SCOPE):
        return "normalisation"
    nodes = {each.sequence for each in event.chain() if each.name.startswith(_BACKWARD)}
    return "normalisation" if nodes & in_norms else kind_of(event.name)


def _under(event: Event, prefix: str) -> bool:
    return any(each.name.startswith(prefix) for each in event.chain())
