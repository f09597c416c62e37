"""notes/benchmarks.md: results of the benchmarks, from the records in results/."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reference import benchmarks_tables as tables
from reference.accuracy import ABSENT

Content = dict[str, Any]

HEAD = """\
# Benchmarks

Generated from the records in `results/`; measure again and run
`EKE_UPDATE=1 pytest tests/conf/test_benchmarks_page.py`. No number is entered by hand; without
a record it is *not yet measured*.

What is compared takes turns, and ratios and differences are of the turns of one round, so that
other users of a machine hit all sides alike. Brackets are the 10th and the 90th percentile of the
rounds unless a column says otherwise. Numbers of one machine say little about another.
"""

TAIL = """\
## Elsewhere

How right forecasts of memory and step time are: [accuracy.md](accuracy.md). The guides' table:
[techniques.md](../docs/reference/techniques.md). Failed experiments:
[the lab book](lab/index.md).
"""


@dataclass(frozen=True)
class Source:
    """Records of one schema."""

    pattern: str
    """Of their names in results/."""
    show: Callable[[Content], str]
    anywhere: dict[str, str]
    """Name of a record that should be there -> the command that writes it."""
    on_gpu: dict[str, str] = field(default_factory=dict)
    """The same of those that need a GPU."""

    @property
    def expected(self) -> dict[str, str]:
        """All that should be there."""
        return self.anywhere | self.on_gpu


@dataclass(frozen=True)
class Section:
    """One question and what answers it."""

    title: str
    question: str
    sources: tuple[Source, ...]
    lab: str | None = None
    """Page of notes/lab and the anchor of its entry; None before there is one."""


_STARTUP = "python benchmarks/startup.py --out results/startup_cpu.json"

SECTIONS = (
    Section(
        "The loop",
        "What does a training loop cost on the host, in addition to the kernels: eke, bare "
        "PyTorch, HF Trainer and the loop of Accelerate's documentation? On a GPU: HF Trainer, a "
        "loop by hand as torchtitan's (`benchmarks/hand_loop.py`) and eke, in samples per second.",
        (
            Source(
                "host_overhead_*.json",
                tables.loops,
                {"host_overhead_cpu": "python benchmarks/host_overhead.py"},
            ),
            Source(
                "on_gpu_*.json",
                tables.same_flags,
                {},
                {"on_gpu_DEVICE": "python benchmarks/on_gpu.py --stages trainer"},
            ),
        ),
        "loop.md#2026-11-24-host-cost-with-the-smallest-models",
    ),
    Section(
        "Recipes",
        "How fast is `recipe=fastest` compared with HF Trainer with its defaults, and with the "
        "best flags of the guides?",
        (
            Source(
                "recipes_*.json",
                tables.recipes,
                {"recipes_cpu": "python benchmarks/recipes.py --size cpu"},
                {
                    f"recipes_{size}": f"python benchmarks/recipes.py --size {size}"
                    for size in ("bert_large", "llama_1b")
                },
            ),
        ),
        "recipes.md#2026-11-22-adaptive-recipes",
    ),
    Section(
        "Launching",
        "What does a launcher add to a run of a sweep: eke's pool, Hydra's launchers, a loop?",
        (
            Source(
                "launching_*.json",
                tables.launching,
                {
                    "launching_cpu": "python benchmarks/launching.py --out "
                    "results/launching_cpu.json"
                },
            ),
        ),
        "launchers.md#2026-11-21-launch-cost-compared-with-hydras-launchers",
    ),
    Section(
        "Start-up",
        "How long until help is there, and until a run takes its first step?",
        (Source("startup_*.json", tables.startup, {"startup_cpu": _STARTUP}),),
        "startup.md#2026-11-22-start-up-and-a-fork-server",
    ),
    Section(
        "Planning",
        "How long does it take to plan a run, and a sweep of a thousand?",
        (
            Source("startup_*.json", tables.plan_command, {"startup_cpu": _STARTUP}),
            Source(
                "sweep_planning*.json",
                tables.planning,
                {
                    "sweep_planning": "python benchmarks/sweep_planning.py "
                    "results/sweep_planning.json"
                },
            ),
        ),
        "startup.md#2026-11-23-seconds-of-eke-plan",
    ),
    Section(
        "Reports",
        "How long does a report over 100 to 10,000 records take?",
        (
            Source(
                "reporting_*.json",
                tables.reporting,
                {
                    "reporting_cpu": "python benchmarks/reporting.py --output "
                    "results/reporting_cpu.json"
                },
            ),
        ),
        "reports.md#2026-11-22-drift-and-the-cost-of-a-report",
    ),
    Section(
        "Size",
        "How do the loop's cost and the pool's grow with model, batch and number of runs?",
        (
            Source(
                "scaling_*.json",
                tables.scaling,
                {"scaling_cpu": "python benchmarks/scaling.py --size cpu"},
                {"scaling_gpu": "python benchmarks/scaling.py --size gpu"},
            ),
        ),
        "loop.md#2026-11-23-loop-cost-on-a-quiet-machine",
    ),
    Section(
        "Searching",
        "How near does `eke fit` come to the exhaustive best, on made-up machines whose generators "
        "share no code with the time model, and here on a space that is run whole?",
        (
            Source(
                "fit_*.json",
                tables.searching,
                {
                    f"fit_{name}": f"python benchmarks/fitting.py {what} "
                    f"--output results/fit_{name}.json"
                    for name, what in (("simulated", "simulated"), ("real_cpu", "real"))
                },
            ),
        ),
        "fit.md#2026-11-24-choices-within-eight-trials",
    ),
    Section(
        "Single runs on a GPU",
        "How fast is eke there, and how right are its forecasts?",
        (
            Source(
                "gpu_runs_*.json",
                tables.gpu_runs,
                {},
                {"gpu_runs_DEVICE": "python benchmarks/on_gpu.py"},
            ),
        ),
        "gpu.md#2026-11-27-the-first-minutes-on-an-h100",
    ),
    Section(
        "Several devices",
        "What does a rank hold, send and wait for where a model is in parts, beside how it was "
        "before, and on GPUs beside a loop as torchtitan's?",
        (
            Source(
                "sharding_*.json",
                tables.sharding,
                {
                    "sharding_cpu": "python benchmarks/sharding.py --size 300m --ranks 4 "
                    "--out results/sharding_cpu.json"
                },
            ),
            Source(
                "on_gpu_*.json",
                tables.several_gpus,
                {},
                {"on_gpu_DEVICE": "python benchmarks/on_gpu.py --stages ranks"},
            ),
        ),
    ),
)
"""The benchmarks a to j, in this order."""

LETTERS = "abcdefghij"


def benchmarks_page(results: Path) -> str:
    """The whole page, ending in a newline.

    Args:
        results: folder with the records.
    """
    lettered = list(zip(LETTERS, SECTIONS, strict=True))
    sections = [_section(letter, section, results) for letter, section in lettered]
    waiting = [
        f"`{name}` ({letter})"
        for letter, section in lettered
        for source in section.sources
        for name in missing_records(source, found_records(source, results))
        if name in source.on_gpu
    ]
    line = f"Waiting for a GPU: {', '.join(waiting)}.\n" if waiting else ""
    return "\n".join([HEAD, *([line] if line else []), *sections, TAIL])


def _section(letter: str, section: Section, results: Path) -> str:
    commands = {command: None for source in section.sources for command in source.expected.values()}
    lines = [f"## {letter}. {section.title}", section.question]
    lines.append("Measured by " + ", ".join(f"`{command}`" for command in commands) + ".")
    for source in section.sources:
        lines += _records(source, results)
    if section.lab:
        lines.append(f"Method and interpretation: [lab book](lab/{section.lab}).")
    return "\n\n".join(lines) + "\n"


def _records(source: Source, results: Path) -> list[str]:
    """A line and a table for each record; a line for each that is not there."""
    found = found_records(source, results)
    parts = []
    for name, content in found.items():
        parts += [
            f"**[{name}](../results/{name}.json)**: {origin(content)}",
            source.show(content),
        ]
    missing = missing_records(source, found)
    return parts + [f"**{name}**: {ABSENT}; `{source.expected[name]}`" for name in missing]


def found_records(source: Source, results: Path) -> dict[str, Content]:
    """Name of each record -> its content."""
    return {
        path.stem: content
        for path in sorted(results.glob(source.pattern))
        if (content := json.loads(path.read_text())).get("size") != "small"  # a rehearsal
    }


def missing_records(source: Source, found: dict[str, Content]) -> list[str]:
    """Names of records that should be there; one of any device will do for `_DEVICE`."""
    return [
        name
        for name in source.expected
        if name not in found and not (found and name.endswith("_DEVICE"))
    ]


def origin(content: Content) -> str:
    """Machine, load, date and versions, as far as the record says so."""
    where = content.get("environment", {})
    hardware = {**content.get("machine", {}), **content.get("hardware", {})}
    names = ("device", "cpu", "processor")
    device = content.get("device") or next((hardware[n] for n in names if n in hardware), None)
    cores = hardware.get("cores") or content.get("cores")
    date = where.get("time") or content.get("time") or _last_time(content)
    python = where.get("python") or hardware.get("python")
    versions = where.get("versions") or content.get("versions", {})
    known = [f"{name} {versions[name]}" for name in ("torch", "transformers", "accelerate")
             if name in versions]  # fmt: skip
    words = [
        device or "processor not recorded",
        *([f"{cores} cores"] if cores else []),
        *_load(content, hardware),
        date[:10] if date else "date not recorded",
        *([f"Python {python}"] if python else []),
        *(known or ["versions of libraries not recorded"]),
        *([f"*{content['note']}*"] if content.get("note") else []),
    ]
    return ", ".join(words)


def _load(content: Content, hardware: Content) -> list[str]:
    keys = ("load_average_1m_at_end", "load_1min", "load")
    load = next((hardware[key] for key in keys if key in hardware), content.get("load"))
    one_minute = load[0] if isinstance(load, list) else load
    return [] if one_minute is None else [f"load average {one_minute:.1f}"]


def _last_time(content: Content) -> str:
    """Of a record whose parts have times of their own."""
    parts = content.get("parts", {}).get("trainer", {}).values()
    return max((part["time"] for part in parts if "time" in part), default="")
