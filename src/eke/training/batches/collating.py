"""How a plan's samples become micro-batches."""

from eke.config.schema import Packing
from eke.models.sizes import DECODERS, is_ragged
from eke.plan.planner import Plan
from eke.training.batches.batches import Collator
from eke.training.model.loss import is_sparse
from eke.training.model.shift import build_shift


def build_collator(plan: Plan, left: bool = False) -> Collator:
    """What puts the samples of a plan's micro-batches together; `left` pads them in front."""
    config = plan.config
    # A causal model never sees what comes after a token, and padding comes last.
    bidirectional = config.model.family not in DECODERS
    multiple = config.data.pad_to_multiple_of or 1
    return Collator(
        needs_mask=bidirectional and (is_ragged(config) or multiple > 1),
        pad=plan.vocabulary.pad,
        multiple=multiple,
        left=left,
        padding_free=config.data.packing is Packing.padding_free,
        sparse=is_sparse(plan),
        shift=build_shift(plan),
    )
