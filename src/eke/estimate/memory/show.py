"""A forecast as text: the verdict first, then what it is made of; at most 80 columns."""

import textwrap

from eke.common.units import format_bytes
from eke.estimate.memory.advice import Advice
from eke.estimate.memory.best_forecast import known_forecast
from eke.estimate.memory.predict import highest_phase
from eke.estimate.memory.values import Forecast, Method, Verdict
from eke.models.sizes import shared_state_bytes
from eke.plan.planner import Micro, Plan, drawn

WIDTH = 80

LABELS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "master": "float32 copies of weights",
    "activations": "activations",
    "recomputed": "recomputed activations",
    "logits": "logits and loss",
    "autocast": "16-bit copies of weights",
    "temporaries": "temporaries",
    "batch": "batch",
    "buffers": "buffers of sharing",
    "workspace": "cuBLAS workspace",
    "reserve": "allocator's reserve",
    "context": "driver's context",
    "others": "all else",
}
"""Component -> how it is called."""

METHODS = {
    Method.trace: "traced",
    Method.upper_bound: "traced uncompiled",
    Method.closed_form: "by formulas",
}

WHEN = {
    "load": "while the model is loaded",
    "forward": "at the end of the forward pass",
    "backward": "in the backward pass",
    "optimizer": "while the optimizer steps",
    "evaluation": "in evaluation",
}


def render_forecast(plan: Plan, found: Forecast) -> str:
    """Verdict, range, table of components, phases, and why the range is wide."""
    lines = [_verdict_line(plan, found), _range_line(found), *calibration_lines(found), ""]
    lines += _table(found)
    lines += ["", *_phases(found), *_anatomy(plan)]
    lines += [_wrapped(f"counted: {found.basis}"), *_rows(plan)]
    lines += [_wrapped(f"not exact: {note}") for note in found.doubts]
    return "\n".join(lines)


def forecast_line(plan: Plan) -> str:
    """The forecast of a plan in one line, for a run that is about to start."""
    found = known_forecast(plan)
    peak = found.best
    return (
        f"memory: {found.verdict.value}, {format_bytes(peak.expected)} expected "
        f"({format_bytes(peak.low)} to {format_bytes(peak.high)}); eke plan says of what"
    )


def _verdict_line(plan: Plan, found: Forecast) -> str:
    words = {
        Verdict.fits: "fits",
        Verdict.tight: "tight: may not fit",
        Verdict.does_not_fit: "does not fit",
        Verdict.unknown: "unknown",
    }
    return f"memory: {words[found.verdict]}   ({_of_what(plan, found)})"


def _of_what(plan: Plan, found: Forecast) -> str:
    """What there is for it."""
    on_cpu = plan.device.kind == "cpu"
    if found.capacity is None:
        return "host memory" if on_cpu else plan.device.name
    capacity = format_bytes(found.capacity)
    if not on_cpu:
        return f"{plan.device.name}, {capacity}"
    many = plan.processes_per_node
    return f"this machine has {capacity} for " + (f"each of {many} processes" if many > 1 else "it")


def _range_line(found: Forecast) -> str:
    peak = found.best
    between = f"between {format_bytes(peak.low)} and {format_bytes(peak.high)}"
    return f"  expected {format_bytes(peak.expected)}, {between} ({METHODS[found.method]})"


def calibration_lines(found: Forecast) -> list[str]:
    """Which finished runs have corrected the forecast, and how sure it is then."""
    by = found.calibrated
    if by is None:
        return []
    runs = f"{by.num_runs} run{'s' if by.num_runs != 1 else ''} on this device"
    if by.peak is None:
        return [_wrapped(f"not calibrated: {runs} ({by.needed} needed)")]
    within = f"{100 * by.within:.2g}" if by.within < 0.095 else f"{100 * by.within:.0f}"
    text = f"calibrated by {runs} ({by.versions}): expected x {by.factor:.4g}, within +-{within} %"
    return [_wrapped(text)]


def _table(found: Forecast) -> list[str]:
    """One row a component, the largest with the longest bar."""
    phase = WHEN[highest_phase(found)]
    rows = [(LABELS.get(name, name), size) for name, size in found.components.items()]
    whole = sum(size for _, size in rows) or 1
    width = max((len(label) for label, _ in rows), default=0)
    lines = [f"  highest {phase}:"]
    for label, size in rows:
        bar = "#" * round(30 * size / whole)
        lines.append(
            f"    {label:<{width}}  {format_bytes(size):>10}  {size / whole:>4.0%}  {bar}".rstrip()
        )
    return lines


def _phases(found: Forecast) -> list[str]:
    parts = [f"{phase} {format_bytes(size)}" for phase, size in found.phases.items() if size]
    return [_wrapped(f"tensors by phase: {', '.join(parts)}")]


def _anatomy(plan: Plan) -> list[str]:
    """Bytes per parameter of what stays between steps, as the guides count them."""
    count = plan.size.num_parameters
    if not count:
        return []
    state = shared_state_bytes(plan.config, plan.size, plan.device.kind == "cpu")
    named = {
        "weights": state.weights,
        "gradients": state.gradients,
        "optimizer": state.optimizer,
        "float32 copies": state.master,
    }
    parts = [f"{size / count:.3g} {name}" for name, size in named.items() if size]
    total = sum(named.values()) / count
    return [_wrapped(f"bytes per parameter: {' + '.join(parts)} = {total:.3g}")]


def _rows(plan: Plan) -> list[str]:
    """Which rows memory and time are of, where they differ."""
    made = drawn(plan)
    if not made.differ:
        return []
    low, mean, high = (_of_rows(each) for each in (made.shortest, made.mean, made.expected))
    text = f"rows: memory of the longest micro-batch expected, {high} (low end: {low}); time of"
    tokens = plan.size.tokens_per_sample
    return [_wrapped(f"{text} the mean, {mean}; FLOPs of {tokens:.1f} tokens a sample")]


def _of_rows(micro: Micro) -> str:
    decoder = f" + {micro.target}" if micro.target != micro.source else ""
    return f"{micro.rows} x {micro.source}{decoder} tokens"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="    ")


def render_advice(found: Forecast, advice: list[Advice]) -> str:
    """What dominates, and the overrides that make room: the same training first, then another."""
    lines = [_dominant(found), ""]
    if found.verdict is Verdict.unknown:
        lines.append("The device's memory is not known: hardware=NAME declares one.")
        return "\n".join(lines)
    if not advice:
        lines += [
            "No single technique, and no two of them, make room: a smaller model, shorter samples",
            "(data.seq_len), more devices (distributed=fsdp) or a larger one (hardware=all)",
        ]
        return "\n".join(lines)
    head = "would make it fit" if found.verdict is not Verdict.fits else "would need less"
    for keeps, whose in ((True, "the same training"), (False, "another training")):
        group = [each for each in advice if each.keeps is keeps]
        if group:
            lines += [] if lines[-1] == "" else [""]
            lines.append(f"{head}, {whose}, the cheapest first:")
            lines += [line for each in group for line in _proposal(each)]
    return "\n".join(lines)


def _proposal(advice: Advice) -> list[str]:
    """What to type, what it needs and costs, and where that is known from."""
    peak = advice.forecast.best
    return [
        "",
        f"  {' '.join(advice.overrides)}",
        _indented(
            f"{format_bytes(peak.expected)} expected, at most {format_bytes(peak.high)} "
            f"({known_by(advice.forecast)}): {advice.forecast.verdict.value}"
        ),
        f"      {_cost(advice)}",
        *(_indented(f"source: {reason}") for reason in advice.reasons),
    ]


def known_by(found: Forecast) -> str:
    """How a forecast was made, in a few words."""
    by = found.calibrated
    runs = f", calibrated by {by.num_runs} runs" if by is not None and by.peak is not None else ""
    return METHODS[found.method] + runs


def _cost(advice: Advice) -> str:
    """What a step takes with it, in words."""
    changes = "" if advice.keeps else "; another training: compare its loss"
    if advice.slowdown is None:
        return f"speed depends on the machine{changes}"
    change = advice.slowdown - 1
    if abs(change) < 0.005:
        return f"as fast{changes}"
    words = f"{change:.0%} more time" if change > 0 else f"{-change:.0%} less time"
    return f"about {words} per step{changes}"


def _indented(text: str) -> str:
    return textwrap.fill(
        text, WIDTH, initial_indent="      ", subsequent_indent="        ", break_long_words=False
    )


def _dominant(found: Forecast) -> str:
    """The largest components in one sentence."""
    largest = sorted(found.components.items(), key=lambda item: -item[1])[:3]
    whole = sum(found.components.values()) or 1
    parts = [f"{LABELS.get(name, name)} {size / whole:.0%}" for name, size in largest]
    return _wrapped(f"Highest {WHEN[highest_phase(found)]}: {', '.join(parts)}.").strip()
