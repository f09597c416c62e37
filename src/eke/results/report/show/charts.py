"""Charts of a report as Vega-Lite specifications (https://vega.github.io/vega-lite/docs/).

Plain dictionaries: what a page draws, and what `vl_convert` checks in the tests. Every mark has a
tooltip. Widths follow the page, and so do the colours, which are variables of its style sheet.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from eke.common.text import GIB, MIB, format_bytes, format_seconds
from eke.config.schema.fields import Affects
from eke.results.report.compare import Comparison, ComparisonRow, OneMachine
from eke.results.report.compare.comparison import times
from eke.results.report.compare.curves import Curve, curves_of
from eke.results.report.compare.measures import (
    PEAK,
    PREDICTED,
    PREDICTED_STEP,
    SAMPLES,
    STEP,
    Measure,
    samples_seen,
)
from eke.results.report.compare.statistics import Ratio
from eke.results.report.show.table import shortened

Spec = dict[str, Any]

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"

CHARS_FOR_LABELS = 44
"""Characters of a label: the width of a chart on a phone."""

MAX_POINTS = 1000
"""Points of a scatter plot, front and baseline first."""

MAX_LABELS = 12
"""Labelled points of a scatter plot; of more, the baseline and the front are labelled."""

MAX_BARS = 24
"""Rows of a chart with bars, about a screen."""

MAX_LINES, MAX_SEEDS = 8, 10
"""Configurations of a chart of losses, one for each colour, and thin lines of each."""

CLIPPED_FRAC = 0.02
"""Fraction of a run's first steps whose losses do not widen the axis."""

NARROW = 0.05
"""Least width of an axis of values, relative to the largest: noise is not a cliff."""

FAR = 2.0
"""An interval widens the axis up to this many times the largest value, and down likewise."""


@dataclass(frozen=True)
class Chart:
    """One chart of a page."""

    title: str
    note: str
    spec: Spec
    legend: tuple[tuple[str, str], ...] = ()
    """Texts, and the names of their colours: it wraps, which one inside of the chart does not."""
    is_wide: bool = True
    is_folded: bool = False


def charts(comparison: Comparison, part: OneMachine) -> list[Chart]:
    """The charts of one machine and group that have data, the most important ones first."""
    rows = comparison.rows_of(part)
    fastest = _fastest(rows)
    losses, lines = loss_curves(rows, f"{comparison.machines.index(part)}")
    phased, names = phases(fastest)
    is_learning = part.focus is Affects.learning
    quality = next((row.quality for row in rows if row.quality.measure), None)
    word, unit = (quality.name, quality.unit) if quality else ("loss", "%")
    size, bytes_unit = _unit(rows)
    found: list[tuple[str, str, Spec | None, Sequence[tuple[str, str]], str]] = [
        (f"{word.capitalize()} against the baseline", f"{LINES} {_base(part)}",
         _loss_dots(rows, unit) if is_learning or comparison.metric else None, (), "wide"),
        ("Speed and memory", "Up and to the left is better. The steps join what nothing else beats "
         "in both. Vertical lines are the table's intervals.", scatter(rows),
         (("baseline", "ink"), ("on the front", "front"), ("behind it", "other")),
         "folded" if is_learning else "wide"),
        ("Loss over training", "Training loss, mean of the last 5 % of steps. Thick: mean over "
         "seeds. Thin: each seed. Equal losses lie on each other.", losses, lines, "wide"),
        ("Against the baseline", f"{LINES} {_base(part)}", _dots(fastest),
         (("speed", "c0"), ("memory", "c1")), ""),
        ("Time of a sample", "By the medians of a step's parts.", phased, names, ""),
        ("Predicted and measured memory", "On the line, the forecast was right.",
         _predicted(rows, PREDICTED, PEAK, size, bytes_unit, format_bytes), (), "folded"),
        ("Predicted and measured step time", "On the line, the estimate was right.",
         _predicted(rows, PREDICTED_STEP, STEP, 1, "s", format_seconds), (), "folded"),
    ]  # fmt: skip
    return [
        Chart(title, note, spec, tuple(legend), "wide" in how, "folded" in how)
        for title, note, spec, legend, how in found
        if spec
    ]


LINES = "Lines are the table's intervals."


def _base(part: OneMachine) -> str:
    return f"Baseline: {part.baseline.label}." if part.baseline else ""


def _color(name: str) -> str:
    return f"var(--{name})"


def scatter(rows: Sequence[ComparisonRow]) -> Spec | None:
    """Peak memory against samples per second, with the Pareto front."""
    size, unit = _unit(rows)
    points: list[dict[str, Any]] = [
        {"name": row.variant.label, "memory": memory.value / size, "speed": speed.value,
         **_ends(row.ratios.get(row.speed.key), speed.value), "front": row.on_front,
         "kind": _color("ink" if row.is_baseline else "front" if row.on_front else "other"),
         "text": f"{format_bytes(memory.value)}, {speed.value:.4g} {row.speed.title}"}
        for row in _first(rows, MAX_POINTS)
        if (memory := row.estimates.get(PEAK.key)) and (speed := row.estimates.get(row.speed.key))
    ]  # fmt: skip
    if len(points) < 2:
        return None
    x = _axis("memory", f"peak memory, {unit}", scale=_scale(points, "memory"))
    y = _axis("speed", rows[0].speed.title, scale=_scale(points, "speed", "low", "high"))
    color = {"field": "kind", "type": "nominal", "scale": None}
    front, marked = (
        {"filter": "datum.front"},
        points
        if len(points) <= MAX_LABELS
        else [p for p in points if p["front"] or p["kind"] == _color("ink")][:MAX_LABELS],
    )
    shape = {"condition": {"test": f"datum.kind === '{_color('ink')}'", "value": "diamond"},
             "value": "circle"}  # fmt: skip
    layers = [
        {"name": "front", "transform": [front],
         "mark": {"type": "line", "interpolate": "step-after", "color": _color("front")},
         "encoding": {"x": x, "y": y, "order": {"field": "memory"}}},
        *_whiskers(points, {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"},
                            "color": color}),
        {"name": "points", "mark": {"type": "point", "filled": True, "size": 110, "opacity": 1},
         "encoding": {"x": x, "y": y, "color": color, "shape": shape,
                      "tooltip": _tips("name", "text")}},
        # The page moves them to where no other mark is.
        {"name": "labels", "mark": {"type": "text", "dy": -12, "color": _color("ink")},
         "transform": [{"filter": {"field": "name", "oneOf": [p["name"] for p in marked]}}],
         "encoding": {"x": x, "y": y, "text": {"field": "label"}}},
    ]  # fmt: skip
    return _spec(points, 320, layer=layers)


def _ends(ratio: Ratio | None, value: float) -> dict[str, float | None]:
    """Ends of a value's whisker: those of the interval of its ratio to the baseline."""
    if ratio is None or ratio.low is None or ratio.high is None:
        return {"low": None, "high": None}
    scale = value / ratio.value
    return {"low": scale * ratio.low, "high": scale * ratio.high}


def _scale(points: Sequence[Mapping[str, Any]], key: str, *ends: str) -> Spec:
    """An axis around the values: of noise at least NARROW wide, of intervals not FAR away."""
    values = [p[key] for p in points]
    least, most = min(values), max(values)
    reached = [p[end] for p in points for end in ends if p[end] is not None]
    least = min([least, *(max(each, least / FAR) for each in reached)])
    most = max([most, *(min(each, most * FAR) for each in reached)])
    missing = max(0.0, NARROW * most - (most - least)) / 2
    around = missing + 0.06 * (most - least + 2 * missing)
    return {"zero": False, "nice": False, "domain": [max(0.0, least - around), most + around]}


def loss_curves(
    rows: Sequence[ComparisonRow], letter: str
) -> tuple[Spec | None, list[tuple[str, str]]]:
    """Training loss over steps, samples or seconds, and the legend of its lines."""
    drawn: list[tuple[ComparisonRow, list[Curve]]] = []
    for row in _first(rows, 4 * MAX_LINES):
        curves = curves_of(row.variant, MAX_SEEDS) if len(drawn) < MAX_LINES else []
        drawn += [(row, curves)] if curves else []
    if not drawn:
        return None, []
    points: list[dict[str, Any]] = []
    ends = []
    for number, (row, curves) in enumerate(drawn):
        record = row.variant.records[0]
        step = (samples_seen(record) or 0) / max(1, record.steps_done)
        mean = _mean(curves)
        thin = enumerate(curves if len(curves) > 1 else [])
        for curve, seed, most in [(mean, -1, 100), *((c, n, 50) for n, c in thin)]:
            every = math.ceil(len(curve.steps) / most)
            kept = sorted({*range(0, len(curve.steps), every), len(curve.steps) - 1})
            points += [
                {"c": number, "s": seed, "steps": curve.steps[n], "loss": float(f"{loss:.5g}"),
                 "samples": round(step * curve.steps[n]),
                 "seconds": float(f"{curve.seconds[n]:.4g}")}
                for n, loss in ((n, curve.losses[n]) for n in kept)
            ]  # fmt: skip
        ends.append((mean.losses[-1], number))
    return _lines(points, ends, [row.variant.label for row, _ in drawn], f"over_{letter}")


def _mean(curves: Sequence[Curve]) -> Curve:
    """Mean over those with the steps of the first."""
    alike = [each for each in curves if each.steps == curves[0].steps]
    losses = tuple(map(fmean, zip(*(each.losses for each in alike), strict=True)))
    seconds = tuple(map(fmean, zip(*(each.seconds for each in alike), strict=True)))
    return Curve(seconds, losses, curves[0].steps)


LINES_HEIGHT, LABEL_HEIGHT, ROW_HEIGHT = 300, 15, 44
"""Pixels."""


def _lines(
    points: list[dict[str, Any]], ends: list[tuple[float, int]], names: Sequence[str], over: str
) -> tuple[Spec, list[tuple[str, str]]]:
    short = shortened(names, CHARS_FOR_LABELS)
    known = [{"c": n, "name": name, "label": label, "color": _color(f"c{n}")}
             for n, (name, label) in enumerate(zip(names, short, strict=True))]  # fmt: skip
    late = [p for p in points if p["steps"] > CLIPPED_FRAC * max(q["steps"] for q in points)]
    scale = _scale(late, "loss")
    low, high = scale["domain"]
    apart, above, marks = (high - low) * LABEL_HEIGHT / LINES_HEIGHT, math.inf, []
    for place, (end, number) in enumerate(sorted(ends, reverse=True), 1):
        above = max(min(end, above - apart), low + (len(ends) - place) * apart)
        marks.append({**known[number], "loss": above})
    x = {"field": "x", "type": "quantitative", "title": None,
         "scale": {"nice": False, "zero": False}}  # fmt: skip
    y = _axis("loss", "training loss", scale=scale)
    color = {"field": "color", "type": "nominal", "scale": None}
    line = {"type": "line", "clip": True, "interpolate": "linear"}
    both = {"x": x, "y": y, "color": color, "detail": [{"field": "c"}, {"field": "s"}]}
    layers = [
        {"transform": [{"filter": "datum.s >= 0"}],
         "mark": {**line, "strokeWidth": 1, "opacity": 0.35}, "encoding": both},
        {"transform": [{"filter": "datum.s < 0"}],
         "mark": {**line, "strokeWidth": 2.4, "point": {"size": 30, "opacity": 0.01}},
         "encoding": {**both, "tooltip": _tips("name", "steps", "samples", "seconds", "loss")}},
        {"name": "ends", "data": {"values": marks},
         "mark": {"type": "text", "align": "left", "dx": 6},
         "encoding": {"x": {"value": "width"}, "y": y, "text": {"field": "label"}, "color": color}},
    ]  # fmt: skip
    spec = {
        **_frame(LINES_HEIGHT),
        "params": [{"name": over, "value": "steps",
                    "bind": {"input": "radio", "options": ["steps", "samples", "seconds"],
                             "name": "over"}}],
        "data": {"values": points},
        "transform": [
            {"lookup": "c", "from": {"data": {"values": known}, "key": "c",
                                     "fields": ["name", "color"]}},
            {"calculate": f"datum[{over}]", "as": "x"},
        ],
        "layer": layers,
    }  # fmt: skip
    return spec, [(label, f"c{n}") for n, label in enumerate(short)]


def phases(rows: Sequence[ComparisonRow]) -> tuple[Spec | None, list[tuple[str, str]]]:
    """Time of one sample by phase, and the legend: between steps, data, forward, ..."""
    names = list(dict.fromkeys(name for row in rows for name in row.phases))
    found = [
        {"name": row.variant.label, "phase": name, "order": names.index(name),
         "ms": 1000 * share / speed.value, "color": _color(f"p{names.index(name) % 5}"),
         "text": f"{format_seconds(share / speed.value)}, {share:.0%}"}
        for row in rows
        if (speed := row.estimates.get(SAMPLES.key))
        for name, share in row.phases.items()
    ]  # fmt: skip
    if not found:
        return None, []
    encoding = {
        "y": _names(),
        "x": _axis("ms", "ms per sample", stack=True),
        "color": {"field": "color", "type": "nominal", "scale": None},
        "order": {"field": "order"},
        "tooltip": _tips("name", "phase", "text"),
    }
    mark = {"type": "bar", "height": {"band": 0.4}, "yOffset": 7}
    height = ROW_HEIGHT * len({each["name"] for each in found})
    spec = _spec(found, height, mark=mark, encoding=encoding)
    return spec, [(name, f"p{n % 5}") for n, name in enumerate(names)]


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
        {"mark": {"type": "point", "filled": True, "size": 60, "color": _color("c0")},
         "encoding": {"x": x, "y": y, "tooltip": _tips("name", "text")}},
    ]  # fmt: skip
    return _spec(points, 260, layer=layers)


TICKS = (0.02, 0.05, 0.1, 0.25, 0.5, 0.71, 1, 1.41, 2, 4, 10, 20, 50)
"""Ratios at an axis; between a half and 2, halves of a doubling."""


def _dots(rows: Sequence[ComparisonRow]) -> Spec | None:
    """Speed and memory relative to the baseline, with intervals; None without ratios."""
    values: list[dict[str, Any]] = [
        {"name": row.variant.label, "color": _color(color), "what": what,
         "value": found.value if found else 1.0, "low": found and found.low,
         "high": found and found.high, "text": times(found) if found else "the baseline"}
        for row in rows
        for what, color, key in (("speed", "c0", row.speed.key), ("memory", "c1", PEAK.key))
        if (found := row.ratios.get(key)) or row.is_baseline
    ]  # fmt: skip
    if not any(row.ratios for row in rows):
        return None
    low, high = _scale(values, "value", "low", "high")["domain"]
    low = max(low, 0.9 * min(v["value"] for v in values) / FAR)
    axis = {"values": [tick for tick in TICKS if low <= tick <= high], "format": "~g"}
    scale = {"type": "log", "domain": [low, high], "nice": False}
    x = _axis("value", "times the baseline", axis=axis, scale=scale)
    return _marks(values, {"speed": 2, "memory": 12}, x, 1)


def _loss_dots(rows: Sequence[ComparisonRow], unit: str) -> Spec | None:
    """Difference of a loss or metric from the baseline's, with intervals."""
    values: list[dict[str, Any]] = [
        {"name": row.variant.label, "color": _color("c0"), "what": "loss",
         "value": found.estimate or 0.0, "low": found.low, "high": found.high,
         "text": found.change or "the baseline"}
        for row in _first(rows, MAX_BARS)
        if ((found := row.quality).estimate is not None and found.unit == unit) or row.is_baseline
    ]  # fmt: skip
    if len(values) < 2:
        return None
    ends = [each[key] for each in values for key in ("value", "low", "high")]
    inside = [each for each in ends if each is not None]
    around = 0.05 * (max(inside) - min(inside)) or 1.0
    scale = {"domain": [min(inside) - around, max(inside) + around], "nice": False}
    x = _axis("value", f"difference, {unit}".rstrip(", "), scale=scale)
    return _marks(values, {"loss": 7}, x, 0)


def _marks(values: Sequence[Mapping[str, Any]], down: Mapping[str, int], x: Spec, at: int) -> Spec:
    """Points with intervals below the names of their rows, by pixels, and a line at a value."""
    color = {"field": "color", "type": "nominal", "scale": None}
    layers: list[Spec] = [
        {"data": {"values": [{"value": at}]}, "mark": {"type": "rule", "strokeDash": [4, 4]},
         "encoding": {"x": x}},
    ]  # fmt: skip
    for what, pixels in down.items():
        only = [{"filter": f"datum.what === '{what}'"}]
        ends = {"y": _names(), "x": {**x, "field": "low"}, "x2": {"field": "high"}, "color": color}
        some = [value for value in values if value["what"] == what]
        layers += _whiskers(some, ends, f"whiskers_{what}", only, yOffset=pixels)
        mark = {"type": "point", "filled": True, "size": 70, "opacity": 1, "yOffset": pixels}
        tips = _tips("name", "what", "text")
        encoding = {"y": _names(), "x": x, "color": color, "tooltip": tips}
        layers.append({"transform": only, "mark": mark, "encoding": encoding})
    return _spec(values, ROW_HEIGHT * len({value["name"] for value in values}), layer=layers)


def _whiskers(
    values: Sequence[Mapping[str, Any]],
    encoding: Spec,
    name: str = "whiskers",
    transform: Sequence[Spec] = (),
    **more: Any,
) -> list[Spec]:
    """Layer of intervals; none if no value has one."""
    if not any(value["low"] is not None for value in values):
        return []
    mark = {"type": "rule", "clip": True, **more}
    filled = [*transform, {"filter": "isValid(datum.low)"}]
    return [{"name": name, "transform": filled, "mark": mark, "encoding": encoding}]


def _axis(field: str, title: str, **more: Any) -> Spec:
    return {"field": field, "type": "quantitative", "title": title, **more}


def _names() -> dict[str, Any]:
    """Names above their bars: they need no room to the left, and are never cut."""
    axis = {"labelAlign": "left", "labelBaseline": "bottom", "labelOffset": -8, "labelPadding": -3,
            "labelLimit": 0, "ticks": False, "domain": False, "labelColor": _color("ink"),
            "zindex": 1}  # fmt: skip
    return {"field": "label", "type": "nominal", "title": None, "sort": None, "axis": axis}


def _tips(*fields: str) -> list[dict[str, str]]:
    return [{"field": field, "title": field} for field in fields]


def _frame(height: int) -> Spec:
    return {
        "$schema": SCHEMA,
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
    }


def _spec(values: Sequence[Mapping[str, Any]], height: int, **rest: Any) -> Spec:
    """A chart of values, with shortened labels; tooltips have the full name."""
    names = list(dict.fromkeys(value["name"] for value in values))
    short = shortened(names, CHARS_FOR_LABELS)
    labels = dict(zip(names, short if len(set(short)) == len(names) else names, strict=True))
    return {
        **_frame(height),
        "data": {
            "values": [
                {**value, "label": labels[value["name"]], "number": names.index(value["name"]) + 1}
                for value in values
            ]
        },
        **rest,
    }


def _unit(rows: Sequence[ComparisonRow]) -> tuple[int, str]:
    """Bytes and name of a readable unit for the largest peak."""
    peaks = [found.value for row in rows if (found := row.estimates.get(PEAK.key))]
    return (GIB, "GiB") if max(peaks, default=0) >= GIB else (MIB, "MiB")


def _first(rows: Sequence[ComparisonRow], count: int) -> list[ComparisonRow]:
    """The first rows: baseline, front, then the fastest others."""

    def rank(row: ComparisonRow) -> tuple[bool, bool, float]:
        speed = row.estimates.get(row.speed.key)
        return not row.is_baseline, not row.on_front, -(speed.value if speed else 0.0)

    return sorted(rows, key=rank)[:count]


def _fastest(rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """Rows by decreasing speed; of many, the baseline, the front and the fastest."""
    kept = [row for row in _first(rows, MAX_BARS) if row.estimates]
    return sorted(kept, key=lambda r: -(s.value if (s := r.estimates.get(r.speed.key)) else 0.0))
