"""notes/benchmarks.md says what the records in results/ say, and nothing else."""

import json
import os
import re

import pytest
from reference import benchmarks_tables as tables
from reference.accuracy import ABSENT
from reference.benchmarks_page import LETTERS, SECTIONS, benchmarks_page, origin
from reference.links import anchors
from support import REPO

PAGE = REPO / "notes" / "benchmarks.md"
SOURCES = [source for section in SECTIONS for source in section.sources]
COMMANDS = sorted({command for source in SOURCES for command in source.expected.values()})
SUMMARY = {"median": 2.0, "p10": 1.5, "p90": 2.5, "low": 1.9, "high": 2.1, "n": 3}


def test_page_is_up_to_date() -> None:
    fresh = benchmarks_page(REPO / "results")
    if os.environ.get("EKE_UPDATE"):
        PAGE.write_text(fresh)
    else:
        assert fresh == PAGE.read_text(), (
            "run EKE_UPDATE=1 pytest tests/conf/test_benchmarks_page.py"
        )


def test_missing_record_is_marked_not_measured(tmp_path) -> None:
    page = benchmarks_page(tmp_path)
    assert [line for line in page.splitlines() if line.startswith("## ")][:-1] == [
        f"## {letter}. {section.title}" for letter, section in zip(LETTERS, SECTIONS, strict=True)
    ]
    assert "|" not in page, "a table without a record"
    (waiting,) = [line for line in page.splitlines() if line.startswith("Waiting for a GPU: ")]
    assert {n for s in SOURCES for n in s.on_gpu} == set(re.findall(r"`(\w+)`", waiting))
    for source in SOURCES:
        for name, command in source.expected.items():
            assert f"**{name}**: {ABSENT}; `{command}`" in page


def test_every_record_is_shown_once_per_section() -> None:
    page = PAGE.read_text()
    for section in SECTIONS:
        for source in section.sources:
            for path in (REPO / "results").glob(source.pattern):
                assert f"**[{path.stem}](../results/{path.name})**" in page


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_exist(command: str) -> None:
    _, script, *arguments = command.split()
    text = (REPO / script).read_text()
    for option in arguments:
        if option.startswith("--"):
            assert f'"{option}"' in text, f"{script} has no {option}"


def test_lab_book_has_the_entries() -> None:
    for section in SECTIONS:
        page, _, anchor = (section.lab or "").partition("#")
        assert not anchor or anchor in anchors(REPO / "notes" / "lab" / page)


def recipe_row(name: str, **other) -> dict:
    row = {"row": name, "rounds": 2, "peak_allocated_bytes": 3 * 2**30, "process_peak_bytes": 1,
           "mfu_frac": 0.521, "last_quarter_loss": 0.69314}  # fmt: skip
    return {**row, **other}


def test_several_devices_are_shown_per_strategy(tmp_path) -> None:
    way = {
        "peaks": dict.fromkeys(("load", "step", "evaluation", "save sync", "save async"), 2**30),
        "sent": {"gathered bfloat16": [3, 2**29], "reduced float32": [2, 2**30]},
        "saving": {kind: {"blocked_s": 0.5, "total_s": 4.0} for kind in ("sync", "async")},
        "tokens_per_s": 123.0,
    }
    where = {"device": "CPU", "environment": {"time": "2026-12-01T10:00:00+00:00", "versions": {}}}
    content = {"size": "300m", "ranks": 4, "casts": "per_use", "ways": {"former": way, "eke": way}}
    (tmp_path / "sharding_cpu.json").write_text(json.dumps(content | where))
    row = {"outcome": "ok", "ranks": 8, "time": "2026-12-01T10:00:00+00:00", **way}
    parts = {"trainer": {}, "ranks": {"8b eke": row}}
    content = {"size": "full", "device": "NVIDIA H200", "versions": {}, "parts": parts}
    (tmp_path / "on_gpu_nvidia_h200.json").write_text(json.dumps(content))
    page = benchmarks_page(tmp_path)
    assert "| step, MiB, worst rank | 1024 | 1024 |" in page
    assert "| save async blocks, s | 0.500 of 4.00 | 0.500 of 4.00 |" in page
    assert "| eke | 8 | 123 | 0.500 | 1.00 | 1.00 | 0.500 |" in page
    assert f"| loop as torchtitan's | {ABSENT} |" in page


def test_gpu_record_has_its_own_rows(tmp_path) -> None:
    ended = {"outcome": "ok", "samples_per_s": 490.0}
    content = {
        "size": "bert_large", "device": "NVIDIA H200", "cores": 16,
        "environment": {"time": "2026-12-01T10:00:00+00:00", "versions": {"torch": "2.13.0"}},
        "table": [recipe_row("fastest", times_trainer=SUMMARY), recipe_row("trainer")],
        "turns": {"fastest": [ended, {**ended, "samples_per_s": 480.0}],
                  "trainer": [{"outcome": "oom", "samples_per_s": None}]},
    }  # fmt: skip
    (tmp_path / "recipes_bert_large.json").write_text(json.dumps(content))
    page = benchmarks_page(tmp_path)
    assert "NVIDIA H200, 16 cores, 2026-12-01, torch 2.13.0" in page
    fastest = "485 [480 490] | 2.00 [1.50 2.50] | - | 3072 | 52 % | 0.6931 | 2 |"
    assert f"| eke recipe=fastest | {fastest}" in page
    assert "| HF Trainer, its defaults | oom |" in page
    assert f"| eke, the same flags | {ABSENT} |" in page
    assert f"| loop by hand, as torchtitan's | {ABSENT} |" in page
    assert f"**recipes_bert_large**: {ABSENT}" not in page
    assert f"**recipes_llama_1b**: {ABSENT}" in page


def test_same_flags_on_a_gpu_are_compared_in_alternation(tmp_path) -> None:
    speeds = {"llama_1b bf16 0 hf": 10.0, "llama_1b bf16 0 eke": 12.0,
              "llama_1b bf16 1 hf": 20.0, "llama_1b bf16 1 eke": 26.0,
              "llama_1b bf16 0 hand": 12.0, "llama_1b bf16 1 hand": 20.0,
              "bert_large fp32 0 hf": 1.0, "bert_large fp32 0 eke": 1.5}  # fmt: skip
    parts = {
        name: {"outcome": "ok", "samples_per_s": speed, "time": "2026-12-01T10:00:00+00:00"}
        for name, speed in speeds.items()
    }
    content = {"size": "full", "device": "NVIDIA H200", "versions": {}, "parts": {"trainer": parts}}
    (tmp_path / "on_gpu_nvidia_h200.json").write_text(json.dumps(content))
    page = benchmarks_page(tmp_path)
    row = "15.0 [10.0 20.0] | 16.0 [12.0 20.0] | 19.0 [12.0 26.0] | 1.25 [1.20 1.30]"
    assert f"| llama_1b bf16 | {row} | 1.15 [1.00 1.30] |" in page
    one = "1.50 [1.50 1.50]"
    assert f"| bert_large fp32 | 1.00 [1.00 1.00] | {ABSENT} | {one} | {one} | {ABSENT} |" in page
    assert "NVIDIA H200, 2026-12-01, versions of libraries not recorded" in page
    assert "on_gpu_DEVICE" not in page
    content["size"] = "small"
    (tmp_path / "on_gpu_nvidia_h200.json").write_text(json.dumps(content))
    assert "llama_1b bf16" not in benchmarks_page(tmp_path), "a rehearsal measures nothing"


def test_loops_are_shown_with_their_noise() -> None:
    row = {
        "loop": "bare again",
        "than": "bare",
        "longer_ms": {"value": -0.0281, "low": -0.109, "high": 0.0842},
        "times": {"value": 0.994, "low": 0.979, "high": 1.02},
    }
    case = {"layers": 2, "width": 64, "batch": 4, "quick_step_ms": {"bare again": 5.0071},
            "pairs": [row]}  # fmt: skip
    found = tables.loops({"workload": "BERT", "cases": [case]}).splitlines()
    assert found[-1] == (
        "| 2, 64, 4 | a second bare loop | 5.01 | bare loop, batches in memory "
        "| -0.0281 [-0.109 0.0842] | 0.994 [0.979 1.02] |"
    )


def test_missing_launchers_are_not_measured() -> None:
    content = {
        "per_run": {"bare": {"all_s": [0.02, 0.04]}, "eke": {"all_s": [0.05, 0.06]}},
        "status": {"runs": 10_000, "seconds": 1.5},
    }
    found = tables.launching(content)
    assert "| eke's pool, planned cells | 0.0550 [0.0500 0.0600] | 2.00 [1.50 2.50] | 2 |" in found
    assert f"| Hydra joblib | {ABSENT} | {ABSENT} | {ABSENT} |" in found
    assert f"| Hydra submitit_local | {ABSENT} |" in found
    assert "`eke status` of 10000 runs: 1.5 s." in found
    assert "SLURM" not in found


def test_start_up_table_compares_run_with_imports() -> None:
    seconds = {"imports": SUMMARY, "run": SUMMARY, "eke plan": SUMMARY}
    content = {"seconds": seconds, "ratios": {"run / imports": SUMMARY}}
    found = tables.startup(content)
    assert "| run | 2.00 [1.50 2.50] | imports | 2.00 [1.50 2.50] | 3 |" in found
    assert "| imports | 2.00 [1.50 2.50] |  |  | 3 |" in found
    assert "| `eke plan` | 2.00 [1.50 2.50] |" in tables.plan_command(content)
    assert ABSENT in tables.plan_command({"seconds": {}})


def test_size_shows_the_loop_and_the_pool() -> None:
    clock = {
        "steps_per_s": {"eke": SUMMARY}, "samples_per_s": {"eke": SUMMARY},
        "eke_speed_over": {"bare": SUMMARY},
    }  # fmt: skip
    content = {
        "workload": "a model",
        "loops": [{"case": "6 layers", "outcome": "ok", "wall": clock, "cpu": clock},
                  {"case": "24 layers", "outcome": "oom"}],
        "pool": [{"runs": 30, "added_s_per_run": SUMMARY,
                  "s_per_run": dict.fromkeys(("bare", "eke", "planning"), SUMMARY)}],
    }  # fmt: skip
    found = tables.scaling(content)
    cell = "2.00 [1.50 2.50]"
    assert f"| 6 layers | {cell} | {cell} | {cell} | {cell} | - |" in found
    assert "| 24 layers | oom | - | - | - | - |" in found
    assert f"| 30 | {cell} | {cell} | {cell} | {cell} | 3 |" in found


@pytest.mark.parametrize("part", ["loops", "pool"])
def test_scaling_table_shows_recorded_parts(part) -> None:
    """A GPU's has no pool; one that was interrupted has no loops yet."""
    content = {"workload": "a model", "loops": [{"case": "24 layers", "outcome": "oom"}],
               "pool": [{"runs": 30, "added_s_per_run": SUMMARY,
                         "s_per_run": dict.fromkeys(("bare", "eke", "planning"), SUMMARY)}],
               }  # fmt: skip
    del content["pool" if part == "loops" else "loops"]
    found = tables.scaling(content)
    assert ("| 24 layers | oom |" in found) == (part == "loops")
    assert ("| 30 | 2.00" in found) == (part == "pool")


def test_planning_time_is_given_per_run() -> None:
    part = {"cells": 100, "refused": 1, "composing": {"cpu_s": 1.0}, "planning": {"cpu_s": 3.0}}
    content = {"values": part, "options": part, "hydra": {"compositions": 5, "cpu_s": 0.5}}
    found = tables.planning(content)
    assert "| one option, many values | 100 | 1 | 1.00 | 3.00 | 40.0 |" in found
    assert "| 5 |  | 0.500 |  | 100 |" in found


def test_origin_lists_missing_environment_fields() -> None:
    assert origin({"machine": {"cores": 2, "load_1min": 2.7}}) == (
        "processor not recorded, 2 cores, load average 2.7, date not recorded, "
        "versions of libraries not recorded"
    )
    found = origin({
        "machine": {"processor": "AMD EPYC", "python": "3.11.7"}, "time": "2026-11-22T10:10:50",
    })  # fmt: skip
    assert found == ("AMD EPYC, 2026-11-22, Python 3.11.7, versions of libraries not recorded")


def test_numbers_have_significant_digits() -> None:
    found = [tables.number(x) for x in (0.04361, 0.3951, 0.9996, 5.56, 39.14, 1234.5, -0.106, 0)]
    assert found == ["0.0436", "0.395", "1.00", "5.56", "39.1", "1234", "-0.106", "0.000"]


def test_searches_are_compared_with_the_best_configuration() -> None:
    row = {"machines": "of parts", "budget": 8, "searches": 200, "estimates_off": 0.23,
           "within_5_percent": 0.88, "median_off": 0.0, "p90_off": 0.0556, "mean_trials": 8.0,
           "searches_with_out_of_memory": 10, "most_out_of_memory": 1}  # fmt: skip
    found = tables.searching({"rows": [row, {**row, "estimates_off": None}]}).splitlines()
    rest = "8 | 8.00 | 176 of 200 | 0.000 % | 5.6 % | 10 | 1 |"
    assert found[-2:] == [f"| of parts | 23 % | {rest}", f"| of parts | - | {rest}"]


def test_unmeasured_choice_has_no_rank() -> None:
    row = {"typed": "a=1", "configurations": 16, "trials": 5, "seconds": 61.2, "resolved": True,
           "chosen": "attention=sdpa", "rank": 2,
           "off_exhaustive_best": 0.027, "typed_off": 0.1, "median_off": 0.48}  # fmt: skip
    unknown = {**row, "resolved": False, "rank": None, "off_exhaustive_best": None}
    found = tables.searching({"rows": [row, unknown]}).splitlines()
    assert (
        found[-2] == "| 16 | `a=1` | 10 % | 5 | 61.2 | yes | `attention=sdpa` | 2.7 % | 2 | 48 % |"
    )
    assert found[-1] == "| 16 | `a=1` | 10 % | 5 | 61.2 | no | `attention=sdpa` | - | - | 48 % |"
