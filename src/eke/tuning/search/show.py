"""Text output of a search: before, during and after it."""

from eke.common.text import align, format_bytes, format_number, format_seconds
from eke.estimate.memory import Verdict
from eke.plan.planner import Plan
from eke.plan.record import Outcome
from eke.rules.techniques import Numerics
from eke.tuning.search.candidates import Candidate, Candidates
from eke.tuning.search.result import LESS, Fit, Gain
from eke.tuning.search.search import Measured, Search, is_higher
from eke.tuning.search.search_space import UNSTEADY, Objective

ALLOWS = {
    Numerics.same: "formats as typed",
    Numerics.mixed: "16-bit or TF32 products over float32 weights allowed",
    Numerics.reduced: "bfloat16 weights, float8 products and 8-bit states allowed",
}

BETTER = {
    Objective.speed: "as fast as your configuration",
    Objective.memory: "less peak memory than your configuration",
    Objective.cost: "as much for the same device-seconds as your configuration",
}

WAITING = 0.05
"""Share of a step that waits for data from which on it is worth saying."""
AGAIN = "Again on a quiet one: paths.runs=ANOTHER_FOLDER"

SHOWN = 8
"""Lines of what would be tried: by default as many as there are trials."""

NAMED = 3
"""Configurations that are named before the others are counted."""


def short_name(candidate: Candidate, baseline: Plan) -> str:
    """Difference of a candidate from the baseline, without the rest of the batch."""
    own = [text for value in candidate.values for text in value.overrides]
    if candidate.plan.batch.per_device != baseline.batch.per_device:
        own.append(f"batch.per_device={candidate.plan.batch.per_device}")
    return " ".join(own) or "as typed"


def describe_candidates(candidates: Candidates, baseline: Plan, numerics: Numerics) -> str:
    """Number of candidates, and those excluded."""
    refused = sum(candidates.refused.values())
    rules = sorted(candidates.refused.items(), key=lambda item: -item[1])
    lines = [
        f"eke fit: {format_number(len(candidates.found), 'configuration')} of "
        f"{format_number(candidates.num_sets, 'set')} of techniques on {baseline.device.name}",
        f"  kept: {format_number(baseline.batch.samples_per_step, 'sample')} per step; "
        f"{ALLOWS[numerics]}",
    ]
    if refused:
        most = ", ".join(f"{rule} ({count})" for rule, count in rules[:3])
        lines.append(f"  refused by rules: {format_number(refused, 'set')}: {most}")
    if candidates.too_large:
        lines.append(f"  cannot fit: {format_number(candidates.too_large, 'configuration')}")
    tight = sum(candidate.point.room is Verdict.tight for candidate in candidates.found)
    if tight:
        lines.append(f"  may not fit: {format_number(tight, 'configuration')}")
    known = sum(candidate.point.expected_s is not None for candidate in candidates.found)
    if not known:
        lines.append("  no estimate of their speed: trials alone decide")
    elif known < len(candidates.found):
        lines.append(f"  their speed: estimated of {known}, the others judged by these")
    return "\n".join(lines)


BY_MEDIAN = "step is the median, and samples/s by it; eke report divides all samples by all seconds"
"""A slow step in twenty moves one and not the other."""


def describe_trial(trial: Measured, candidate: Candidate) -> str:
    """One line about a trial that has ended."""
    if trial.trial.step_s is None:
        return f"{trial.outcome}: {trial.reason}" if trial.reason else trial.outcome
    parts = [f"{format_seconds(trial.steady_s or 0)} a step"]
    if candidate.point.expected_s:
        parts.append(f"expected {format_seconds(candidate.point.expected_s)}")
    if trial.trial.peak_bytes:
        parts.append(format_bytes(trial.trial.peak_bytes))
    if trial.compile_s >= 1:
        parts.append(f"compiled for {format_seconds(trial.compile_s)}")
    if trial.shared:
        parts.append("beside another process, which may have slowed it")
    return ", ".join(parts)


def describe_fit(fit: Fit, baseline: Plan) -> str:
    """The end: the best configuration, how sure that is, and all that was measured."""
    if fit.diverges:
        fix = "clip by train.max_grad_norm, or let formats change by --numerics mixed"
        why = "your configuration diverges, and so does every numerically equivalent one"
        return f"{why}: lower optimizer.lr, {fix}"
    if {trial.outcome for trial in fit.trials} == {Outcome.diverged.value}:
        return "all trials diverged: lower optimizer.lr, or clip by train.max_grad_norm"
    if fit.best is None:
        return "nothing could be measured; the trials' logs say why"
    lines = [_verdict(fit, fit.gain, baseline), ""]
    lines += [f"  {line}" for line in results_table(fit, baseline)]
    lines += [f"  {BY_MEDIAN}"]
    lines += [f"  {note}" for note in notes(fit, baseline)]
    return "\n".join(lines)


def _verdict(fit: Fit, gain: Gain | None, baseline: Plan) -> str:
    assert fit.best is not None
    name = short_name(fit.best.candidate, baseline)
    if gain is None:
        return f"best of what could be measured: {name} (your configuration could not)"
    if fit.best is fit.typed:
        return "your configuration is the best that was found"
    between = f" ({gain.low:.2f} to {gain.high:.2f})" if gain.high > gain.low else ""
    if not gain.is_resolved:
        return f"not resolved: {name} is {gain.factor:.2f}x{between} {BETTER[gain.of]}"
    price = _price(fit, gain) if fit.objective is Objective.memory else ""
    return f"best: {name}: {gain.factor:.2f}x{between} {BETTER[gain.of]}{price}"


def _price(fit: Fit, gain: Gain) -> str:
    """Time cost of the memory saved, if any."""
    assert fit.best is not None
    assert fit.typed is not None
    if gain.of is Objective.memory:
        return f"; a step takes {fit.best.step_s / fit.typed.step_s:.2f} times as long"
    more = (fit.best.peak_bytes or 1) / (fit.typed.peak_bytes or 1) - 1
    return f"; its peak is {more:.1%} higher" if more >= LESS else "; the peak is the same"


def results_table(fit: Fit, baseline: Plan) -> list[str]:
    """A line for each configuration that was measured, the best first."""
    rows = [
        (
            format_seconds(standing.step_s),
            f"{standing.samples_per_s:.4g}",
            format_bytes(standing.peak_bytes) if standing.peak_bytes else "",
            str(len(standing.tried)),
            short_name(standing.candidate, baseline),
        )
        for standing in fit.standings
    ]
    return align([("step", "samples/s", "peak", "trials", "configuration"), *rows], right=range(4))


def notes(fit: Fit, baseline: Plan) -> list[str]:
    """Notes below the table."""
    found = []
    total = format_number(baseline.steps.total, "step")
    if any(trial.compile_s >= 1 and trial.trial.compiling_s for trial in fit.trials):
        found.append(f"steps include their share of compiling, once for {total}")
    if rivals := fit.rivals:
        names = ", ".join(short_name(each.candidate, baseline) for each in rivals[:NAMED])
        more = f" and {format_number(len(rivals) - NAMED, 'other')}" if len(rivals) > NAMED else ""
        found.append(f"these trials do not tell it from {names}{more}")
    if fit.best is not None and fit.best is not fit.typed and len(fit.best.tried) == 1:
        found.append("the best was tried once: --budget-trials leaves no trial that confirms it")
    if doubt := _doubt(fit):
        found.append(f"{doubt}: was the machine busy? {AGAIN}")
    failed = [trial for trial in fit.trials if trial.trial.step_s is None]
    for trial in failed:
        name = short_name(fit.candidates.found[trial.number], baseline)
        found.append(f"{trial.outcome}: {name}: {trial.reason}")
    if fit.best is not None:
        waits = max((each.data_frac or 0 for each in fit.best.tried), default=0)
        if waits > WAITING:
            found.append(f"{waits:.0%} of a step waits for data: dataloader=workers may help")
        found += _about_loss(fit)
    if fit.further_gain:
        more = f"the same command with --budget-trials {2 * len(fit.trials)} goes on from these"
        found.append(f"one more trial was expected to gain {fit.further_gain:.1%}: {more}")
    return found


def _doubt(fit: Fit) -> str:
    """By how much what was measured may be off, where that is worth saying."""
    if fit.between > UNSTEADY:
        return f"trials of one configuration differ by {fit.between:.0%} (standard deviation)"
    spread = max((trial.trial.spread for trial in fit.trials), default=0)
    if spread > UNSTEADY:
        return f"steps of one trial differ so much that its median may be {spread:.0%} off"
    return ""


def _about_loss(fit: Fit) -> list[str]:
    """Whether the best configuration learns the same in the few steps of a trial."""
    assert fit.best is not None
    best, typed = fit.best.tried[0].loss, fit.typed.tried[0].loss if fit.typed else None
    if best is None or typed is None or fit.best is fit.typed:
        return []
    higher = "higher, which this class of numerics allows"
    verdict = higher if is_higher(best, typed) else "no higher"
    return [f"its loss after a trial is {verdict}: {best:.4f}, as typed {typed:.4f}"]


def likely(candidates: Candidates, search: Search, baseline: Plan) -> str:
    """Planned trials, as known before the first one."""
    if not any(candidate.point.expected_s for candidate in candidates.found):
        first = search.next()
        names = [short_name(candidates.found[number], baseline) for number in first]
        return f"would try first: {', '.join(names)}; without an estimate, trials lead from there"
    alike: dict[tuple[str, str], list[str]] = {}
    expected_s = search.expected_s()
    for number in search.by_expectation():
        candidate = candidates.found[number]
        seconds = format_seconds(expected_s[number])
        peak = format_bytes(candidate.forecast.peak.expected)
        alike.setdefault((seconds, peak), []).append(short_name(candidate, baseline))
    lines = ["the best by estimate, of which trials would be made:", ""]
    for (seconds, peak), names in list(alike.items())[:SHOWN]:
        others = format_number(len(names) - 1, "other")
        alike_too = f"   (or {others}, by estimate alike)" if len(names) > 1 else ""
        lines.append(f"  {seconds:>8}  {peak:>10}  {min(names, key=len)}{alike_too}")
    if any(candidate.point.compiling_s for candidate in candidates.found):
        total = format_number(baseline.steps.total, "step")
        lines.append(f"  steps include their share of compiling, once for {total}")
    return "\n".join(lines)
