"""Text output of a search: before, during and after it."""

from eke.common.screen import width, wrap
from eke.common.table import Column, render_table
from eke.common.text import format_bytes, format_number, format_seconds
from eke.estimate.memory import Verdict
from eke.plan.planner import Plan
from eke.plan.record import Outcome
from eke.rules.techniques import Numerics
from eke.tuning.search.candidates import Candidate, Candidates
from eke.tuning.search.result import MEMORY_TIE_FRACTION, Fit, Gain, all_diverge
from eke.tuning.search.search import Measured, Search, is_higher
from eke.tuning.search.search_space import MAX_REPEAT_STD, Objective

_ALLOWS = {
    Numerics.same: "formats unchanged",
    Numerics.mixed: "16-bit or TF32 products over float32 weights allowed",
    Numerics.reduced: "bfloat16 weights, float8 products and 8-bit states allowed",
}

_BETTER = {
    Objective.speed: "as fast as the baseline",
    Objective.memory: "less peak memory than the baseline",
    Objective.cost: "as many samples per device-second as the baseline",
}


def short_name(candidate: Candidate, baseline: Plan) -> str:
    """Return the difference of a candidate from the baseline, without the rest of the batch."""
    own = [text for value in candidate.values for text in value.overrides]
    if candidate.plan.batch.per_device != baseline.batch.per_device:
        own.append(f"batch.per_device={candidate.plan.batch.per_device}")
    return " ".join(own) or "baseline"


def describe_candidates(candidates: Candidates, baseline: Plan, numerics: Numerics) -> str:
    """Return the number of candidates and of excluded configurations as text."""
    refused = sum(candidates.refused.values())
    rules = sorted(candidates.refused.items(), key=lambda item: -item[1])
    lines = [
        f"eke fit: {format_number(len(candidates.found), 'configuration')} of "
        f"{format_number(candidates.num_sets, 'set')} of techniques on {baseline.device.name}",
        f"  kept: {format_number(baseline.batch.samples_per_step, 'sample')} per step, "
        f"{_ALLOWS[numerics]}",
    ]
    if refused:
        most = ", ".join(f"{rule} ({count})" for rule, count in rules[:3])
        lines.append(f"  rejected by rules: {format_number(refused, 'set')}: {most}")
    if candidates.too_large:
        lines.append(f"  cannot fit: {format_number(candidates.too_large, 'configuration')}")
    tight = sum(candidate.point.verdict is Verdict.tight for candidate in candidates.found)
    if tight:
        lines.append(f"  may not fit: {format_number(tight, 'configuration')}")
    known = sum(candidate.point.expected_s is not None for candidate in candidates.found)
    if not known:
        lines.append("  no estimate of their speed: only trials decide")
    elif known < len(candidates.found):
        lines.append(f"  speed: estimated for {known}, inferred for the others")
    return "\n".join(lines)


_BY_MEDIAN = "step, samples/s: by the median step. eke report divides all samples by all seconds"
"""Note on a difference to the report: one slow step in twenty changes its mean, not the median."""


def describe_trial(trial: Measured, candidate: Candidate) -> str:
    """Return one line about a trial that has ended."""
    if trial.trial.step_s is None:
        return f"{trial.outcome}: {trial.reason}" if trial.reason else trial.outcome
    parts = [f"{format_seconds(trial.steady_s or 0)} per step"]
    if candidate.point.expected_s:
        parts.append(f"expected {format_seconds(candidate.point.expected_s)}")
    if trial.trial.peak_bytes:
        parts.append(format_bytes(trial.trial.peak_bytes))
    if trial.compile_s >= 1:
        parts.append(f"compiled for {format_seconds(trial.compile_s)}")
    if trial.shared:
        parts.append("the device was shared, which may have slowed it")
    return ", ".join(parts)


def describe_fit(fit: Fit, baseline: Plan, columns: int = 10_000, prose: int = 10_000) -> str:
    """Return the result: the best configuration, its significance, and all measurements.

    `columns` is the width of the table, `prose` of the notes: of a terminal, or without limit.
    """
    if all_diverge(fit.trials, fit.candidates.first, fit.numerics):
        fix = "set train.max_grad_norm, or allow other formats with --numerics mixed"
        why = "the baseline diverges, as does every numerically equivalent one"
        return f"{why}. Lower optimizer.lr, {fix}"
    if {trial.outcome for trial in fit.trials} == {Outcome.diverged.value}:
        return "all trials diverged. Lower optimizer.lr, or set train.max_grad_norm"
    if fit.best is None:
        return "no trial could be measured. The trials' logs have the reasons"
    texts = [_BY_MEDIAN, *notes(fit, baseline)]
    lines = [_verdict(fit, fit.gain, baseline), "", *_results_table(fit, baseline, columns)]
    return "\n".join([*lines, *(line for text in texts for line in wrap(text, prose, "  "))])


def _verdict(fit: Fit, gain: Gain | None, baseline: Plan) -> str:
    assert fit.best is not None
    name = short_name(fit.best.candidate, baseline)
    if gain is None:
        return f"best measured: {name} (the baseline could not be measured)"
    if fit.best is fit.typed:
        return "the baseline is the best configuration found"
    between = f" ({gain.low:.2f} to {gain.high:.2f})" if gain.high > gain.low else ""
    if not gain.is_resolved:
        return f"not significant: {name} is {gain.factor:.2f}x{between} {_BETTER[gain.of]}"
    price = _price(fit, gain) if fit.objective is Objective.memory else ""
    return f"best: {name}: {gain.factor:.2f}x{between} {_BETTER[gain.of]}{price}"


def _price(fit: Fit, gain: Gain) -> str:
    assert fit.best is not None
    assert fit.typed is not None
    if gain.of is Objective.memory:
        return f", a step takes {fit.best.step_s / fit.typed.step_s:.2f} times as long"
    more = (fit.best.peak_bytes or 1) / (fit.typed.peak_bytes or 1) - 1
    is_same = more < MEMORY_TIE_FRACTION
    return ", the peak is the same" if is_same else f", its peak is {more:.1%} higher"


def _results_table(fit: Fit, baseline: Plan, columns: int) -> list[str]:
    """Return a line for each measured configuration, the best first."""
    every, samples = fit.standings, baseline.batch.samples_per_step  # of each candidate
    peaks = [format_bytes(each.peak_bytes) if each.peak_bytes else "" for each in every]
    shown = [
        Column("step", [format_seconds(each.step_s) for each in every], True, 0),
        Column("samples/s", [f"{samples / each.step_s:.4g}" for each in every], True, 2),
        Column("peak", peaks, True, 3),
        Column("trials", [str(len(each.tried)) for each in every], True, 4),
        Column("configuration", [short_name(each.candidate, baseline) for each in every]),
    ]
    return render_table(shown, columns)


def notes(fit: Fit, baseline: Plan) -> list[str]:
    """Return the notes below the table."""
    found = []
    total = format_number(baseline.steps.total, "step")
    if any(trial.compile_s >= 1 and trial.trial.compiling_s for trial in fit.trials):
        found.append(f"steps include their share of compiling, once for {total}")
    if rivals := fit.rivals:
        names = ", ".join(short_name(each.candidate, baseline) for each in rivals[:3])
        more = f" and {format_number(len(rivals) - 3, 'other')}" if len(rivals) > 3 else ""
        found.append(f"not significantly better than {names}{more}")
    if fit.best is not None and fit.best is not fit.typed and len(fit.best.tried) == 1:
        found.append("the best was tried once: --budget-trials leaves no trial to confirm it")
    if doubt := _measurement_error(fit):
        again = "To repeat it on an idle machine: paths.runs=ANOTHER_FOLDER"
        found.append(f"{doubt}: was the machine busy? {again}")
    failed = [trial for trial in fit.trials if trial.trial.step_s is None]
    for trial in failed:
        name = short_name(fit.candidates.found[trial.number], baseline)
        found.append(f"{trial.outcome}: {name}: {trial.reason}")
    if fit.best is not None:
        waits = max((each.data_frac or 0 for each in fit.best.tried), default=0)
        if waits > 0.05:
            found.append(f"{waits:.0%} of a step is waiting for data: dataloader=workers may help")
        found += _about_loss(fit)
    if fit.further_gain:
        more = f"to continue from these: --budget-trials {2 * len(fit.trials)}"
        found.append(f"one more trial was expected to gain {fit.further_gain:.1%}: {more}")
    return found


def _measurement_error(fit: Fit) -> str:
    """Return how far measurements may be off, "" if that is little."""
    if fit.between > MAX_REPEAT_STD:
        return f"trials of one configuration differ by {fit.between:.0%} (standard deviation)"
    spread = max((trial.trial.spread for trial in fit.trials), default=0)
    if spread > MAX_REPEAT_STD:
        return f"steps of one trial differ so much that its median may be {spread:.0%} off"
    return ""


def _about_loss(fit: Fit) -> list[str]:
    assert fit.best is not None
    best, typed = fit.best.tried[0].loss, fit.typed.tried[0].loss if fit.typed else None
    if best is None or typed is None or fit.best is fit.typed:
        return []
    higher = "higher, which these numerics allow"
    verdict = higher if is_higher(best, typed) else "no higher"
    return [f"its loss after a trial is {verdict}: {best:.4f}, baseline {typed:.4f}"]


def likely(candidates: Candidates, search: Search, baseline: Plan) -> str:
    """Return the planned trials, before the first one, as text."""
    if not any(candidate.point.expected_s for candidate in candidates.found):
        first = search.next()
        names = [short_name(candidates.found[number], baseline) for number in first]
        return f"first trial: {', '.join(names)}. Without an estimate, its result decides the next"
    alike: dict[tuple[str, str], list[str]] = {}
    expected_s = search.expected_s()
    for number in search.by_expectation():
        candidate = candidates.found[number]
        seconds = format_seconds(expected_s[number])
        peak = format_bytes(candidate.forecast.peak.expected)
        alike.setdefault((seconds, peak), []).append(short_name(candidate, baseline))
    lines = ["best configurations by estimate, from which trials are chosen:", ""]
    for (seconds, peak), names in list(alike.items())[:8]:  # by default, a search has 8 trials
        others = format_number(len(names) - 1, "other")
        alike_too = f" (or {others} with this estimate)" if len(names) > 1 else ""
        lines += wrap(f"{min(names, key=len)}{alike_too}", width(), f"  {seconds:>8}  {peak:>10}  ")
    if any(candidate.point.compiling_s for candidate in candidates.found):
        total = format_number(baseline.steps.total, "step")
        lines.append(f"  steps include their share of compiling, once for {total}")
    return "\n".join(lines)
