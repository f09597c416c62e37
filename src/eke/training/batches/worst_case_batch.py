"""The longest samples that a run meets, of one token: for trials of its memory."""

from dataclasses import dataclass

import numpy as np

from eke.common.tokens import IGNORED
from eke.config.schema import Config, Packing, Seq2SeqLM
from eke.models.sizes import is_ragged, most_predicted
from eke.plan.planner import Plan, drawn, evaluated
from eke.plan.planner.lengths import Micro
from eke.training.batches.batches import Collator, MicroBatch
from eke.training.batches.sources import is_packed
from eke.training.batches.tasks import Key, Sample, lay_end_to_end


@dataclass(frozen=True)
class LongestSamples:
    """As many samples as planned, each as long as samples can be, all of one ordinary token."""

    plan: Plan
    evaluation: bool

    def __len__(self) -> int:
        steps = self.plan.steps
        return steps.num_eval_samples if self.evaluation else steps.num_train_samples

    def __getitem__(self, key: Key) -> Sample:
        """The same sample for every number and epoch."""
        config, micro = self.plan.config, self._micro
        length = micro.source
        if config.data.packing is Packing.padding_free:  # they share its one row
            return self._sample(-(-length // self._together()), micro.target)
        if config.data.packing is Packing.on and is_ragged(config):
            # Two in a row: of one alone, libraries see no need to keep it from others.
            cut = length // 2
            return lay_end_to_end([self._sample(n, n) for n in (cut, length - cut)])
        return self._sample(length, micro.target)

    def lengths(self) -> np.ndarray:
        """Tokens of each sample, shape (samples,)."""
        return np.full(len(self), self._micro.source)

    @property
    def _micro(self) -> Micro:
        return evaluated(self.plan) if self.evaluation else drawn(self.plan).longest

    def _sample(self, length: int, of_target: int) -> Sample:
        task, vocabulary = self.plan.config.task, self.plan.vocabulary
        ids = np.full(length, self._ordinary())
        if isinstance(task, Seq2SeqLM):
            target = np.full(of_target, self._ordinary())
            return {"input_ids": ids, "labels": target, "decoder_input_ids": target}
        if task.option == "sequence_classification":
            # As in eke.training.batches.tasks: T5 pools at the end of text, of which each row has
            # one.
            ids[-1] = vocabulary.pad if vocabulary.eos is None else vocabulary.eos
            return {"input_ids": ids, "labels": np.zeros((), np.int64)}
        return {"input_ids": ids, "labels": some_labels(self.plan.config, ids, self._together())}

    def _together(self) -> int:
        """Samples of a micro-batch."""
        batch = self.plan.batch
        return (batch.eval_per_device if self.evaluation else batch.per_device) * batch.devices

    def _ordinary(self) -> int:
        """The first id without a meaning of its own."""
        known = self.plan.vocabulary
        special = {known.pad, known.eos, known.mask, *known.special}
        return next(number for number in range(len(special) + 1) if number not in special)


def some_labels(config: Config, ids: np.ndarray, num_samples: int) -> np.ndarray:
    """Labels of a sample: as many as a micro-batch of such samples may have, shared out evenly."""
    most = -(-most_predicted(config, num_samples, len(ids)) // num_samples)
    labels = np.full_like(ids, IGNORED)
    labels[:most] = ids[:most]
    return labels


@dataclass(frozen=True)
class LongestCollator:
    """Makes micro-batches in which, as in the run's, one row has padding where rows may have it."""

    collate: Collator
    plan: Plan

    def __call__(self, samples: list[Sample]) -> MicroBatch:
        """One micro-batch from at least one sample."""
        config = self.plan.config
        ragged = is_ragged(config) and not is_packed(config)
        if ragged and len(samples) > 1:
            return self.collate([*samples[:-1], _shorter(samples[-1])])
        return self.collate(samples)


def _shorter(sample: Sample) -> Sample:
    """Without the first token of each sequence; the last may be one that a model pools at."""
    return {name: _tail(array) for name, array in sample.items()}


def _tail(array: np.ndarray) -> np.ndarray:
    return array[1:] if array.ndim and len(array) > 1 else array
