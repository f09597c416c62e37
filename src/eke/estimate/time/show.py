"""The time model's answers as text, always called an estimate; at most 80 columns."""

import textwrap
from collections.abc import Sequence

from eke.common.units import format_count, format_number, format_seconds
from eke.estimate.time.values import PARTS, Span, StepTime, Unknown, total

WIDTH = 80

TITLE = "step time (estimate)"


def render_time(found: StepTime | Unknown, kind: str) -> str:
    """Step, what limits it, rates, the whole run, and how sure all of it is.

    Args:
        found: of a plan.
        kind: of its device: `cuda` or `cpu`.
    """
    if isinstance(found, Unknown):
        return _filled(f"{TITLE}: unknown: {found.reason}", "", "  ")
    step = found.step_s
    lines = [
        f"{TITLE}: {_seconds(step)}",
        _wrapped(f"limited by {found.limit} ({_shares(found)})"),
        _wrapped(_rates(found)),
        _wrapped(_whole(found, kind)),
        _wrapped(f"by {found.basis}{_calibration(found)}"),
    ]
    return "\n".join([*lines, *(_wrapped(f"not exact: {note}") for note in found.notes)])


def time_line(found: StepTime | Unknown, kind: str) -> str:
    """The same in one line, for a run that is about to start."""
    if isinstance(found, Unknown):
        return f"{TITLE}: unknown; {found.reason}"
    hours = f"about {_hours(found.gpu_hours.expected)} {_unit(kind)}"
    return f"{TITLE}: {_seconds(found.step_s)}; this run: {hours}"


def speed_cell(found: StepTime | Unknown) -> str:
    """Samples per second as a range; empty where nothing is known."""
    if isinstance(found, Unknown):
        return ""
    rate = found.samples_per_s
    return f"{_number(rate.low)} to {_number(rate.high)}"


def sum_line(found: Sequence[StepTime | Unknown], kind: str) -> str:
    """Device-hours of many runs, and how many of them have no estimate.

    Args:
        found: of each run of a sweep.
        kind: of their devices.
    """
    known = [each.gpu_hours for each in found if isinstance(each, StepTime)]
    unknown = [each.reason for each in found if isinstance(each, Unknown)]
    lines = []
    if known:
        whole = total(known)
        text = (
            f"{_unit(kind)} (estimate): about {_hours(whole.expected)} "
            f"({_hours(whole.low)} to {_hours(whole.high)}) for {format_number(len(known), 'run')}"
            ", training steps alone"
        )
        lines.append(_filled(text, "", "  "))
    if unknown:
        text = f"without an estimate: {format_number(len(unknown), 'run')}: {unknown[0]}"
        lines.append(_filled(text, "", "  "))
    return "\n".join(lines)


def _seconds(step: Span) -> str:
    return (
        f"{format_seconds(step.low)} to {format_seconds(step.high)}, "
        f"expected {format_seconds(step.expected)}"
    )


def _shares(found: StepTime) -> str:
    whole = sum(found.parts.values()) or 1.0
    largest = sorted(found.parts.items(), key=lambda item: -item[1])
    shown = [(name, seconds) for name, seconds in largest if seconds >= 0.005 * whole]
    words = [f"{PARTS[name]} {seconds / whole:.0%}" for name, seconds in shown[1:]]
    first = f"{shown[0][1] / whole:.0%}" if shown else "0%"
    return ", ".join([f"{first} of it", *words])


def _rates(found: StepTime) -> str:
    samples, tokens = found.samples_per_s, found.tokens_per_s
    parts = [
        f"{_number(samples.low)} to {_number(samples.high)} samples/s",
        f"{format_count(tokens.low)} to {format_count(tokens.high)} tokens/s",
    ]
    if found.mfu is not None:
        parts.append(f"MFU {found.mfu.low:.0%} to {found.mfu.high:.0%}")
    return ", ".join(parts)


def _whole(found: StepTime, kind: str) -> str:
    hours = found.gpu_hours
    return (
        f"this run: {format_seconds(found.total_s.expected)}, about {_hours(hours.expected)} "
        f"{_unit(kind)} ({_hours(hours.low)} to {_hours(hours.high)}), training steps alone"
    )


def _calibration(found: StepTime) -> str:
    by = found.calibrated
    if by is None:
        return ""
    runs = f"{by.num_runs} run{'s' if by.num_runs != 1 else ''} on this device"
    if not by.is_used:
        return f"; not calibrated: {runs} ({by.needed} needed)"
    return f"; calibrated by {runs} ({by.versions}): x {by.factor:.3g}, within +-{by.within:.0%}"


def _unit(kind: str) -> str:
    return "CPU-hours" if kind == "cpu" else "GPU-hours"


def _hours(hours: float) -> str:
    return f"{hours:.2g}" if hours < 10 else f"{hours:,.0f}"


def _number(rate: float) -> str:
    if rate >= 1000:
        return f"{rate / 1000:.3g}k"
    return f"{rate:.2g}" if rate < 10 else f"{rate:.0f}"


def _wrapped(text: str) -> str:
    return _filled(text, "  ", "    ")


def _filled(text: str, first: str, rest: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=rest)
