"""The largest micro-batch a run can meet, without a look at its data."""

import numpy as np

from eke.build.batches import Collator, MicroBatch
from eke.build.sources import is_packed, is_ragged
from eke.build.tasks import Sample, lay_end_to_end
from eke.plan import Plan
from eke.schema import Packing, Seq2SeqLM
from eke.sizes import DECODERS


def largest_batch(plan: Plan, num_samples: int) -> MicroBatch:
    """A micro-batch of the longest samples, on the host.

    Args:
        plan: the run; its data is not opened.
        num_samples: rows before packing.
    """
    return collator(plan)([_longest(plan)] * num_samples)


def collator(plan: Plan) -> Collator:
    """As `eke.build.data` makes it."""
    config = plan.config
    multiple = config.data.pad_to_multiple_of or 1
    return Collator(
        needs_mask=config.model.family not in DECODERS and (is_ragged(config) or multiple > 1),
        pad=plan.vocabulary.pad,
        multiple=multiple,
        padding_free=config.data.packing is Packing.padding_free,
    )


def is_padded(plan: Plan) -> bool:
    """Whether some row of a batch has padding at its end."""
    data = plan.config.data
    ragged = is_ragged(plan.config) and not is_packed(plan.config)
    return ragged or data.seq_len % (data.pad_to_multiple_of or 1) != 0


def _longest(plan: Plan) -> Sample:
    config = plan.config
    length = config.data.seq_len
    ids = np.zeros(length, np.int64)
    if isinstance(config.task, Seq2SeqLM):
        target = np.zeros(config.task.target_len or length, np.int64)
        return {"input_ids": ids, "labels": target, "decoder_input_ids": target}
    whole = config.task.option == "sequence_classification"
    label = np.zeros((), np.int64) if whole else ids
    sample = {"input_ids": ids, "labels": label}
    packed = config.data.packing is Packing.on and is_ragged(config)
    return lay_end_to_end([sample]) if packed else sample
