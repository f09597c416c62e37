"""Every screen at every width, in colours and without, and in a pipe."""

import re
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from terminals import shown, too_wide, words
from unit.launch.scripted import record_for
from unit.plan.record.samples import failed, full_record

from eke.cli import main
from eke.common.paths import RunPaths, SweepPaths
from eke.common.screen import plain
from eke.config.compose import compose
from eke.launch.processes.runs_table import RunStatus, progress_lines, render_runs
from eke.launch.processes.sweep import SweepFile, SweepRun
from eke.plan.planner import Plan, ShownDecision
from eke.plan.record import write_record
from eke.results.report.run_result import result_lines
from eke.workflows.planning import plan_for
from eke.workflows.running import _start_lines
from eke.workflows.sweep import _outcome_lines

LONG = f"/data/{'long-name-' * 8}/rows.jsonl"
SWEPT = [
    (f"optimizer={optimizer}", f"memory={memory}", f"seed={seed}", f"data.path={path}")
    for optimizer in ("adamw", "adafactor")
    for memory in ("none", "checkpointing_selective")
    for seed, path in enumerate(("rows.jsonl", LONG))
]


def _sweep_end() -> None:
    """A sweep with two failures, whose factors are wider than a terminal."""
    cells, jobs = [], []
    for number, typed in enumerate(SWEPT):
        record = failed("oom", "backward", "CUDA out of memory. " * 6) if number < 2 else None
        record = record or full_record(overrides=list(typed))
        reason = record.failure.message if record.failure else ""
        cells.append(SweepRun(typed, str(number), f"runs/{number}", record.outcome, reason))
        jobs.append(SimpleNamespace(cells=[number], record=record))
    file = SweepFile(SweepPaths(Path("runs/sweep-1")), ["-m"], cells)
    print("\n".join(_outcome_lines(file, jobs, [], 1, 71.0)))


def _sweep_table() -> None:
    states = ("running", "waiting", "oom", "ok")
    standings = [
        RunStatus(RunPaths(Path(f"{number}" * 16)), "", states[number % 4], 40, 1000, 2.5,
                  step_s=95.0, where="a free device of this machine", overrides=typed)
        for number, typed in enumerate(SWEPT)
    ]  # fmt: skip
    print("\n".join([*progress_lines(standings, 5.0), "", *render_runs(standings, 20)]))


@cache
def _plan(*typed: str) -> Plan:
    return plan_for(compose(typed), planning=True)


STARTS = {
    "default": ("tracker=none",),
    "fine-tuning": ("peft=lora", "batch=auto", "hardware=rtx3090", "model=llama_1b", "tracker=none",
                    "precision=bf16", "memory=checkpointing", "compile=inductor",
                    "kernels=fused_linear_cross_entropy", "optimizer=adamw_8bit"),
    "ranks": ("distributed=fsdp", "distributed.num_processes=8", "hardware=h100",
              "precision=bf16", "recipe=low_memory", "tracker=none"),
    "stream": ("data=synthetic", "data.num_samples=500", "train.steps=4", "tracker=none"),
}  # fmt: skip


def _start(name: str) -> None:
    print("\n".join(_start_lines(_plan(*STARTS[name]), "")))


def _end(record) -> None:
    paths = RunPaths(Path("runs/0123456789abcdef"))
    paths.model.mkdir(parents=True, exist_ok=True)
    write_record(paths, record)
    print("\n".join(result_lines(record, paths.folder)))


WRONG = ("optimzr=adamw", "precision=fp8x", "optimizer.lr=fast", "train.stepz=3",
         f"data.path={LONG}", "recipe=nope", "batch.per_device=many")  # fmt: skip
SCREENS = {
    "help": partial(main, ["train", "--help"]),
    "help optimizer": partial(main, ["train", "--help", "optimizer"]),
    "eke help": partial(main, ["--help"]),
    "help of a command": partial(main, ["plan", "--help"]),
    "plan": partial(main, ["plan", "--quick", *STARTS["default"]]),
    "plan does not fit": partial(
        main, ["plan", "--quick", "model=llama_1b", "hardware=rtx3090", "tracker=none"]
    ),
    "plan -v": partial(main, ["plan", "--quick", "-v", *STARTS["fine-tuning"]]),
    "plan -m": partial(
        main,
        ["plan", "--quick", "-m", "model=llama_1b", "hardware=rtx3090", "precision=bf16,fp8",
         "memory=none,checkpointing_selective", "tracker=none", "batch.per_device=8,200"],
    ),
    "hardware=all": partial(main, ["plan", "--quick", "hardware=all", "tracker=none"]),
    **{f"start {name}": partial(_start, name) for name in STARTS},
    "end": lambda: _end(full_record()),
    "end of a failure": lambda: _end(failed("oom", "backward", "CUDA out of memory. " * 9)),
    "sweep": _sweep_table,
    "sweep end": _sweep_end,
    "status": lambda: main(["status", "runs"]),
    "errors": lambda: main(["train", *WRONG]),
    "error of a flag": lambda: main(["status", "--nope"]),
    "error of a command": lambda: main(["foo"]),
    "error of a folder": lambda: main(["report", LONG]),
    "error of an argument": lambda: main(["fit", "--objective", "x"]),
    "show": lambda: main(["show", "optimizer.lr"]),
}  # fmt: skip


def write_runs(folder: Path) -> None:
    """Four runs: a good one, two failed ones, and one that has not ended."""
    for number, outcome in enumerate(("ok", "oom", "crashed", "")):
        paths = RunPaths(folder / (str(number) * 16))
        paths.folder.mkdir(parents=True)
        paths.plan.write_text('{"steps": {"total": 20}}')
        paths.config.write_text(f"# optimizer=sgd seed={number}\n")
        if outcome:
            write_record(paths, record_for(paths.folder.name, outcome, 7))


@pytest.fixture
def folder(runs):
    """The working directory, with runs."""
    write_runs(runs)


SLOW = ("hardware=all",)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in SCREENS]
)
def test_screen_fits_every_terminal(name, folder) -> None:
    call = SCREENS[name]
    found = shown(call)
    piped = found.pop(0)
    assert piped == plain(piped)
    assert "Traceback" not in piped
    for columns, text in found.items():
        assert not too_wide(plain(text), columns), repr(text)
        whole = words(piped) | words(plain(found[200])) | {"-v"}
        assert not words(plain(text)) - whole, f"broken words at {columns} columns"


@pytest.mark.parametrize("name", STARTS)
def test_start_has_at_most_12_lines(name) -> None:
    """Warnings, and what was ignored or chosen in place of the user, are not counted."""
    plan = _plan(*STARTS[name])
    told = tuple(each for each in plan.decisions if not isinstance(each, ShownDecision))
    counted = replace(plan, warnings=(), decisions=told)
    for text in shown(lambda: print("\n".join(_start_lines(counted, "")))).values():
        assert len(text.splitlines()) <= 12
        assert re.match(r"run +\w{16}, ", text)


def test_colours_change_no_text(monkeypatch) -> None:
    """Colours of the screens are checked above; here they are switched off."""
    call = SCREENS["errors"]
    colored = shown(call, [80])[80]
    assert "\x1b[31m" in colored
    assert shown(lambda: main(["--color=never", "train", *WRONG]), [80])[80] == plain(colored)
