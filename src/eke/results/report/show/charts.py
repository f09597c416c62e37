"""Charts of a report as Vega-Lite specifications (https://vega.github.io/vega-lite/docs/).

Plain dictionaries: what a page draws, and what `vl_convert` checks in the tests. Every mark has a
tooltip; sizes follow the page.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from eke.common.text import GIB, MIB, format_bytes, format_seconds
from eke.results.report.compare import Comparison, ComparisonRow, OneMachine
from eke.results.report.compare.comparison import times
from eke.results.report.compare.measures import (
    PEAK,
    PREDICTED,
    PREDICTED_STEP,
    SAMPLES,
    STEP,
    Measure,
)
from eke.results.report.compare.statistics import Ratio
from eke.results.report.show.sections import shortened

Spec = dict[str, Any]

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"

COLORS = ["#1f77b4", "#ff7f0e"]
"""Colours of speed and memory; readable on light and dark pages and by the colour-blind."""

CHARS_FOR_LABELS = 44
"""Characters of a bar's label: half of the chart's width."""

MAX_POINTS = 1000
"""Points of a scatter plot, front and baseline first."""

MAX_BARS = 40
"""Bars of a chart, about a screen."""

MAX_LINES = 12
"""Lines of a chart; more cannot be distinguished."""


def charts(comparison: Comparison) -> list[tuple[str, str, Spec]]:
    """Title, note and specification of every chart with data."""
    found: list[tuple[str, str, Spec | None]] = []
    for part in comparison.machines:
        rows, where = comparison.rows_of(part), comparison.suffix(part)
        baseline = part.baseline.label if part.baseline else "none"
        found += [
            (f"{title}{where}", note, spec)
            for title, note, spec in (
                ("Speed and memory", "Up and to the left is better. The line joins what nothing "
                 "else beats in both.", scatter(rows)),
                ("Against the baseline", f"The baseline is {baseline}. Lines are 95 % intervals "
                 "over repeats.", _dots((r.variant.label, r.ratios) for r in _fastest(rows))),
                ("What each technique does", "All pairs that differ in nothing else.",
                 effects(part)),
                ("One upon another", "Each bar adds one technique.",
                 _dots((f"+ {added}", row.ratios) for row, added in part.ladder)),
                ("Loss over time", "Training loss over the time of the steps alone, one run each.",
                 loss_curves(rows)),
                ("Where a step's time goes", "Per sample, by the medians of a step's parts.",
                 phases(rows)),
                ("Predicted and measured memory", "On the line, the forecast was right.",
                 _predicted(rows, PREDICTED, PEAK, *_unit(rows), format_bytes)),
                ("Predicted and measured step time", "On the line, the estimate was right.",
                 _predicted(rows, PREDICTED_STEP, STEP, 1, "s", format_seconds)),
            )
        ]  # fmt: skip
    return [(title, note, spec) for title, note, spec in found if spec]


def scatter(rows: Sequence[ComparisonRow]) -> Spec | None:
    """Peak memory against samples per second, with the Pareto front."""
    size, unit = _unit(rows)
    points = [
        {"name": row.variant.label, "memory": memory.value / size, "speed": speed.value,
         **_ends(row.ratios.get(SAMPLES.key), speed.value), "front": row.on_front,
         "kind": "baseline" if row.is_baseline else "front" if row.on_front else "other",
         "text": f"{format_bytes(memory.value)}, {speed.value:.4g} samples/s"}
        for row in _first(rows, MAX_POINTS)
        if (memory := row.estimates.get(PEAK.key)) and (speed := row.estimates.get(SAMPLES.key))
    ]  # fmt: skip
    if len(points) < 2:
        return None
    scale = {"zero": False, "padding": 12}
    x = _axis("memory", f"peak memory, {unit}", scale=scale)
    y = _axis("speed", "samples/s", scale=scale)
    kinds = {"domain": ["baseline", "front", "other"], "range": ["#d62728", "#2ca02c", "#7f9fbf"]}
    front = {"filter": "datum.front"}
    color = {"field": "kind", "scale": kinds, "title": None}
    layers = [
        {"transform": [front], "mark": {"type": "line", "color": "#2ca02c", "opacity": 0.5},
         "encoding": {"x": x, "y": y, "order": {"field": "memory"}}},
        *_whiskers(points, {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"},
                            "color": color}),
        {"mark": {"type": "point", "filled": True, "size": 80},
         "encoding": {"x": x, "y": y, "color": color, "tooltip": _tips("name", "text")}},
    ]  # fmt: skip
    return _spec(points, 280, layer=layers)


def _ends(ratio: Ratio | None, value: float) -> dict[str, float | None]:
    """Ends of a value's whisker: those of the interval of its ratio to the baseline."""
    if ratio is None or ratio.low is None or ratio.high is None:
        return {"low": None, "high": None}
    scale = value / ratio.value
    return {"low": scale * ratio.low, "high": scale * ratio.high}


def effects(part: OneMachine) -> Spec | None:
    """Main effects of every factor's values; None for a single factor."""
    if len({effect.factor for effect in part.effects}) < 2:
        return None
    return _dots((f"{e.factor}={e.value}", e.ratios) for e in part.effects[:MAX_BARS])


def loss_curves(rows: Sequence[ComparisonRow]) -> Spec | None:
    """Training loss over seconds of steps."""
    drawn = [row for row in _first(rows, len(rows)) if row.curve][:MAX_LINES]
    points = [
        {"name": row.variant.label, "seconds": second, "loss": loss}
        for row in drawn
        if row.curve
        for second, loss in zip(row.curve.seconds, row.curve.losses, strict=True)
    ]
    if not points:
        return None
    x = _axis("seconds", "seconds of training")
    y = _axis("loss", "training loss", scale={"zero": False})
    color = {"field": "label", "type": "nominal", "title": None, "sort": None,
             "legend": {"orient": "bottom", "columns": 1, "labelLimit": 500, "symbolOpacity": 1,
                        "symbolType": "stroke"}}  # fmt: skip
    mark = {"type": "line", "strokeWidth": 1.6, "point": {"size": 12, "opacity": 0.01}}
    tips = _tips("name", "seconds", "loss")
    return _spec(points, 300, mark=mark, encoding={"x": x, "y": y, "color": color, "tooltip": tips})


def phases(rows: Sequence[ComparisonRow]) -> Spec | None:
    """Time of one sample spent between steps, waiting for data, in forward, backward, optimizer."""
    found = [
        {"name": row.variant.label, "phase": name, "order": order, "seconds": share / speed.value,
         "text": f"{format_seconds(share / speed.value)}, {share:.0%}"}
        for row in _fastest(rows, baseline=True)
        if (speed := row.estimates.get(SAMPLES.key))
        for order, (name, share) in enumerate(row.phases.items())
    ]  # fmt: skip
    if not found:
        return None
    encoding = {
        "y": _names(),
        "x": _axis("seconds", "seconds per sample", stack=True),
        "color": {"field": "phase", "type": "nominal", "title": None, "sort": None,
                  "legend": {"orient": "top"}},
        "order": {"field": "order"},
        "tooltip": _tips("name", "phase", "text"),
    }  # fmt: skip
    return _spec(found, _height(found), mark={"type": "bar"}, encoding=encoding)


def _predicted(
    rows: Sequence[ComparisonRow],
    expected: Measure,
    measure: Measure,
    size: int,
    unit: str,
    text: Callable[[float], str],
) -> Spec | None:
    points = [
        {"name": row.variant.label, "measured": found.value / size, "predicted": told.value / size,
         "text": f"{text(told.value)} predicted, {text(found.value)} measured"}
        for row in _first(rows, MAX_POINTS)
        if (found := row.estimates.get(measure.key)) and (told := row.estimates.get(expected.key))
    ]  # fmt: skip
    if len(points) < 2:
        return None
    end = 1.05 * max(float(str(p[key])) for p in points for key in ("measured", "predicted"))
    x, y = (_axis(name, f"{name}, {unit}") for name in ("measured", "predicted"))
    diagonal = {"values": [{"measured": 0, "predicted": 0}, {"measured": end, "predicted": end}]}
    layers = [
        {"data": diagonal, "mark": {"type": "line", "strokeDash": [4, 4], "opacity": 0.5},
         "encoding": {"x": x, "y": y}},
        {"mark": {"type": "point", "filled": True, "size": 60},
         "encoding": {"x": x, "y": y, "tooltip": _tips("name", "text")}},
    ]  # fmt: skip
    return _spec(points, 260, layer=layers)


def _dots(named: Iterable[tuple[str, Mapping[str, Ratio]]]) -> Spec | None:
    """Speed and memory relative to the baseline, with intervals; None without ratios."""
    values = [
        {"name": name, "what": what, "ratio": found.value, "low": found.low, "high": found.high,
         "text": f"{times(found)}, {found.decision.value}"}
        for name, ratios in named
        for what, key in (("x speed", SAMPLES.key), ("x memory", PEAK.key))
        if (found := ratios.get(key))
    ]  # fmt: skip
    if not values:
        return None
    x = _axis("ratio", "times the baseline", scale={"type": "log"})
    color = {"field": "what", "type": "nominal", "title": None, "legend": {"orient": "top"},
             "scale": {"domain": ["x speed", "x memory"], "range": COLORS}}  # fmt: skip
    offset = {"field": "what", "sort": ["x speed", "x memory"]}
    layers = [
        {"data": {"values": [{"ratio": 1}]}, "mark": {"type": "rule", "strokeDash": [4, 4]},
         "encoding": {"x": x}},
        *_whiskers(values, {"y": _names(), "yOffset": offset, "x": {**x, "field": "low"},
                            "x2": {"field": "high"}, "color": color}),
        {"mark": {"type": "point", "filled": True, "size": 70},
         "encoding": {"y": _names(), "yOffset": offset, "x": x, "color": color,
                      "tooltip": _tips("name", "what", "text")}},
    ]  # fmt: skip
    return _spec(values, _height(values), layer=layers)


def _whiskers(values: Sequence[Mapping[str, Any]], encoding: Spec) -> list[Spec]:
    """Layer of intervals; none if no value has one."""
    if not any(value["low"] is not None for value in values):
        return []
    filled = {"filter": "isValid(datum.low)"}
    return [{"transform": [filled], "mark": {"type": "rule"}, "encoding": encoding}]


def _axis(field: str, title: str, **more: Any) -> Spec:
    return {"field": field, "type": "quantitative", "title": title, **more}


def _names() -> dict[str, Any]:
    return {"field": "label", "type": "nominal", "title": None, "sort": None,
            "axis": {"labelLimit": 300}}  # fmt: skip


def _tips(*fields: str) -> list[dict[str, str]]:
    return [{"field": field, "title": field} for field in fields]


def _spec(values: Sequence[Mapping[str, Any]], height: Any, **rest: Any) -> Spec:
    """A chart of values, with shortened labels; tooltips have the full name."""
    names = list(dict.fromkeys(value["name"] for value in values))
    short = shortened(names, CHARS_FOR_LABELS)
    labels = dict(zip(names, short if len(set(short)) == len(names) else names, strict=True))
    return {
        "$schema": SCHEMA,
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "data": {"values": [{**value, "label": labels[value["name"]]} for value in values]},
        **rest,
    }


def _height(values: Sequence[Mapping[str, Any]]) -> int:
    return 30 * len({value["name"] for value in values})


def _unit(rows: Sequence[ComparisonRow]) -> tuple[int, str]:
    """Bytes and name of a readable unit for the largest peak."""
    peaks = [found.value for row in rows if (found := row.estimates.get(PEAK.key))]
    return (GIB, "GiB") if max(peaks, default=0) >= GIB else (MIB, "MiB")


def _first(rows: Sequence[ComparisonRow], count: int) -> list[ComparisonRow]:
    """The first rows: baseline, front, then the fastest others."""

    def rank(row: ComparisonRow) -> tuple[bool, bool, float]:
        speed = row.estimates.get(SAMPLES.key)
        return not row.is_baseline, not row.on_front, -(speed.value if speed else 0.0)

    return sorted(rows, key=rank)[:count]


def _fastest(rows: Sequence[ComparisonRow], baseline: bool = False) -> list[ComparisonRow]:
    """Rows by decreasing speed, of many the front and the fastest; without or with `baseline`."""
    kept = [r for r in _first(rows, MAX_BARS) if r.estimates and (baseline or not r.is_baseline)]
    return sorted(kept, key=lambda r: -(s.value if (s := r.estimates.get(SAMPLES.key)) else 0.0))
