"""Charts of a report as Vega-Lite specifications (https://vega.github.io/vega-lite/docs/).

Every mark has a tooltip. Widths follow the page. Colors are variables of its style sheet.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean
from typing import Any

from eke.common.text import GIB, MIB, format_bytes, format_seconds
from eke.config.schema.fields import Affects
from eke.results.report.compare import Comparison, ComparisonRow, MachineComparison
from eke.results.report.compare.comparison import times
from eke.results.report.compare.curves import Curve, curves_of
from eke.results.report.compare.measures import PEAK, SAMPLE_SPEED, samples_seen
from eke.results.report.show.table import ranked, shortened

_Spec = dict[str, Any]
_Values = list[dict[str, Any]]

CHARS_FOR_LABELS = 44
"""Characters of a label: the width of a chart on a phone."""

_MAX_BARS = 12
"""Rows of a chart, about a screen."""

_FAR = 2.0
"""Largest factor by which an interval widens an axis."""

_FRONT = (("baseline", "ink"), ("Pareto front", "front"), ("other", "other"))


@dataclass(frozen=True)
class _Chart:
    """One chart of a page."""

    title: str
    note: str
    spec: _Spec
    """Specification, empty without data."""
    legend: Sequence[tuple[str, str]] = ()
    """Texts and names of colors. The legend is outside of the chart, where it wraps."""
    is_wide: bool = False


def charts(comparison: Comparison, part: MachineComparison) -> list[_Chart]:
    """Return the charts with data of one machine and group, the most important first."""
    rows = ranked(comparison, part.rows)
    losses, lines = _loss_curves(rows, f"{comparison.machines.index(part)}")
    kept = [row for row in rows[:_MAX_BARS] if row.estimates]
    fastest = sorted(kept, key=lambda r: -(s.value if (s := r.estimates.get(r.speed.key)) else 0.0))
    phased, names = phases(fastest)
    quality = next((row.quality for row in rows if row.quality.measure), rows[0].quality)
    intervals = "Lines: intervals of the table."
    intervals += f" Baseline: {part.baseline.label}." if part.baseline else ""
    found = [
        _Chart("Speed and memory", "Better: up and to the left. Line: Pareto front. Vertical "
              "lines: intervals of the table.", _scatter(rows),
              _FRONT if any(row.on_front for row in rows) else _FRONT[:1], True),
        _Chart("Loss over training", "Training loss, mean of the last 5 % of steps. Thick lines: "
              "mean over seeds. Thin lines: one seed each.", losses, lines, True),
        _Chart("Relative to the baseline", intervals, _ratios(fastest),
              (("speed", "c0"), ("memory", "c1"))),
        _Chart("Time of a step", "Medians of its phases.", phased, names),
    ]  # fmt: skip
    if part.focus is Affects.learning or comparison.metric:
        title = f"{quality.name.capitalize()} relative to the baseline"
        first = _Chart(title, intervals, _losses(rows, quality.unit), is_wide=True)
        found = [first, *found[1:], *([] if part.focus is Affects.learning else found[:1])]
    return [chart for chart in found if chart.spec]


def _scatter(rows: Sequence[ComparisonRow]) -> _Spec:
    """Return speed over peak memory, with the Pareto front, of at most 1,000 rows."""
    peaks = [found.value for row in rows if (found := row.estimates.get(PEAK.key))]
    size, unit = (GIB, "GiB") if max(peaks, default=0) >= GIB else (MIB, "MiB")
    points: _Values = []
    for row in rows[:1000]:
        memory, speed = (row.estimates.get(key) for key in (PEAK.key, row.speed.key))
        if memory and speed:
            # The whisker is the interval of the ratio to the baseline.
            ratio = row.ratios.get(row.speed.key)
            scale = speed.value / ratio.value if ratio else 1.0
            ends = (ratio.low, ratio.high) if ratio else (None, None)
            low, high = (None if end is None else scale * end for end in ends)
            kind = "ink" if row.is_baseline else "front" if row.on_front else "other"
            points.append(
                {"name": row.variant.label, "memory": memory.value / size, "speed": speed.value,
                 "low": low, "high": high, "front": row.on_front, "color": _color(kind),
                 "text": f"{format_bytes(memory.value)}, {speed.value:.4g} {row.speed.title}"}
            )  # fmt: skip
    if len(points) < 2:
        return {}
    x = _axis("memory", f"peak memory, {unit}", scale=_scale(points, "memory"))
    y = _axis("speed", rows[0].speed.title, scale=_scale(points, "speed", "low", "high"))
    shape = {"condition": {"test": f"datum.color === '{_color('ink')}'", "value": "diamond"},
             "value": "circle"}  # fmt: skip
    front = {"type": "line", "interpolate": "step-after", "color": _color("front")}
    layers = [
        *([{"name": "front", "transform": [{"filter": "datum.front"}], "mark": front,
            "encoding": {"x": x, "y": y, "order": {"field": "memory"}}}]
          if any(point["front"] for point in points) else []),
        *_whiskers(points, {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"},
                            "color": _COLOR}),
        {"name": "points", "mark": {"type": "point", "filled": True, "size": 110, "opacity": 1},
         "encoding": {"x": x, "y": y, "color": _COLOR, "shape": shape,
                      "tooltip": _tips("name", "text")}},
        # The page moves the labels to free places.
        {"name": "labels", "mark": {"type": "text", "dy": -12},
         "transform": [{"filter": {"field": "name",
                                   "oneOf": [point["name"] for point in points[:_MAX_BARS]]}}],
         "encoding": {"x": x, "y": y, "text": {"field": "label"}}},
    ]  # fmt: skip
    return _spec(points, 320, layer=layers)


def _scale(points: _Values, key: str, *ends: str) -> _Spec:
    """Return an axis around the values, at least 5 % wide: noise must not look like an effect."""
    values = [p[key] for p in points]
    reached = [p[end] for p in points for end in ends if p[end] is not None]
    least = min([*values, *(max(each, min(values) / _FAR) for each in reached)])
    most = max([*values, *(min(each, max(values) * _FAR) for each in reached)])
    missing = max(0.0, 0.05 * most - (most - least)) / 2
    around = missing + 0.06 * (most - least + 2 * missing)
    return {"zero": False, "nice": False, "domain": [max(0.0, least - around), most + around]}


def _loss_curves(rows: Sequence[ComparisonRow], number: str) -> tuple[_Spec, list[tuple[str, str]]]:
    """Return the training loss over steps, samples or seconds, and the legend of part `number`."""
    most = 8  # one configuration for each color
    read = ((row, curves_of(row.variant, most=10)) for row in rows[: 4 * most])
    drawn = list(islice(((row, curves) for row, curves in read if curves), most))
    if not drawn:
        return {}, []
    short = shortened([row.variant.label for row, _ in drawn], CHARS_FOR_LABELS)
    points: _Values = []
    known: _Values = []
    for n, (row, curves) in enumerate(drawn):
        record, mean = row.variant.records[0], _mean(curves)
        known.append(
            {"c": n, "name": row.variant.label, "label": short[n], "color": _color(f"c{n}"),
             "each": (samples_seen(record) or 0) / max(1, record.steps_done),
             "end": mean.losses[-1]}
        )  # fmt: skip
        for seed, curve in enumerate([mean, *(curves if len(curves) > 1 else [])]):
            every = math.ceil(len(curve.steps) / (40 if seed else 100))
            columns = zip(curve.steps, curve.losses, curve.seconds, strict=True)
            points += [
                {"c": n, "s": seed, "steps": done, "loss": float(f"{loss:.5g}"),
                 "seconds": float(f"{seconds:.4g}")}
                for place, (done, loss, seconds) in enumerate(columns)
                if place % every == 0 or done == curve.steps[-1]
            ]  # fmt: skip
    legend = [(label, f"c{n}") for n, label in enumerate(short)]
    return _lines(points, known, f"over_{number}"), legend


def _mean(curves: Sequence[Curve]) -> Curve:
    """Return the mean over the curves with the steps of the first."""
    alike = [each for each in curves if each.steps == curves[0].steps]
    losses = tuple(map(fmean, zip(*(each.losses for each in alike), strict=True)))
    seconds = tuple(map(fmean, zip(*(each.seconds for each in alike), strict=True)))
    return Curve(seconds, losses, curves[0].steps)


def _lines(points: _Values, known: _Values, over: str) -> _Spec:
    # The first 2 % of a run's steps do not widen the axis.
    first = 0.02 * max(point["steps"] for point in points)
    scale = _scale([point for point in points if point["steps"] > first], "loss")
    low, high = scale["domain"]
    height, label_height = 300, 15  # pixels
    apart, above, marks = (high - low) * label_height / height, math.inf, []
    for place, line in enumerate(sorted(known, key=lambda line: -line["end"]), 1):
        above = max(min(line["end"], above - apart), low + (len(known) - place) * apart)
        marks.append({**line, "loss": above})
    x = _axis("x", "", scale={"nice": False, "zero": False})
    y = _axis("loss", "training loss", scale=scale)
    both: _Spec = {"x": x, "y": y, "color": _COLOR, "detail": [{"field": "c"}, {"field": "s"}]}
    tips = _tips("name", "steps", "samples", "seconds", "loss")
    thin = {"type": "line", "clip": True, "strokeWidth": 1, "opacity": 0.35}
    layers: list[_Spec] = [
        *([{"transform": [{"filter": "datum.s > 0"}], "encoding": both, "mark": thin}]
          if any(point["s"] for point in points) else []),
        {"transform": [{"filter": "datum.s === 0"}], "encoding": {**both, "tooltip": tips},
         "mark": {"type": "line", "clip": True, "strokeWidth": 2.4,
                  "point": {"size": 30, "opacity": 0.01}}},
        {"name": "ends", "data": {"values": marks},
         "mark": {"type": "text", "align": "left", "dx": 6},
         "encoding": {"x": {"value": "width"}, "y": y, "text": {"field": "label"},
                      "color": _COLOR}},
    ]  # fmt: skip
    bind = {"input": "radio", "options": ["steps", "samples", "seconds"], "name": "over"}
    names = {"data": {"values": known}, "key": "c", "fields": ["name", "color", "each"]}
    return {
        **_frame(height),
        "params": [{"name": over, "value": "steps", "bind": bind}],
        "data": {"values": points},
        "transform": [
            {"lookup": "c", "from": names},
            {"calculate": "round(datum.steps * datum.each)", "as": "samples"},
            {"calculate": f"datum[{over}]", "as": "x"},
        ],
        "layer": layers,
    }


def phases(rows: Sequence[ComparisonRow]) -> tuple[_Spec, list[tuple[str, str]]]:
    """Return the time of one sample or token by phase (data, forward, ...), and the legend."""
    names = list(dict.fromkeys(name for row in rows for name in row.phases))
    colors = {name: f"p{n * 4 // max(1, len(names) - 1)}" for n, name in enumerate(names)}
    found: _Values = [
        {"name": row.variant.label, "phase": name, "order": names.index(name),
         "time": share / speed.value * (1e3 if row.speed is SAMPLE_SPEED else 1e6),
         "color": _color(colors[name]),
         "text": f"{format_seconds(share / speed.value)}, {share:.0%}"}
        for row in rows
        if (speed := row.estimates.get(row.speed.key))
        for name, share in row.phases.items()
    ]  # fmt: skip
    if not found:
        return {}, []
    unit = "ms per sample" if rows[0].speed is SAMPLE_SPEED else "µs per token"
    encoding = {
        "y": _NAMES,
        "x": _axis("time", unit, stack=True),
        "color": _COLOR,
        "order": {"field": "order"},
        "tooltip": _tips("name", "phase", "text"),
    }
    mark = {"type": "bar", "height": {"band": 0.4}, "yOffset": 7}
    return _spec(found, 0, mark=mark, encoding=encoding), list(colors.items())


def _ratios(rows: Sequence[ComparisonRow]) -> _Spec:
    """Return speed and memory relative to the baseline, with intervals."""
    values: _Values = [
        {"name": row.variant.label, "color": _color(color), "what": what,
         "value": found.value if found else 1.0, "low": found and found.low,
         "high": found and found.high, "text": times(found) if found else "the baseline"}
        for row in rows
        for what, color, key in (("speed", "c0", row.speed.key), ("memory", "c1", PEAK.key))
        if (found := row.ratios.get(key)) or row.is_baseline
    ]  # fmt: skip
    if not any(row.ratios for row in rows):
        return {}
    low, high = _scale(values, "value", "low", "high")["domain"]
    low = max(low, 0.9 * min(value["value"] for value in values) / _FAR)
    # Halves of a doubling between 0.5 and 2.
    every = (0.02, 0.05, 0.1, 0.25, 0.5, 0.71, 1, 1.41, 2, 4, 10, 20, 50)
    ticks = [tick for tick in every if low <= tick <= high]
    axis = {"format": "~g", **({"values": ticks} if len(ticks) > 2 else {})}
    scale = {"type": "log", "domain": [low, high], "nice": False}
    x = _axis("value", "relative to the baseline", axis=axis, scale=scale)
    return _dots(values, {"speed": 2, "memory": 12}, x, 1)


def _losses(rows: Sequence[ComparisonRow], unit: str) -> _Spec:
    """Return the difference of a loss or metric from the baseline, with intervals."""
    values: _Values = [
        {"name": row.variant.label, "color": _color("c0"), "what": "loss",
         "value": found.estimate or 0.0, "low": found.low, "high": found.high,
         "text": found.change or "the baseline"}
        for row in rows[:_MAX_BARS]
        if ((found := row.quality).estimate is not None and found.unit == unit) or row.is_baseline
    ]  # fmt: skip
    x = _axis("value", f"difference, {unit}".rstrip(", "))
    return _dots(values, {"loss": 7}, x, 0) if len(values) > 1 else {}


def _dots(values: _Values, down: Mapping[str, int], x: _Spec, at: int) -> _Spec:
    """Return points with intervals some pixels below the rows' names, and a line at a value."""
    layers: list[_Spec] = [
        {"data": {"values": [{"value": at}]}, "mark": {"type": "rule", "strokeDash": [4, 4]},
         "encoding": {"x": x}},
    ]  # fmt: skip
    for what, pixels in down.items():
        only = [{"filter": f"datum.what === '{what}'"}]
        mark = {"type": "point", "filled": True, "size": 70, "opacity": 1, "yOffset": pixels}
        encoding = {"y": _NAMES, "x": x, "color": _COLOR, "tooltip": _tips("name", "what", "text")}
        layers.append({"transform": only, "mark": mark, "encoding": encoding})
        ends = {"y": _NAMES, "x": {**x, "field": "low"}, "x2": {"field": "high"}, "color": _COLOR}
        layers += _whiskers(values, ends, only, yOffset=pixels)
    return _spec(values, 0, layer=layers)


def _whiskers(
    values: _Values, encoding: _Spec, transform: Sequence[_Spec] = (), **more: Any
) -> list[_Spec]:
    """Return the layer of intervals if a value has one."""
    if not any(value["low"] is not None for value in values):
        return []
    mark = {"type": "rule", "clip": True, **more}
    filled = [*transform, {"filter": "isValid(datum.low)"}]
    return [{"transform": filled, "mark": mark, "encoding": encoding}]


def _color(name: str) -> str:
    return f"var(--{name})"


def _axis(field: str, title: str, **more: Any) -> _Spec:
    return {"field": field, "type": "quantitative", "title": title or None, **more}


_COLOR = {"field": "color", "type": "nominal", "scale": None}

_NAMES = {
    "field": "label", "type": "nominal", "title": None, "sort": None,
    "axis": {"labelAlign": "left", "labelBaseline": "bottom", "labelOffset": -8, "labelPadding": -3,
             "labelLimit": 0, "ticks": False, "domain": False, "labelColor": _color("ink"),
             "zindex": 1},
}  # fmt: skip
"""Names above their bars, where they are not cut."""


def _tips(*fields: str) -> list[dict[str, str]]:
    return [{"field": field, "title": field} for field in fields]


def _frame(height: int) -> _Spec:
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
    }


def _spec(values: _Values, height: int, **rest: Any) -> _Spec:
    """Return a chart with shortened labels. Without a height, each row has 44 pixels."""
    names = list(dict.fromkeys(value["name"] for value in values))
    labels = dict(zip(names, shortened(names, CHARS_FOR_LABELS), strict=True))
    labelled = [{**v, "label": labels[v["name"]], "number": f"{names.index(v['name']) + 1}"}
                for v in values]  # fmt: skip
    return {**_frame(height or 44 * len(names)), "data": {"values": labelled}, **rest}
