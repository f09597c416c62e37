"""End of a run: the result first, then what was measured, what is kept and the next command."""

import shlex
from collections.abc import Iterator
from itertools import starmap
from pathlib import Path

from eke.common.files import is_trusted
from eke.common.paths import RunPaths, short_path
from eke.common.screen import fields, is_quiet, is_verbose, paint, width, wrap
from eke.common.text import format_bytes, format_count, format_number, format_range, format_seconds
from eke.plan.record import EXIT_RESUMABLE, Outcome, Record
from eke.plan.record.metrics import format_metric
from eke.results.report.summary import (
    SHARED,
    advice_lines,
    loss_lines,
    phase_shares,
    render_summary,
)

_Row = tuple[str, str]
"""Name and text of a field."""


def result_lines(record: Record, folder: Path, recorded: bool = False, note: str = "") -> list[str]:
    """Return the end of a run as lines. `recorded`: the record of an earlier command."""
    outcome, shown = Outcome[record.outcome], short_path(folder)
    lines = _headline(record, outcome, shown, recorded)
    if is_quiet():
        return lines
    name = shlex.quote(shown)
    if is_verbose():
        lines += render_summary(record, shown).splitlines()
    else:
        rows = [*_result_rows(record, outcome), *_kept_rows(folder, outcome)]
        lines += fields(rows, width(), 2)
        warnings, most = [*([SHARED] if record.shared_device else []), *record.warnings], 3
        left = len(warnings) - most
        texts = warnings[:most] + ([f"and {left} more: -v"] if left > 0 else [])
        lines += fields([(paint("warning", "yellow"), text) for text in texts], width(), 2)
    lines += wrap(note.strip(), width()) if note else []
    for command in _next_commands(record, outcome, folder):
        is_short = len(command) + 6 <= width()
        lines += [f"next: {command}"] if is_short else ["next:", command]
    more = f"all figures: eke show {name}"
    return [*lines, paint(more if is_verbose() else f"{more}   (or -v)", "dim")]


def _headline(record: Record, outcome: Outcome, folder: str, recorded: bool) -> list[str]:
    color = "yellow" if outcome.exit_code == EXIT_RESUMABLE else "red"
    word = paint(record.outcome, f"bold {'green' if outcome is Outcome.ok else color}")
    total = record.plan["steps"]["total"]
    text = f"{record.steps_done} of {format_number(total, 'step')}"
    if outcome is Outcome.ok and record.steps_done == total:
        text = format_number(total, "step")
    if record.timing.train_s is not None:
        text += f" in {format_seconds(record.timing.train_s)}"
    if recorded:
        day = str(record.environment.get("time", "")).partition("T")[0]
        again = "; rerun=true trains again" if outcome.is_final else ""
        text += f" (recorded{f' {day}' if day else ''}{again})"
    if is_quiet():
        loss = record.loss.eval_final
        text += f", eval loss {loss:.4f}" if loss is not None else ""
        text += f": {record.failure.message}" if record.failure else ""
        return [f"{word}  {text}  {folder}"]
    return wrap(text, width(), f"{word}  ", "  ")


def _result_rows(record: Record, outcome: Outcome) -> Iterator[_Row]:
    if record.failure:
        yield "cause", record.failure.message
    if record.attempt:
        yield "attempts", f"{record.attempt + 1}, earlier ones were interrupted"
    for name, value, note in advice_lines(record):
        yield name, "  ".join(filter(None, (value, note)))
    if losses := [*loss_lines(record.loss)]:  # the evaluation's, else the training's
        name, value, bits = losses[-1]
        yield name, f"{value}  ({bits})" if bits else value
    if record.best:
        yield "best", f"step {record.best.step} by {record.best.metric}: its figures are shown"
    if record.metrics:
        yield "metrics", ", ".join(starmap(format_metric, record.metrics.items()))
    if record.steps_done:
        yield from _speed_rows(record)
    if outcome is not Outcome.oom:
        yield from _memory_rows(record)


def _memory_rows(record: Record) -> Iterator[_Row]:
    memory, predicted = record.memory.measured, record.memory.predicted
    if memory is None or not (peak := memory.peak_allocated_bytes):
        return
    text = f"{format_bytes(peak)} peak"
    if predicted is not None and predicted.allocated_bytes:
        error = predicted.allocated_bytes / peak - 1
        text += f" (forecast {format_bytes(predicted.allocated_bytes)}, {error:+.1%})"
    if memory.peak_reserved_bytes is not None:
        text += f", {format_bytes(memory.peak_reserved_bytes)} reserved"
    peaks = [each for each in memory.peak_per_rank_bytes or () if each is not None]
    if len(peaks) > 8:  # one line has place for the memory of each
        text += f", the largest of {len(peaks)} processes, {format_bytes(sum(peaks))} in all"
    elif peaks:
        text += f", by process: {', '.join(map(format_bytes, peaks))}"
    yield "memory", text


def _speed_rows(record: Record) -> Iterator[_Row]:
    timing, rates = record.timing, record.throughput
    step = timing.steady_step_s
    if step is None:
        warmup = len(timing.warmup_steps_s)
        why = "ranks or micro-batches changed during the run"
        if warmup >= record.steps_done:
            why = f"{format_number(warmup, 'step')}, and all are warm-up"
        yield "speed", f"not measured: {why}"
        return
    if rates.samples_per_s is not None:
        text = f"{rates.samples_per_s:.2f} samples/s"
        if rates.tokens_per_s is not None:
            text += f", {format_count(rates.tokens_per_s)} tokens/s"
        mfu = "" if rates.mfu_frac is None else f", MFU {rates.mfu_frac:.1%}"
        yield "speed", text + mfu
    between = format_range(format_seconds(step.p10), format_seconds(step.p90))
    text = f"{format_seconds(step.median)} ({between}, {format_number(step.n, 'step')})"
    predicted = timing.predicted_step_s
    if predicted is not None and not record.shared_device and step.median > 0:
        error = predicted.expected / step.median - 1
        text += f", forecast {format_seconds(predicted.expected)} ({error:+.0%})"
    shares = ", ".join(phase_shares(record, least=0.02))
    yield "step", f"{text}: {shares}" if shares else text


def _kept_rows(folder: Path, outcome: Outcome) -> Iterator[_Row]:
    paths = RunPaths(folder)
    model = paths.model.exists()
    if outcome is Outcome.ok:
        missing = "" if model else "  (no model: train.save_final=false)"
        yield "saved", f"{short_path(folder)}{missing}"
        return
    kept = "checkpoint and " if model or any(paths.checkpoints.glob("step-*")) else ""
    yield "kept", f"{short_path(folder)}  ({kept}{paths.log.name})"


def _next_commands(record: Record, outcome: Outcome, folder: Path) -> Iterator[str]:
    """Yield the commands to go on with, as typed in a shell."""
    name = shlex.quote(short_path(folder))
    is_mine = is_trusted(RunPaths(folder).record)  # do not suggest another user's command
    if outcome is Outcome.ok and RunPaths(folder).model.exists():
        task = record.choices.get("task")
        if task not in ("causal_lm", "seq2seq_lm"):
            yield f"eke evaluate {name}"
        else:
            code = record.choices.get("data") == "python_source"
            yield f'eke generate {name} "{"def main" if code else "Hello"}"'
    elif outcome is Outcome.ok:
        yield f"eke report {name}"
    elif not is_mine:
        yield f"eke logs {name}"
    elif outcome is Outcome.oom and record.memory.advice:
        yield _repeat_command(record.command, record.memory.advice[0].split())
    elif outcome is Outcome.diverged:
        rate = record.config.get("optimizer", {}).get("lr")
        if isinstance(rate, int | float):
            yield _repeat_command(record.command, [f"optimizer.lr={rate / 10:g}"])
    elif outcome is Outcome.crashed:
        yield f"eke logs {name}"
        yield shlex.join(record.command)
    elif outcome.exit_code == EXIT_RESUMABLE:
        yield shlex.join(record.command)


def _repeat_command(command: list[str], overrides: list[str]) -> str:
    """Return a command with further overrides, which replace those of the same keys."""
    keys = {text.partition("=")[0] for text in overrides}
    kept = [text for text in command if text.lstrip("+").partition("=")[0] not in keys]
    return shlex.join([*kept, *overrides])
