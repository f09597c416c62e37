"""Tokens of a row as it is computed: with its padding, on average over a training."""

from dataclasses import replace
from math import exp
from statistics import NormalDist

from eke.corpus.lengths import median, shortest
from eke.forecast.shape import Shape
from eke.pace.values import Span, exactly
from eke.plan import Plan
from eke.schema import Lengths, Packing, PythonSource, Seq2SeqLM, Synthetic, Text

UNKNOWN_LENGTHS = "how long the samples are is not looked at: between a quarter full and full"
QUARTER = 0.25
"""Low end where lengths are not looked at: an assumption."""


def share_of_length(plan: Plan, shape: Shape) -> tuple[Span, str]:
    """How full rows are, padding counted: 1 where all have `data.seq_len` tokens; and a note.

    A micro-batch is as long as its longest sample. Of `n` draws from a distribution that is about
    its quantile n / (n + 1) (David & Nagaraja 2003, Order Statistics, section 4.5).
    """
    data = plan.config.data
    if isinstance(data, PythonSource | Text) or data.packing is Packing.on:
        return exactly(1.0), ""
    if not isinstance(data, Synthetic):
        return Span(QUARTER, 0.5, 1.0), UNKNOWN_LENGTHS
    if data.lengths is Lengths.fixed:
        return exactly(1.0), ""
    alone = data.packing is Packing.padding_free
    rows = max(1, plan.batch.per_device if alone else shape.rows)
    mean = _quantile(data, 0.5)
    longest = _quantile(data, rows / (rows + 1))
    expected = mean if alone or (data.length_grouping and rows > 1) else longest
    low, high = min(mean, expected), max(longest, expected)
    note = "rows differ in length: the mean over a training is an estimate"
    return Span(low / data.seq_len, expected / data.seq_len, high / data.seq_len), note


def _quantile(data: Synthetic, share: float) -> float:
    low, high = shortest(data), data.seq_len
    if data.lengths is Lengths.uniform:
        return low + share * (high - low)
    drawn = median(data) * exp(data.sigma * NormalDist().inv_cdf(share))
    return min(max(drawn, low), high)


def at_length(plan: Plan, shape: Shape, share: float) -> Shape:
    """The shape with rows that full; T5's targets follow."""
    source = max(1, round(shape.source * share))
    target = max(1, round(shape.target * share))
    task = plan.config.task
    if isinstance(task, Seq2SeqLM) and task.target_len:
        target = shape.target
    return replace(shape, source=source, target=target if shape.decoder_layers else source)
