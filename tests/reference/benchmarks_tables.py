"""A table for each kind of benchmark record: medians with their spread, as markdown.

Each function takes a record's content. What its schema knows and the record lacks, because it is
older or a package was not installed, is a row that says so.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reference.accuracy import ABSENT, percent, table

Content = dict[str, Any]

UNKNOWN = "-"
"""In a cell: the record has no such number."""


def number(value: float) -> str:
    """Three digits that count, and whole ones beyond: `0.0436`, `38.3`, `1234`."""
    size = abs(float(f"{value:.3g}"))
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    if 0 < size < 0.1:
        digits = 4
    return f"{value:.{digits}f}"


def spread(found: Mapping[str, float] | None, ends: tuple[str, str] = ("p10", "p90")) -> str:
    """Median and ends of a summary of benchmarks/paired.py."""
    if found is None:
        return UNKNOWN
    low, high = (number(found[end]) for end in ends)
    return f"{number(found['median'])} [{low} {high}]"


def extremes(values: Sequence[float]) -> str:
    """Median, smallest and largest of a few rounds."""
    return spread(
        {"median": statistics.median(values), "p10": min(values), "p90": max(values)}
    )  # fmt: skip


def rows_or_absent(
    expected: Iterable[str], found: Mapping[str, tuple[str, ...]], width: int
) -> list[tuple[str, ...]]:
    """Rows that are there in their own order, and after them those that should be."""
    rows = [(name, *cells) for name, cells in found.items()]
    return rows + [(name, *[ABSENT] * (width - 1)) for name in expected if name not in found]


# ------------------------------------------------------------------ a: the loop

LOOPS = {
    "bare": "bare loop, batches in memory",
    "bare again": "a second bare loop",
    "bare_data": "bare loop, eke's batches",
    "hand": "loop by hand, PyTorch's DataLoader",
    "eke": "eke",
    "accelerate": "Accelerate's example",
    "trainer": "HF Trainer",
}
"""Loop of benchmarks/loops.py -> how it is called."""


def loops(content: Content) -> str:
    """A quick step of each loop beside another's."""
    head = (
        "layers, width, batch", "loop", "processor ms", "longer than", "by ms [95 % interval]",
        "times as long [95 % interval]",
    )  # fmt: skip
    rows = [
        (
            f"{case['layers']}, {case['width']}, {case['batch']}",
            LOOPS[row["loop"]],
            number(case["quick_step_ms"][row["loop"]]),
            LOOPS[row["than"]],
            *(_interval(row[key]) for key in ("longer_ms", "times")),
        )
        for case in content["cases"]
        for row in case["pairs"]
    ]
    return f"{content['workload']}.\n\n{table(head, rows)}"


def _interval(found: Content) -> str:
    value, low, high = (number(found[key]) for key in ("value", "low", "high"))
    return f"{value} [{low} {high}]"


def same_flags(content: Content) -> str:
    """HF Trainer, a loop by hand and eke on one GPU, by benchmarks/on_gpu.py."""
    speeds: dict[str, dict[str, list[float]]] = {}
    for name, part in content["parts"]["trainer"].items():
        shape, _, who = name.rpartition(" ")  # bert_large fp32 0 hf
        if part.get("samples_per_s") and not part.get("shared_device"):
            workload = shape.rpartition(" ")[0]
            speeds.setdefault(workload, {}).setdefault(who, []).append(part["samples_per_s"])
    rows = [
        (workload, *_beside(*(found.get(who, []) for who in ("hf", "hand", "eke"))))
        for workload, found in speeds.items()
    ]
    head = ("workload", "HF Trainer, samples/s", "loop by hand, compiled, samples/s",
            "eke, samples/s", "eke's speed over Trainer's", "over the loop's by hand")  # fmt: skip
    return table(head, rows)


def several_gpus(content: Content) -> str:
    """eke and a loop as torchtitan's on several GPUs, by benchmarks/on_gpu.py."""
    ways = {"eke": "eke", "titan": "loop as torchtitan's"}
    found = {
        ways[name.rpartition(" ")[2]]: _ranks_cells(part)
        for name, part in content["parts"].get("ranks", {}).items()
        if part["outcome"] == "ok"
    }
    head = ("loop", "ranks", "tokens/s", "gathered, GiB a step", "reduced, GiB a step",
            "step, GiB a rank", "saving blocks, s")  # fmt: skip
    return table(head, rows_or_absent(ways.values(), found, len(head)))


def _ranks_cells(part: Content) -> tuple[str, ...]:
    sums = [
        sum(size for kind, (_, size) in part["sent"].items() if kind.startswith(what)) / 2**30
        for what in ("gathered", "reduced")
    ]
    blocked = part["saving"]["async"]["blocked_s"]
    numbers = (part["tokens_per_s"], *sums, part["peaks"]["step"] / 2**30, blocked)
    return (str(part["ranks"]), *map(number, numbers))


def sharding(content: Content) -> str:
    """Ways of training in parts side by side, by benchmarks/sharding.py."""
    ways = content["ways"]
    names = {"former": "as before", "eke": "eke", "titan": "loop as torchtitan's"}
    phases = ("load", "step", "evaluation", "save sync", "save async")
    rows = [
        (f"{p}, MiB, worst rank", *(f"{way['peaks'][p] / 2**20:.0f}" for way in ways.values()))
        for p in phases
    ]
    for kind in ("sync", "async"):
        times = (way["saving"][kind] for way in ways.values())
        cells = [f"{number(t['blocked_s'])} of {number(t['total_s'])}" for t in times]
        rows.append((f"save {kind} blocks, s", *cells))
    for what in ("gathered", "reduced"):
        sums = (sum(size for kind, (_, size) in way["sent"].items() if kind.startswith(what))
                for way in ways.values())  # fmt: skip
        rows.append((f"{what}, MiB a step", *(f"{size / 2**20:.0f}" for size in sums)))
    head = (f"{content['size']}, {content['ranks']} ranks, {content['casts']}",
            *(names[way] for way in ways))  # fmt: skip
    return table(head, rows)


def _beside(plain: list[float], hand: list[float], eke: list[float]) -> Iterable[str]:
    ratios = [[b / a for a, b in zip(each, eke, strict=False)] for each in (plain, hand)]
    return (extremes(each) if each else ABSENT for each in (plain, hand, eke, *ratios))


# ------------------------------------------------------------------ b: recipes

RECIPES = {
    "trainer": "HF Trainer, its defaults",
    "trainer_best": "HF Trainer, the guides' best flags",
    "eke_best": "eke, the same flags",
    "fastest": "eke recipe=fastest",
}
RECIPES_ON_GPU = {
    "fastest_steady": "eke recipe=fastest recipe.horizon=steady",
    "hand": "loop by hand, as torchtitan's",
}


def recipes(content: Content) -> str:
    """Throughput, memory and loss of each row, and its speed over HF Trainer's two."""
    head = (
        "row", "samples/s [least most]", "times Trainer's speed", "times that with the best flags",
        "peak memory, MiB", "MFU", "loss of the last quarter", "rounds",
    )  # fmt: skip
    names = RECIPES | RECIPES_ON_GPU
    found = {
        names.get(row["row"], row["row"]): _recipe(row, content["turns"][row["row"]])
        for row in content["table"]
    }
    on_gpu = {} if content["size"] == "cpu" else RECIPES_ON_GPU
    return table(head, rows_or_absent((RECIPES | on_gpu).values(), found, len(head)))


def _recipe(row: Content, turns: list[Content]) -> tuple[str, ...]:
    speeds = [turn["samples_per_s"] for turn in turns if turn.get("samples_per_s")]
    ended = ", ".join(sorted({turn["outcome"] for turn in turns}))
    ratios = (spread(row.get("times_trainer")), spread(row.get("times_trainer_best")))
    peak = row["peak_allocated_bytes"] or row["process_peak_bytes"]
    memory, mfu, loss = (
        say(value) if value is not None else UNKNOWN
        for say, value in (
            (lambda b: number(b / 2**20), peak),
            (percent, row["mfu_frac"]),
            ("{:.4f}".format, row["last_quarter_loss"]),
        )
    )
    return (extremes(speeds) if speeds else ended, *ratios, memory, mfu, loss, str(len(speeds)))


# ------------------------------------------------------------------ c: launching

LAUNCHERS = {
    "bare": "a loop of the same processes, unsupervised",
    "composing": "eke, composing and planning a cell",
    "eke": "eke's pool, planned cells",
    "hydra basic": "Hydra basic (function calls)",
    "hydra joblib": "Hydra joblib",
    "hydra submitit_local": "Hydra submitit_local",
}
REMOVED = {
    "eke, fork server": "eke's pool, forked from a server (removed)",
    "starting the fork server": "starting that server, once a sweep (removed)",
    "run of a sweep, forked": "run of a sweep, forked (removed)",
}
"""Measured before the fork server was removed: what its removal costs."""


def launching(content: Content) -> str:
    """Seconds per run of each launcher, and of two things done once."""
    base = content["per_run"]["bare"]["all_s"]
    found = {}
    for name, row in content["per_run"].items():
        ratios = [mine / other for mine, other in zip(row["all_s"], base, strict=True)]
        once = name in ("bare", "starting the fork server")
        found[(LAUNCHERS | REMOVED).get(name, name)] = (
            extremes(row["all_s"]), "" if once else extremes(ratios), str(len(ratios)),
        )  # fmt: skip
    head = ("launcher", "seconds per run [least most]", "times the loop", "rounds")
    parts = [table(head, rows_or_absent(LAUNCHERS.values(), found, len(head)))]
    parts.append(
        "Hydra's rows hold its start-up, shared out over the runs, and its composition; eke's "
        "composition is a separate row."
    )
    queue, status = content.get("sbatch"), content.get("status")
    if queue:
        parts.append(
            f"{queue['cells']} cells into a SLURM queue that answers at once: planned in "
            f"{queue['planning_s']} s, submitted in {queue['submitting_s']} s by "
            f"{queue['calls']['sbatch']} call of sbatch."
        )
    if status:
        parts.append(f"`eke status` of {status['runs']} runs: {status['seconds']} s.")
    return "\n\n".join(parts)


# ------------------------------------------------------------------ d: start-up


def startup(content: Content) -> str:
    """Seconds of commands and runs, and what they are of what cannot be avoided."""
    against = {name: (other, ratio) for name, other, ratio in _ratios(content)}
    rows = []
    for name, found in content["seconds"].items():
        other, ratio = against.get(name, ("", None))
        shown = REMOVED.get(name, name)
        rows.append((shown, spread(found), other, spread(ratio) if ratio else "", str(found["n"])))
    return table(("what", "seconds", "against", "times as long", "rounds"), rows)


def _ratios(content: Content) -> Iterable[tuple[str, str, Content]]:
    for key, ratio in content["ratios"].items():
        name, _, other = key.partition(" / ")
        yield name, other, ratio


def plan_command(content: Content) -> str:
    """The whole command `eke plan`, from the record of start-up."""
    found = content["seconds"].get("eke plan")
    return table(("command", "seconds"), [("`eke plan`", spread(found) if found else ABSENT)])


# ------------------------------------------------------------------ e: planning

SWEEPS = {"values": "one option, many values", "options": "many combinations of options"}


def planning(content: Content) -> str:
    """Processor seconds of composing and planning sweeps; Hydra's composition beside them."""
    head = ("sweep", "cells", "refused", "composing, s", "rules and plans, s", "per cell, ms")
    rows = []
    for name, words in SWEEPS.items():
        found = content[name]
        composing, plans = (found[part]["cpu_s"] for part in ("composing", "planning"))
        each = 1e3 * (composing + plans) / found["cells"]
        rows.append((words, str(found["cells"]), str(found["refused"]), number(composing),
                     number(plans), number(each)))  # fmt: skip
    hydra = content["hydra"]
    each = 1e3 * hydra["cpu_s"] / hydra["compositions"]
    rows.append(("Hydra alone, a composition a cell", str(hydra["compositions"]), "",
                 number(hydra["cpu_s"]), "", number(each)))  # fmt: skip
    return table(head, rows) + "\n\nProcessor time of one pass; no spread."


# ------------------------------------------------------------------ f: reports


def reporting(content: Content) -> str:
    """Seconds of `eke report`, and the size of its page, by the number of records."""
    rows = [
        (
            str(row["records"]), extremes(row["seconds_of_rounds"]),
            number(row["html_bytes"] / 1e6), number(row["json_bytes"] / 1e6),
            str(len(row["seconds_of_rounds"])),
        )
        for row in content["rows"]
    ]  # fmt: skip
    return table(("records", "seconds [least most]", "page, MB", "JSON, MB", "rounds"), rows)


# ------------------------------------------------------------------ g: size


def scaling(content: Content) -> str:
    """Speed of eke's loop by model and batch; cost of its pool, if there, by number of runs."""
    parts = []
    if "loops" in content:
        parts += [f"{content['workload']}.", _loops_by_size(content["loops"])]
    if "pool" in content:  # a GPU changes nothing of it
        parts.append(_pool_by_size(content["pool"]))
    return "\n\n".join(parts)


def _loops_by_size(cases: Sequence[Content]) -> str:
    head = (
        "model and batch", "eke, steps/s", "eke, samples/s", "eke's speed over bare (wall)",
        "the same (processor)", "over bare with eke's batches (processor)",
    )  # fmt: skip
    return table(head, [(row["case"], *_case(row)) for row in cases])


def _pool_by_size(sweeps: Sequence[Content]) -> str:
    rows = [
        (
            str(row["runs"]),
            *(spread(row["s_per_run"][name]) for name in ("bare", "eke")),
            spread(row["added_s_per_run"]),
            spread(row["s_per_run"]["planning"]),
            str(row["added_s_per_run"]["n"]),
        )
        for row in sweeps
    ]
    head = ("runs", "bare loop, s per run", "eke's pool, s per run", "the pool adds, s",
            "composing and planning, s per run", "rounds")  # fmt: skip
    return table(head, rows)


def _case(row: Content) -> tuple[str, ...]:
    if row["outcome"] != "ok":
        return (row["outcome"], *[UNKNOWN] * 4)
    wall, cpu = row["wall"], row["cpu"]
    speeds = [spread(wall[name]["eke"]) for name in ("steps_per_s", "samples_per_s")]
    over_wall, over_cpu = wall["eke_speed_over"], cpu["eke_speed_over"]
    ratios = (over_wall["bare"], over_cpu["bare"], over_cpu.get("bare_data"))
    return (*speeds, *(spread(each) for each in ratios))


# ------------------------------------------------------------------ h: eke fit


def searching(content: Content) -> str:
    """How near searches end to the best there is: by kind of made-up machine, or here."""
    made_up = "machines" in content["rows"][0]
    return _made_up(content["rows"]) if made_up else _whole_space(content["rows"])


def _made_up(rows: Sequence[Content]) -> str:
    head = (
        "machines", "estimates off by", "trials at most", "made",
        "ended within 5 % of the best", "off it, median", "off it, 90th percentile",
        "searches with one out-of-memory", "most of these in one",
    )  # fmt: skip
    cells = [
        (
            row["machines"],
            _share(row["estimates_off"]),
            str(row["budget"]), number(row["mean_trials"]),
            f"{row['within_5_percent'] * row['searches']:.0f} of {row['searches']}",
            percent(row["median_off"]), percent(row["p90_off"]),
            str(row["searches_with_out_of_memory"]), str(row["most_out_of_memory"]),
        )
        for row in rows
    ]  # fmt: skip
    return table(head, cells)


def _whole_space(rows: Sequence[Content]) -> str:
    head = ("configurations", "baseline", "off the best", "trials", "seconds",
            "better by more than chance", "its choice", "off the best", "rank",
            "the median one, off it")  # fmt: skip
    cells = [
        (
            str(row["configurations"]), f"`{row['typed']}`", _share(row["typed_off"]),
            str(row["trials"]), number(row["seconds"]),
            "yes" if row["resolved"] else "no", f"`{row['chosen']}`",
            _share(row["off_exhaustive_best"]), str(row["rank"] or UNKNOWN),
            _share(row["median_off"]),
        )
        for row in rows
    ]  # fmt: skip
    return table(head, cells)


def _share(value: float | None) -> str:
    return UNKNOWN if value is None else percent(value)


# ------------------------------------------------------------- i: single runs on a GPU


def gpu_runs(content: Content) -> str:
    """Step time, speed and peak of each run, and how far its forecasts were from them."""
    head = ("run", "ms per step [10 % 90 %]", "tokens/s", "MFU", "expected step, off by",
            "peak, GiB", "reserved, GiB", "expected peak, off by", "compiling, s")  # fmt: skip
    found = {name: _gpu_run(name, run)[1:] for name, run in content["runs"].items()}
    for key, words in (("trainer", "HF Trainer"), ("hand", "loop by hand")):
        if row := content.get(key):
            name = f"{words}: `{row['command'].partition('plain_trainer.py ')[2]}`"
            peak = number(row["peak_allocated_bytes"] / 2**30)
            milliseconds = number(1e3 * row["median_step_s"])
            found[name] = (milliseconds, "-", "-", "-", peak, "-", "-", "-")
    expected = [] if "hand" in content else ["loop by hand, as torchtitan's"]
    return table(head, rows_or_absent(expected, found, len(head)))


def _gpu_run(name: str, run: Content) -> tuple[str, ...]:
    steady, memory = run["timing"]["steady_step_s"], run["memory"]
    measured, predicted = memory["measured"], memory["predicted"]["allocated_bytes"]
    expected = run["timing"]["predicted_step_s"]["expected"]
    peak, compile_s = measured["peak_allocated_bytes"], run["timing"]["compile_s"]
    ends = ("median", "p10", "p90")
    median, low, high = (number(1e3 * steady[end]) for end in ends)
    return (
        name,
        f"{median} [{low} {high}]",
        f"{run['throughput']['tokens_per_s']:.0f}",
        f"{run['throughput']['mfu_frac']:.1%}",
        f"{expected / steady['median'] - 1:+.0%}",
        number(peak / 2**30),
        number(measured["peak_reserved_bytes"] / 2**30),
        f"{predicted / peak - 1:+.1%}",
        "-" if compile_s is None else number(compile_s),
    )
