"""Lengths of rows in the prepared tokens, and resulting micro-batches."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING

from eke.config.mixing import source_configs
from eke.config.schema import Config, Data, Mix, Packing, Rows, Seq2SeqLM, Synthetic, Task
from eke.data import sources
from eke.models.sizes import SampleMeans, full_samples, is_ragged
from eke.plan.planner.plan import DataPlan, Plan, plans_of_sources
from eke.plan.planner.samples import DEFAULT_SYNTHETIC_SAMPLES

if TYPE_CHECKING:
    import numpy as np

GROUPED_STEPS = 50
"""Steps whose samples are sorted by length together, as in transformers' LengthGroupedSampler."""

DRAWS, MOST_DRAWN = 5, 200_000
"""Simulated trainings for the lengths of micro-batches, and largest samples of each."""


@dataclass(frozen=True)
class MicroBatchShape:
    """Shape of a micro-batch on one device."""

    rows: int
    source: int
    """Tokens per row including padding."""
    target: int
    """Tokens per decoder row in seq2seq_lm, else as `source`."""

    @property
    def tokens(self) -> int:
        """Total tokens of source and target, for comparison of micro-batches."""
        return self.rows * (self.source + self.target)


@dataclass(frozen=True)
class _Drawn:
    """Shortest, mean, expected longest and longest micro-batches of a training."""

    shortest: MicroBatchShape
    mean: MicroBatchShape
    expected: MicroBatchShape
    """Median of the longest micro-batches of simulated trainings."""
    longest: MicroBatchShape

    @property
    def differ(self) -> bool:
        """True if memory depends on the samples of a micro-batch."""
        return self.shortest != self.longest


def sample_means(
    config: Config, store: str, count: int, mixed: Sequence[DataPlan] = ()
) -> SampleMeans | None:
    """Return mean lengths of `count` training samples, None if all have `data.seq_len` tokens."""
    found = _mixed(config, mixed) or _samples(config, store, count, evaluation=False)
    if found is None:
        return None
    import numpy as np

    weights = found[2] if mixed else None  # shares of the sources
    means = [np.average(each, axis=0, weights=weights).tolist() for each in found[:2]]
    return SampleMeans(*means[0], *means[1])


def simulated_micro_batches(plan: Plan) -> _Drawn:
    """Simulate the micro-batches of a plan with grouping, packing and padding."""
    config, size = plan.config, plan.steps.num_train_samples
    found = _mixed(config, plan.sources) or _samples(config, plan.store, size, evaluation=False)
    if found is None:
        whole = _full(config, plan.batch.per_device)
        lost = isinstance(config.data, Rows | Mix)  # the prepared tokens were deleted
        return _Drawn(MicroBatchShape(whole.rows, 1, 1) if lost else whole, whole, whole, whole)
    import numpy as np

    batch, data, tokens = plan.batch, plan.config.data, found[0]
    group = batch.per_device * batch.devices  # samples that are padded together
    count = min(plan.steps.total * batch.samples_per_step, MOST_DRAWN)
    each = np.sort(tokens, axis=0)
    if plan.sources:  # a small source repeats
        each = each[[0, -1]].repeat(group, axis=0)
    ends = [_joined(data, part, group)[0] for part in (each, each[-group:])]
    means, tops = [], []
    for number in range(DRAWS):
        if plan.sources:
            sizes, shares = zip(*((s.train, s.share) for s in plan.sources), strict=True)
            tokens = found[0][sources.MixtureSampler(sizes, shares, number).take(0, count)[1]]
        order = np.arange(len(tokens))
        if data.length_grouping or not plan.sources:
            order = _sample_order(data, tokens.sum(axis=1), batch.samples_per_step, count, number)
        made = _joined(data, tokens[order], group)
        means.append(made.mean(axis=0))
        tops.append(made[np.argmax(made.sum(axis=1))])
    middle = [np.mean(means, axis=0).round(), np.median(tops, axis=0)]
    rows = 1 if data.packing is Packing.padding_free else batch.per_device
    lengths = (row.astype(int).tolist() for row in (ends[0], *middle, ends[1]))
    micros = _Drawn(*(MicroBatchShape(rows, *each) for each in lengths))
    # Only the first rows of a stream have been read.
    return replace(micros, longest=_full(config, batch.per_device)) if data.is_stream else micros


def evaluated(plan: Plan) -> MicroBatchShape:
    """Return the evaluation micro-batch with most tokens. Evaluation samples are not shuffled."""
    if plan.sources:  # each micro-batch has one source
        return max(map(evaluated, plans_of_sources(plan)), key=lambda micro: micro.tokens)
    batch, config, count = plan.batch, plan.config, plan.steps.num_eval_samples
    group = batch.eval_per_device * batch.devices
    found = _samples(config, plan.store, count, evaluation=True)
    if found is None:
        return _full(config, min(batch.eval_per_device, -(-count // batch.devices)))
    import numpy as np  # slow import, not needed for equal rows

    lengths = _joined(config.data, found[0], group)
    most = 1 if config.data.packing is Packing.padding_free else batch.eval_per_device
    rows = np.minimum(most, count - group * np.arange(len(lengths)))
    largest = int(np.argmax(rows * lengths.sum(axis=1)))
    return MicroBatchShape(int(rows[largest]), *lengths[largest].tolist())


def _full(config: Config, rows: int) -> MicroBatchShape:
    """Return a micro-batch of rows with `data.seq_len` tokens."""
    multiple = config.data.pad_to_multiple_of or 1
    target = getattr(config.task, "target_len", None) or config.data.seq_len
    together = rows if config.data.packing is Packing.padding_free else 1
    lengths = (-(-together * n // multiple) * multiple for n in (config.data.seq_len, target))
    return MicroBatchShape(rows // together, *lengths)


def _mixed(config: Config, mixed: Sequence[DataPlan]) -> "tuple[np.ndarray, ...] | None":
    """Return `_samples` of all sources with their probabilities, None if tokens are missing."""
    if not mixed:
        return None
    import numpy as np

    parts = []
    for one, source in zip(source_configs(config), mixed, strict=True):
        found = _samples(one, source.store, source.train, evaluation=False)
        if found is None and is_ragged(one):
            return None
        alike = np.tile(astuple(full_samples(one)), (source.train, 1)).astype(int)
        chances = np.full(source.train, source.share / source.train)
        parts.append((*(found or np.split(alike, [2], axis=1)), chances))
    return tuple(map(np.concatenate, zip(*parts, strict=True)))


def _sample_order(
    data: Data, lengths: "np.ndarray", samples_per_step: int, count: int, seed: int
) -> "np.ndarray":
    """Return the sample numbers of one training, as drawn by `eke.training.batches.batches`."""
    import numpy as np

    rng = np.random.default_rng(seed)
    orders = [rng.permutation(len(lengths)) for _ in range(-(-count // len(lengths)))]
    if data.length_grouping:
        sorted_together = GROUPED_STEPS * samples_per_step
        for at, order in enumerate(orders):
            for start in range(0, len(order), sorted_together):
                part = order[start : start + sorted_together]
                part[:] = part[np.argsort(-lengths[part], kind="stable")]
            whole = len(order) // samples_per_step * samples_per_step
            steps = rng.permutation(order[:whole].reshape(-1, samples_per_step))
            orders[at] = np.concatenate([steps.ravel(), order[whole:]])
    return np.concatenate(orders)[:count]


def _joined(data: Data, tokens: "np.ndarray", group: int) -> "np.ndarray":
    """Return the lengths of micro-batches of consecutive samples: padded or concatenated."""
    import numpy as np

    join = np.add if data.packing is Packing.padding_free else np.maximum
    made = join.reduceat(tokens, np.arange(0, len(tokens), group), axis=0)
    multiple = data.pad_to_multiple_of or 1
    return np.asarray(-(-made // multiple) * multiple)


_Found = tuple["np.ndarray", "np.ndarray"]
"""Tokens of source and target, (samples, 2), and products for attention: source x source,
target x target and target x source, (samples, 3)."""

_MAX_KEPT = 8
_kept: dict[str, _Found | None] = {}
"""Cache of request -> samples, for sweeps and batch=auto."""


def _samples(config: Config, store: str, count: int, *, evaluation: bool) -> _Found | None:
    """Return the samples of a split, None if all have `data.seq_len` tokens or are missing."""
    if not is_ragged(config) or not count:
        return None
    request = repr((config.data, config.task, store, count, evaluation))
    if request not in _kept:
        if len(_kept) >= _MAX_KEPT:
            _kept.clear()
        _kept[request] = _read_lengths(config.data, config.task, store, count, evaluation)
    return _kept[request]


def _read_lengths(
    data: Data, task: Task, store: str, count: int, evaluation: bool
) -> _Found | None:
    import numpy as np

    if isinstance(data, Synthetic):
        drawn = data.num_eval_samples if evaluation else data.num_samples
        number = drawn or DEFAULT_SYNTHETIC_SAMPLES if data.packing is Packing.on else count
        two = isinstance(task, Seq2SeqLM)
        longest = data.seq_len + (getattr(task, "target_len", 0) or data.seq_len) * two
        whole = sources.synthetic_lengths(data, longest, int(evaluation), number)
        cuts = np.maximum(1, whole * data.seq_len // longest) if two else whole
        packs = sources.first_fit(whole, data.seq_len) if data.packing is Packing.on else None
    else:
        folder = sources.store_folder(store)
        manifest = sources.read_manifest(folder) if store else None
        if manifest is None or manifest.streams:
            return None
        opened, split = sources.Store(folder, manifest), "evaluation" if evaluation else "train"
        rows, offsets = opened.array(split), opened.array("offsets")
        whole = offsets[rows + 1] - offsets[rows]
        cuts = opened.array("cuts")[rows] if isinstance(task, Seq2SeqLM) else whole
        packs = None
        if data.packing is Packing.on:
            parts = (opened.array(f"{split}_{name}") for name in ("members", "offsets"))
            packs = sources.PackedRows(*parts)
    source = np.asarray(cuts, np.int64)
    target = whole - source if isinstance(task, Seq2SeqLM) else source
    tokens = np.stack([source, target], axis=1)
    pairs = np.stack([source * source, target * target, target * source], axis=1)
    if packs is not None:
        first = packs.offsets[:-1]
        tokens, pairs = (np.add.reduceat(x[packs.members], first, axis=0) for x in (tokens, pairs))
    if count < len(tokens):  # as in eke.training.batches.sampler
        kept = np.arange(count) * len(tokens) // count
        tokens, pairs = tokens[kept], pairs[kept]
    return tokens, pairs
