"""Micro-batches of given lengths, without a look at the data."""

import numpy as np

from eke.build.batches import MicroBatch
from eke.build.collating import build_collator
from eke.build.longest import some_labels
from eke.build.sources import is_packed
from eke.build.tasks import Sample, lay_end_to_end
from eke.plan import Micro, Plan
from eke.schema import Packing, Seq2SeqLM
from eke.sizes import is_ragged


def make_batch(plan: Plan, micro: Micro) -> MicroBatch:
    """A micro-batch of these lengths, on the host."""
    return build_collator(plan)([_sample(plan, micro)] * micro.rows)


def is_padded(plan: Plan) -> bool:
    """Whether some row of a batch has padding at its end."""
    data = plan.config.data
    ragged = is_ragged(plan.config) and not is_packed(plan.config)
    return ragged or data.seq_len % (data.pad_to_multiple_of or 1) != 0


def _sample(plan: Plan, micro: Micro) -> Sample:
    config = plan.config
    ids = np.zeros(micro.source, np.int64)
    if isinstance(config.task, Seq2SeqLM):
        target = np.zeros(micro.target, np.int64)
        return {"input_ids": ids, "labels": target, "decoder_input_ids": target}
    whole = config.task.option == "sequence_classification"
    labels = np.zeros((), np.int64) if whole else some_labels(config, ids, micro.rows)
    sample = {"input_ids": ids, "labels": labels}
    packed = config.data.packing is Packing.on and is_ragged(config)
    return lay_end_to_end([sample]) if packed else sample
