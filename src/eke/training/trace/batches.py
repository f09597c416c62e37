"""Micro-batches of given lengths, without a look at the data."""

import numpy as np

from eke.config.schema import Packing, Seq2SeqLM
from eke.models.sizes import is_ragged
from eke.plan.planner import Micro, Plan
from eke.training.batches.batches import MicroBatch
from eke.training.batches.collating import build_collator
from eke.training.batches.sources import is_packed
from eke.training.batches.tasks import Sample, lay_end_to_end
from eke.training.batches.worst_case_batch import some_labels


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
