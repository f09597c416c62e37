"""Summary of a finished run, names of a sweep's runs, and the planning progress line.

Lines without a measured number are omitted.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from eke.common.output import raw_stream
from eke.common.screen import fields, width, wrap
from eke.common.table import Column
from eke.common.text import (
    format_bytes,
    format_count,
    format_flops,
    format_number,
    format_seconds,
)
from eke.plan.record import EXIT_RESUMABLE, Loss, Outcome, Record

_Line = tuple[str, str, str]
"""Quantity, value and explanation."""

SHARED = "another process used the device: no speed above is a measurement"
"""Warning of a run on a shared device."""


def group_figures(record: Record) -> dict[str, list[_Line]]:
    """Return all figures of a record: group -> lines."""
    groups = {
        "run": _outcome_lines(record),
        "speed": _speed_lines(record),
        "memory": _memory_lines(record),
        "loss": _loss_lines(record),
        "computation": _effective_lines(record.effective, record.timing.compile_s),
    }
    return {group: lines for group, found in groups.items() if (lines := [*found])}


def render_summary(record: Record, folder: str) -> str:
    """Return all figures of a record in the terminal's width."""
    lines = [line for group in group_figures(record).values() for line in group]
    lines.append(("record", folder, ""))
    rows = [(name, "  ".join(filter(None, (value, note)))) for name, value, note in lines]
    text = fields(rows, width(), 2)
    warnings = [*record.warnings, *([SHARED] if record.shared_device else [])]
    text += [line for each in warnings for line in wrap(f"warning: {each}", width(), "  ", "    ")]
    return "\n".join(text)


def _outcome_lines(record: Record) -> Iterator[_Line]:
    yield "steps", f"{record.steps_done} of {record.plan['steps']['total']}", ""
    if record.attempt:
        yield "attempts", str(record.attempt + 1), "earlier ones were interrupted"
    if record.failure:
        yield "why", record.failure.message, ""
    if Outcome[record.outcome].exit_code == EXIT_RESUMABLE:
        yield "next", "the same command continues", ""


def _speed_lines(record: Record) -> Iterator[_Line]:
    timing, rates = record.timing, record.throughput
    if timing.train_s is not None:
        names = ("start-up", "evaluation", "checkpoints")
        parts = zip(names, (timing.startup_s, timing.eval_s, timing.checkpoint_s), strict=True)
        rest = ", ".join(f"{format_seconds(seconds)} {what}" for what, seconds in parts if seconds)
        yield "time", format_seconds(timing.train_s), f"besides {rest}" if rest else ""
    if rates.samples_per_s is not None:
        tokens = f"{format_count(rates.tokens_per_s)} tokens/s" if rates.tokens_per_s else ""
        yield "samples/second", f"{rates.samples_per_s:.2f}", tokens
    if step := timing.steady_step_s:
        between = f"{format_seconds(step.p10)} to {format_seconds(step.p90)}, n={step.n}"
        shares = "  ".join(phase_shares(record))
        yield "step", f"{format_seconds(step.median)}  ({between})", shares
        yield from _predicted_step_lines(record, step.median)
        if warmup := timing.warmup_steps_s:
            slowest, steps = format_seconds(max(warmup)), format_number(len(warmup), "step")
            note = f"{steps}, slowest {slowest}: excluded from all of the above but time"
            yield "warm-up", format_seconds(sum(warmup)), note
    if rates.model_flops_per_s is not None:
        mfu = f"{rates.mfu_frac:.1%} of the device's peak" if rates.mfu_frac is not None else ""
        yield "model FLOP/s", format_flops(rates.model_flops_per_s), mfu


def phase_shares(record: Record, least: float = 0.0) -> list[str]:
    """Return the phases with at least this share of a step: `forward 40%`."""
    medians = {name: spread.median for name, spread in record.timing.phases.items()}
    total = sum(medians.values())
    return [
        f"{name} {s / total:.0%}" for name, s in medians.items() if total and s / total >= least
    ]


def _predicted_step_lines(record: Record, measured: float) -> Iterator[_Line]:
    """Yield the predicted step time and its error, except for a shared device."""
    predicted = record.timing.predicted_step_s
    if predicted is None or record.shared_device or not measured > 0:
        return
    inside = "within" if predicted.low <= measured <= predicted.high else "outside"
    low, high = format_seconds(predicted.low), format_seconds(predicted.high)
    error = predicted.expected / measured - 1
    note = f"{error:+.0%} of the measured step, {inside} {low} to {high}"
    by = predicted.calibrated
    if by is not None and by.factor is not None:
        note += f"; calibrated by {by.runs} runs"
    yield "predicted step", format_seconds(predicted.expected), note


def _memory_lines(record: Record) -> Iterator[_Line]:
    memory, predicted = record.memory.measured, record.memory.predicted
    yield from advice_lines(record)
    if memory is None:
        return
    if (peak := memory.peak_allocated_bytes) is not None:
        reserved = memory.peak_reserved_bytes
        note = f"{format_bytes(reserved)} reserved; " if reserved is not None else ""
        note += memory.basis.split(";")[0]
        if memory.peak_per_rank_bytes:
            peaks = [each for each in memory.peak_per_rank_bytes if each is not None]
            note += f"; the largest of {len(peaks)} processes, {format_bytes(sum(peaks))} in all"
        yield "peak memory", format_bytes(peak), note
        if predicted is not None and predicted.allocated_bytes is not None and peak:
            method = "by formulas" if predicted.method == "closed_form" else "traced"
            note = f"{predicted.allocated_bytes / peak - 1:+.1%} of the measured peak, {method}"
            yield "predicted", format_bytes(predicted.allocated_bytes), note
    if memory.stages:
        sizes = [f"{format_bytes(n)} {k.replace('_', ' ')}" for k, n in memory.stages.items()]
        yield "memory by stage", ", ".join(sizes), ""


def advice_lines(record: Record) -> Iterator[_Line]:
    """Yield suggested overrides and their predicted memory, after running out of memory."""
    predicted, measured = record.memory.predicted, record.memory.measured
    if record.outcome == Outcome.oom.value and measured is not None:
        if measured.peak_reserved_bytes:
            yield "had", format_bytes(measured.peak_reserved_bytes), "reserved by PyTorch"
        elif measured.process_peak_bytes:
            note = "peak of the process, including Python and libraries"
            yield "had", format_bytes(measured.process_peak_bytes), note
    if record.memory.advice and predicted is not None:
        between = f"{format_bytes(predicted.low)} to {format_bytes(predicted.high)}"
        yield "predicted", format_bytes(predicted.expected), between
    for text in record.memory.advice:
        yield "would need less", text, ""


def loss_lines(loss: Loss) -> Iterator[_Line]:
    """Yield the change of the training loss, then of the evaluation loss."""
    if loss.train_first is not None and loss.train_final is not None:
        yield "train loss", f"{loss.train_first:.4f} -> {loss.train_final:.4f}", ""
    if loss.eval_start is not None:
        end = "" if loss.eval_final is None else f" -> {loss.eval_final:.4f}"
        before, after = loss.bits_per_byte_start, loss.bits_per_byte_final
        is_known = before is not None and after is not None
        bits = f"{before:.3f} -> {after:.3f} bits per byte" if is_known else ""
        yield "eval loss", f"{loss.eval_start:.4f}{end}", bits


def _loss_lines(record: Record) -> Iterator[_Line]:
    yield from loss_lines(record.loss)
    if record.best:
        why = f"by {record.best.metric}; its losses and metrics are shown"
        yield "best checkpoint", f"step {record.best.step}", why
    if metrics := [f"{name} {value:.4g}" for name, value in record.metrics.items()]:
        which = "best evaluation" if record.best else "last evaluation"
        yield which, metrics[0], ", ".join(metrics[1:])


def _effective_lines(seen: dict[str, Any], compile_s: float | None) -> Iterator[_Line]:
    if "matmul_dtypes" in seen:
        kernels = ", ".join(seen.get("attention_kernels", [])) or "plain matrix multiplications"
        yield "computed in", " and ".join(seen["matmul_dtypes"]), f"attention: {kernels}"
    if "float8_layers" in seen:
        layers = f"in {seen['float8_layers']} of {seen['linear_layers']} linear layers"
        yield "float8", layers, "emulated" if seen["float8_emulated"] else ""
    if seen.get("skipped_steps"):
        why = f"gradients overflowed; loss scale {seen['loss_scale']:g} at the end"
        yield "skipped", format_number(seen["skipped_steps"], "step"), why
    if "optimizer_bytes_per_parameter" in seen:
        name = " ".join(filter(None, [seen["optimizer"], seen["optimizer_implementation"]]))
        per_parameter = f"{seen['optimizer_bytes_per_parameter']:.3g} bytes of state per parameter"
        yield "optimizer", name, per_parameter
    if early := seen.get("early_stop"):
        best = f"best {early['metric']} at step {early['step']}: {early['value']:.4f}"
        yield "ended early", best, f"train.early_stop_patience={early['patience']}"
    if not_looked_into := seen.get("not_looked_into"):
        yield "computed in", "compiled code", f"not inspected: {not_looked_into}"
    yield from _technique_lines(seen, compile_s)


def _technique_lines(seen: dict[str, Any], compile_s: float | None) -> Iterator[_Line]:
    if layers := seen.get("layers_recomputed"):
        operations = seen["operations_recomputed_per_micro_batch"]
        matmuls = seen["matmuls_recomputed_per_micro_batch"]
        repeated = f"{operations:g} operations repeated, {matmuls:g} of them matrix multiplications"
        yield "checkpointing", f"{layers} layers recomputed", repeated
    if num_weights := seen.get("optimizer_steps_in_backward"):
        yield "gradients", "freed within the backward pass", f"{num_weights} weights updated there"
    if moved := seen.get("activation_bytes_offloaded"):
        yield "activations", f"{format_bytes(moved)} offloaded", "in the first two steps"
    if compiler := seen.get("compile"):
        counts = f"{compiler['graph_breaks']} graph breaks, {compiler['recompiles']} recompilations"
        if hits := compiler.get("cache_hits"):
            counts += f", {hits} of {hits + compiler['cache_misses']} passes from the cache"
        if compile_s is not None:
            counts = f"{format_seconds(compile_s)} compiling; {counts}"
        yield "compiled", f"{compiler['graphs']} graphs", counts


def label_cells(overrides: Sequence[tuple[str, ...]], names: Sequence[str] = ()) -> list[str]:
    """Return a short label of each run: its row, if any, and the differing overrides."""
    labels = [" ".join(label) for label in distinct_overrides(overrides)]
    if not any(names):
        return labels
    pairs = zip(names, labels, strict=True)
    return [f"{name}: {label}" if label else name for name, label in pairs]


def distinct_overrides(overrides: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the overrides of each run that are not common to all. A single run keeps all."""
    if len(overrides) < 2:
        return list(overrides)
    shared = set(overrides[0]).intersection(*overrides[1:])
    return [tuple(o for o in cell if o not in shared) for cell in overrides]


def shared_overrides(overrides: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the overrides of all runs, in order."""
    return [text for text in next(iter(overrides), ()) if all(text in each for each in overrides)]


def factor_columns(overrides: Sequence[tuple[str, ...]], rows: Sequence[str]) -> list[Column]:
    """Return columns that name runs: rows of the sweep, and keys that differ."""
    shared, count = set(shared_overrides(overrides)), len(overrides)
    runs = [
        dict(text.lstrip("+").partition("=")[::2] for text in each if text not in shared)
        for each in overrides
    ]
    keys = list(dict.fromkeys(key for run in runs for key in run))
    factors = {key: [run.get(key, "") for run in runs] for key in keys}
    if any(rows):  # what a row sets is not repeated
        pairs = {key: set(zip(rows, cells, strict=True)) for key, cells in factors.items()}
        factors = {key: cells for key, cells in factors.items() if len(pairs[key]) > len({*rows})}
    if len(factors) > 5:  # else each has a column. The keys that separate most runs come first
        keys = sorted(factors, key=lambda key: -len({*factors[key]}))
        texts = [[f"{key}={factors[key][n]}" for key in keys] for n in range(count)]
        factors = {"configuration": [" ".join(t for t in each if t[-1] != "=") for each in texts]}
    named = {"row": [*rows]} if any(rows) else {}
    return [Column(key, cells) for key, cells in (named | factors).items()]


def describe_factors(overrides: Sequence[tuple[str, ...]], rows: Sequence[str]) -> str:
    """Return the number of runs and the factors: `8 runs (2 optimizer x 4 seeds)`."""
    sizes = {column.title: len(set(column.cells)) for column in factor_columns(overrides, rows)}
    counted = ("row", "repeat", "seed")  # a plural of other keys would be no key
    parts = [f"{size} {name}{'s' * (name in counted)}" for name, size in sizes.items()]
    is_product = math.prod(sizes.values()) == len(overrides) > 1
    return format_number(len(overrides), "run") + f" ({' x '.join(parts)})" * is_product


class PlanningLine:
    """Progress line on stderr. On a terminal, a single line erased at the end."""

    def __init__(
        self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = raw_stream(stream or sys.stderr)
        self._clock = clock
        self._due = clock() + 2.0  # shorter work is not reported
        self._written = ""

    def counter(self, done: str, what: str = "run") -> Callable[[int, int], None]:
        """Return a reporter of a number and the total: `composed 3 of 8 runs`."""
        return lambda count, total: self._show(f"{done} {count} of {format_number(total, what)}")

    def begin(self, text: str) -> None:
        """Show at once, on a terminal, what takes seconds and cannot be counted."""
        if self._stream.isatty():
            self._due = self._clock()
            self._show(text)

    def close(self) -> None:
        """Erase the line on a terminal."""
        if self._written and self._stream.isatty():
            self._stream.write("\r" + " " * len(self._written) + "\r")
            self._stream.flush()

    def _show(self, text: str) -> None:
        now = self._clock()
        if now < self._due:
            return
        is_terminal = self._stream.isatty()
        self._due = now + (0.2 if is_terminal else 10.0)
        padded = text.ljust(len(self._written))
        self._stream.write(f"\r{padded}" if is_terminal else f"{text}\n")
        self._stream.flush()
        self._written = padded
