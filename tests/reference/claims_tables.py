"""The guides' tables, with eke's records beside their answers."""

import json
from pathlib import Path
from typing import Any

from reference.claims import Answer, Guide
from reference.measured import Measured, cell, read_measured
from reference.published import ROWS, SETTING, SOURCE
from reference.seen import Seen, read_seen

NOTHING = "not yet measured"
NEAR = 0.005
"""Below half a percent a peak is called the same, as docs/reference/techniques.md does."""
MIB = 2**20


def answers_table(answers: list[Answer], guides: list[Guide], results: Path) -> str:
    """What improves speed, what saves memory: the guides' answers, and the records'."""
    seen, measured = read_seen(results), read_measured(results)
    predicted = _predicted(results)
    cited = [guide.key for guide in guides if any(guide.key in a.answers for a in answers)]
    heads = ["technique", *(f"{key}: speed, memory" for key in cited), "speed", "memory"]
    lines = [
        "## What improves speed, what saves memory\n",
        "The guides' tables side by side (brackets are theirs: not strictly so, or negligible), "
        "then the records. *CPU*: peak of all tensors in one step of eke's default model, with the "
        "option and without (`results/techniques_cpu.json`). *Predicted*: peak of the guides' own "
        "benchmark on a V100, by tracing the step with today's libraries, with and without "
        "(`results/guide_memory.json`). Speed is told from GPUs alone: "
        "`python benchmarks/on_gpu.py --stages memory techniques`.\n",
        f"| {' | '.join(heads)} |",
        "| --- " * len(heads) + "|",
    ]
    for answer in answers:
        said = [", ".join(answer.answers.get(key, [])) for key in cited]
        found = [_speed(answer, measured), _memory(answer, seen, predicted)]
        lines.append(f"| {' | '.join([answer.technique, *said, *found])} |")
    return "\n".join(lines) + "\n"


def _speed(answer: Answer, measured: list[Measured]) -> str:
    words = []
    for each in measured:
        rows = [each.rows.get(name) for name in answer.rows]
        speeds = [row["samples_per_s"] for row in rows if row and not row["shared_device"]]
        if len(speeds) == 2 and all(speeds):
            words.append(f"{each.device}: {_word(speeds[0] > speeds[1])}, "
                         f"{speeds[0]:.2f}/s against {speeds[1]:.2f}/s")  # fmt: skip
    return "; ".join(words) or NOTHING


def _memory(answer: Answer, seen: list[Seen], predicted: dict[str, dict[str, Any]]) -> str:
    words = [text for each in seen if (text := _peaks(answer, each))]
    if answer.rows:
        mine, other = (predicted[name]["predicted_today_mib"] for name in answer.rows)
        words.append(f"predicted: {compare(mine, other)}, {mine} MB against {other} MB")
    words += [answer.note] if answer.note else []
    return "; ".join(words) or NOTHING


def _peaks(answer: Answer, seen: Seen) -> str:
    mine, other = (
        seen.row(command).get("peak_allocated_bytes") for command in (answer.option, answer.against)
    )
    if not mine or not other or seen.did_nothing(answer.option):
        return ""
    return (
        f"{seen.device}, `{answer.option}`: {compare(mine, other)}, {mine / MIB:.1f} MiB against "
        f"{other / MIB:.1f} MiB"
    )


def compare(mine: float, other: float) -> str:
    """`yes` when less, `no, more` when more, `no, the same` within half a percent."""
    if abs(mine - other) <= NEAR * other:
        return "no, the same"
    return "yes" if mine < other else "no, more"


def _word(yes: bool) -> str:
    return "yes" if yes else "no"


def measured_table(results: Path) -> str:
    """The guides' benchmark row by row: published, predicted without a GPU, measured with eke."""
    predicted, measured = _predicted(results), read_measured(results)
    summary = json.loads((results / "guide_memory.json").read_text())["summary"]
    heads = [
        *("technique", "samples/s", "memory", "predicted, libraries of 2022", "predicted, today's"),
        *(f"eke on {each.device}" for each in measured),
    ]
    lines = [
        "## The guides' measurements\n",
        f"{SETTING} ([v4_20]({SOURCE})). Predicted without a GPU and with nothing fitted "
        "(`python benchmarks/guide_memory.py`): for the libraries of that day the mean error is "
        f"{summary['mean_abs']:.2%}, the largest {summary['max_abs']:.2%}. Verdict on memory: "
        "predicted. Verdict on samples/s: "
        + ("the last columns.\n" if measured else "not measured "
           "(`python benchmarks/on_gpu.py --stages memory`).\n"),
        f"| {' | '.join(heads)} |",
        "| --- " * len(heads) + "|",
    ]  # fmt: skip
    for row in ROWS:
        speed = f"{row.samples_per_s:.2f}" if row.samples_per_s else ""
        trace = predicted.get(row.technique)
        then = f"{trace['predicted_2022_mib']} MB ({trace['error_frac']:+.2%})" if trace else ""
        now = f"{trace['predicted_today_mib']} MB" if trace else "as the row above"
        cells = [cell(each.rows.get(row.technique)) for each in measured]
        words = [row.technique, speed, f"{row.memory_mb} MB", then, now, *cells]
        lines.append(f"| {' | '.join(words)} |")
    return "\n".join(lines) + "\n"


def _predicted(results: Path) -> dict[str, dict[str, Any]]:
    rows = json.loads((results / "guide_memory.json").read_text())["rows"]
    return {row["row"]: row for row in rows}
