"""`eke compare`: which rows are compared, their claims, and when a slowdown is an alarm."""

import json
import shutil
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support import REPO
from unit.results.report.made import MACHINE, NOISE, SWEEP, Run, make_sweep

from eke.cli import main
from eke.cli.compare import _as_row
from eke.common.errors import ConfigError
from eke.config.sweep import expand
from eke.results.report.compare.load_records import Entry
from eke.results.report.compare.statistics import correct
from eke.results.report.compare.two import (
    MEAN,
    compare_sides,
    differences,
    is_slowdown,
    open_sides,
)

ROWS = ("adamw", "lion", "sgd", "adafactor")
START = datetime(2026, 11, 1, tzinfo=UTC)


def runs(factor=1.0, rounds=3, rows=ROWS, **other):
    """Rounds of rows at `factor` of a speed that repeats by a per cent."""
    return [
        Run({"optimizer": each}, n, n, 100 * factor * NOISE[(n + k) % 3], **other)
        for n in range(rounds)
        for k, each in enumerate(rows)
    ]


def sweep(folder, made, start=0.0, rows=(), identity=SWEEP, **about):
    """Write runs of a sweep, a minute each from `start` minutes on; returns its folder."""
    found = make_sweep(folder, made, rows, identity=identity)
    for n in range(len(made)):
        file = folder / f"{n:016x}" / "record.json"
        record = json.loads(file.read_text())
        record["environment"] |= {"time": str(START + timedelta(minutes=start + n)), **about}
        file.write_text(json.dumps(record))
    return found


def git(commit, dirty=False):
    return {"git": {"commit": commit * 40, "dirty": dirty}}


@pytest.fixture
def both(tmp_path):
    """Two sweeps of one configuration each row, the second a tenth slower and of another commit."""
    sweep(tmp_path / "a", runs(), **git("a"))
    sweep(tmp_path / "b", runs(0.9), 60, **git("b"))
    return [str(tmp_path / "a"), str(tmp_path / "b")]


def compared(*words, by="", **options):
    return compare_sides(open_sides(words, by), **options)


def told(capsys, *arguments):
    """Exit code and JSON."""
    code = main(["compare", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_every_row_and_the_mean_are_compared(both):
    found = compared(*both)
    assert found.facts == {"commit": ("aaaaaaaa", "bbbbbbbb")}
    assert not found.keys
    assert [row.label for row in found.rows] == list(ROWS)
    assert [row.speed.value for row in found.rows] == pytest.approx([0.9] * 4)
    assert found.mean.value == pytest.approx(0.9)
    assert all(row.memory == 1 and row.loss.parity.value == "equal" for row in found.rows)


@pytest.mark.parametrize(
    ("factor", "options", "code"),
    [
        pytest.param(0.9, (), 1, id="slower"),
        pytest.param(0.9, ("--tolerance", "12"), 0, id="slower, tolerated"),
        pytest.param(1.1, (), 0, id="faster"),
        pytest.param(1.0, (), 0, id="equal"),
        pytest.param(0.96, (), 0, id="slower, within 5 % of another occasion"),
        pytest.param(0.96, ("--tolerance", "3%"), 1, id="slower, beyond a typed tolerance"),
    ],
)
def test_exit_code_of_a_comparison(tmp_path, capsys, factor, options, code):
    sweep(tmp_path / "a", runs())
    sweep(tmp_path / "b", runs(factor), 60)
    found, content = told(capsys, str(tmp_path / "a"), str(tmp_path / "b"), *options)
    assert found == content["exit_code"] == code
    assert ("slower" in [each["kind"] for each in content["claims"]]) == bool(code)


def test_single_slower_row_fails_the_comparison(tmp_path):
    slow = [
        replace(r, speed=r.speed * 0.85) if r.choices["optimizer"] == "sgd" else r for r in runs()
    ]
    sweep(tmp_path / "a", runs())
    sweep(tmp_path / "b", slow, 60)
    found = compared(str(tmp_path / "a"), str(tmp_path / "b"))
    assert [is_slowdown(row.speed, found.tolerance) for row in found.rows] == [
        False,
        False,
        True,
        False,
    ]


def test_interval_includes_noise_of_a_round():
    """All rows of a round 10 % up or down: seen as such, and no row's own difference."""
    quiet, rounds = [100 * n for n in NOISE], (1.0, 1.1, 0.9)
    loud = [speed * shared for speed, shared in zip(quiet, rounds, strict=True)]
    own, shared = (
        correct(differences([each] * 6, [[0.94 * x for x in each]] * 6)) for each in (quiet, loud)
    )
    assert own[0].high < 1
    assert own[MEAN].high < 1
    assert shared[0].high > 1
    assert shared[MEAN].high > 1


def test_sides_of_one_sweep_are_alternated(tmp_path):
    """A round holds a run of each; reversed in every other round."""
    made = [
        each
        for n in range(4)
        for each in runs(rounds=4, rows=ROWS[:2])[2 * n : 2 * n + 2][:: (-1) ** n]
    ]
    folder = str(sweep(tmp_path, made, rows=[r.choices["optimizer"] for r in made]))
    found = compared(f"{folder}@adamw", f"{folder}@optimizer=lion")
    assert found.in_turns
    assert found.tolerance == 0.03
    assert not found.notes
    assert found.keys == {"optimizer": ("adamw", "lion")}
    assert found.is_measurable


def test_row_name_matches_the_report(tmp_path):
    sweep(tmp_path, runs())
    found = compared(f"{tmp_path}@adamw", f"{tmp_path}@lion")
    assert found.keys == {"optimizer": ("adamw", "lion")}
    assert [row.label for row in found.rows] == ["optimizer=lion"]


def test_time_between_two_sides_is_noted(both, tmp_path):
    found = compared(*both)
    assert (found.in_turns, found.tolerance) == (False, 0.05)
    assert any("1 h" in note and "apart" in note for note in found.notes)


@pytest.mark.parametrize(
    ("first", "second", "rows"),
    [
        pytest.param("@aaaa", "@bbbb", 4, id="commits"),
        pytest.param("@aaaa", "@changed", 4, id="a changed tree"),
        pytest.param("@commit=aaaaaaaa", "@optimizer=lion,changed", 1, id="settings"),
    ],
)
def test_sides_can_be_parts_of_one_folder(tmp_path, first, second, rows):
    made = [*runs(), *runs(0.9)]
    sweep(tmp_path, made, **git("a"))
    for n in range(12, 24):
        file = tmp_path / f"{n:016x}" / "record.json"
        record = json.loads(file.read_text())
        record["environment"] |= git("b", dirty=True)
        file.write_text(json.dumps(record))
    found = compared(f"{tmp_path}{first}", f"{tmp_path}{second}")
    assert found.facts["commit"] == ("aaaaaaaa", "bbbbbbbb changed (a)")
    assert len(found.rows) == rows


def test_folder_can_be_split_by_version(tmp_path):
    newer = {**MACHINE, "torch": "2.14.0"}
    sweep(tmp_path, [*runs(), *runs(0.8, machine=newer)])
    found = compared(str(tmp_path), by="torch")
    assert found.facts == {"torch": ("2.13.0", "2.14.0")}
    assert [row.speed.value for row in found.rows] == pytest.approx([0.8] * 4)


def test_keys_that_differ_in_all_rows_need_not_match(tmp_path):
    sweep(tmp_path / "a", [replace(r, choices={**r.choices, "precision": "fp32"}) for r in runs()])
    sweep(tmp_path / "b", [replace(r, choices={**r.choices, "precision": "bf16"}) for r in runs()])
    found = compared(str(tmp_path / "a"), str(tmp_path / "b"))
    assert found.keys == {"precision": ("fp32", "bf16")}
    assert len(found.rows) == 4


@pytest.mark.parametrize(
    ("other", "why"),
    [
        pytest.param(runs(keys={"data.seq_len": 128}), "data.seq_len 256 -> 128", id="length"),
        pytest.param(
            [replace(r, choices={**r.choices, "model": "small"}) for r in runs()],
            "model tiny -> small", id="model",
        ),
        pytest.param(runs(machine={**MACHINE, "device": "H100"}), "GPU -> H100", id="device"),
        pytest.param(runs(rows=("muon",)), "no configuration", id="no row in both"),
    ],
)  # fmt: skip
def test_incomparable_sides_are_rejected_with_a_command(tmp_path, capsys, other, why):
    sweep(tmp_path / "a", runs())
    sweep(tmp_path / "b", other)
    code, content = told(capsys, str(tmp_path / "a"), str(tmp_path / "b"))
    assert code == 2
    assert why in content["problems"][0]["why"]
    assert "sweep.repeats=3" in content["problems"][0]["remark"]


def test_too_few_repeats_give_no_answer(tmp_path, capsys):
    sweep(tmp_path / "a", runs())
    sweep(tmp_path / "b", runs(0.5, rounds=2), 60)
    code, content = told(capsys, str(tmp_path / "a"), str(tmp_path / "b"))
    assert code == 2
    assert not content["claims"]
    assert content["problem"]["remark"].endswith("sweep.repeats=3")


def test_failed_row_gives_no_answer_but_slower_row_does(tmp_path, capsys):
    failed = [
        replace(r, speed=None, outcome="oom") if r.choices["optimizer"] == "sgd" else r
        for r in runs()
    ]
    sweep(tmp_path / "a", runs())
    sweep(tmp_path / "b", failed, 60)
    code, content = told(capsys, str(tmp_path / "a"), str(tmp_path / "b"))
    assert code == 2
    assert "sgd (3 and 0, oom)" in content["problem"]["why"]
    slower = [replace(r, speed=r.speed and r.speed * 0.8) for r in failed]
    sweep(tmp_path / "c", slower, 60)
    assert told(capsys, str(tmp_path / "a"), str(tmp_path / "c"))[0] == 1


def test_identical_runs_are_not_compared(tmp_path, both):
    with pytest.raises(ConfigError, match="all runs of one side"):
        compared(both[0], both[0])
    shutil.copytree(tmp_path / "a" / f"{0:016x}", tmp_path / "b" / "copy")
    found = compared(both[0], both[1])
    assert {row.label: row.repeats for row in found.rows}["adamw"] == "2 and 3"


def test_machines_are_compared_separately(tmp_path):
    other = {**MACHINE, "device": "H100"}
    sweep(tmp_path / "a", [*runs(), *runs(3, machine=other)])
    sweep(tmp_path / "b", [*runs(), *runs(3, machine=other)], 60)
    found = compared(str(tmp_path / "a"), str(tmp_path / "b"))
    assert [row.speed.value for row in found.rows] == pytest.approx([1.0] * 8)


def test_packed_rows_are_compared_by_tokens(tmp_path):
    made = runs(rows=("adamw",))
    packed = [
        replace(r, keys={"data.packing": "on"}, speed=r.speed / 3) for r in runs(rows=("adamw",))
    ]
    sweep(tmp_path / "a", made)
    sweep(tmp_path / "b", packed, 60)
    for n in range(3):  # three samples to a row
        file = tmp_path / "b" / f"{n:016x}" / "record.json"
        record = json.loads(file.read_text())
        record["throughput"]["tokens_per_s"] *= 3.3
        file.write_text(json.dumps(record))
    assert compared(str(tmp_path / "a"), str(tmp_path / "b")).rows[0].speed.value > 1


@pytest.mark.parametrize(
    ("words", "key", "fix"),
    [
        pytest.param(["a", "nope"], "DIR", "eke compare a runs", id="no such folder"),
        pytest.param(["nope", "b"], "DIR", "eke compare runs b", id="no such folder, first"),
        pytest.param(
            ["a@ffff", "b"], "FOLDER@WHICH", "eke compare a@aaaaaaaa b", id="no such commit"
        ),
        pytest.param(["a@addamw", "b"], "FOLDER@WHICH", "eke compare a@adamw b", id="no such row"),
        pytest.param(["a", "--by", "torc"], "--by", "--by optimizer", id="no such library"),
        pytest.param(["a", "b", "--again"], "--again", "with commit aaaaaaaa", id="two commits"),
    ],
)
def test_mistyped_side_is_answered_with_a_command(tmp_path, monkeypatch, capsys, words, key, fix):
    rows = ROWS * 3 if "@addamw" in words[0] else ()
    sweep(tmp_path / "a", runs(), rows=rows, **git("a"))
    sweep(tmp_path / "b", runs(), 60, **git("b"))
    monkeypatch.chdir(tmp_path)
    code, content = told(capsys, *words)
    assert code == 2
    assert content["problems"][0]["key"] == key
    assert fix in content["problems"][0]["remark"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["a"],
        ["a", "b", "c"],
        ["a", "b", "--by", "torch"],
        ["a", "b", "--tolerance", "0.03"],
        ["a", "b", "--tolerance", "three"],
    ],
)
def test_wrong_number_of_sides_is_rejected(arguments):
    assert main(["compare", *arguments]) == 2


def typed(optimizer, rate):
    """Overrides of one configuration, with a rate as a user or a sweep's row spells it."""
    return f"optimizer={optimizer}", f"optimizer.lr={rate}"


@pytest.fixture
def machine(monkeypatch):
    """A machine that measures at once, as `--again` asks it to; the words of each sweep."""
    asked = []

    def measure(words):
        asked.append(words)
        folder = Path(
            json.loads(words[-1].partition("=")[2])
            if '"' in words[-1]
            else words[-1].partition("=")[2]
        )
        made = [
            Run({"optimizer": each}, n, speed=(90 if row == "B0" else 100) * NOISE[n % 3])
            for n in range(5)
            for row, each in (("A0", "adamw"), ("B0", "lion"))[:: (-1) ** n]
        ]
        at = folder / f"again-{len(asked)}"
        found = sweep(
            at, made, 600, ["A0" if r.choices["optimizer"] == "adamw" else "B0" for r in made]
        )
        content = json.loads((found / "sweep.json").read_text()) | {"command": words}
        for cell in content["cells"]:
            name = Path(cell["folder"]).name
            (at / name).rename(folder / f"{len(asked)}{name[1:]}")
            cell["folder"] = f"{len(asked)}{name[1:]}"
        for each in folder.glob(f"{len(asked)}*/record.json"):
            record = json.loads(each.read_text())
            each.write_text(json.dumps(record | {"run_id": each.parent.name}))
        (folder / f"sweep-{len(asked)}").mkdir()
        (folder / f"sweep-{len(asked)}" / "sweep.json").write_text(json.dumps(content))
        shutil.rmtree(at)
        return 0

    monkeypatch.setattr("eke.workflows.main", measure)
    return asked


def test_again_alternates_both_sides_in_the_same_sweep(tmp_path, capsys, machine):
    folder = tmp_path / "runs"
    once = [replace(r, overrides=typed(r.choices["optimizer"], "1e-3")) for r in runs(rounds=1)[:2]]
    sweep(folder, once, identity="sweep-old")
    words = [f"{folder}@optimizer=adamw", f"{folder}@optimizer=lion"]
    assert told(capsys, *words)[1]["problem"]["remark"].endswith("--again")
    code, content = told(capsys, *words, "--again")
    assert code == 1
    assert content["in_turns"]
    assert content["rows"][0]["repeats"] == [5, 5]
    assert content["rows"][0]["configuration"] == "optimizer=lion"
    rows = (
        "sweep.rows={A0:{optimizer:adamw,optimizer.lr:1e-3},B0:{optimizer:lion,optimizer.lr:1e-3}}"
    )
    assert machine[0][:4] == ["-m", "rerun=true", rows, "sweep.repeats=5"]
    told(capsys, *words, "--again")
    assert machine[1] == machine[0]


def test_repeat_command_composes(tmp_path):
    """Rows of any overrides that a run may have."""
    made = [
        Run({"optimizer": each}, overrides=(f"optimizer={each}", "data=csv", "data.path='a b.csv'",
            "optimizer.lr=1e-3", "+trainer.extra={a: 1}", "task.labels=[x,'y z']", "seed=1"))
        for each in ("adamw", "lion")
    ]  # fmt: skip
    a, b = (_as_row(Entry(run.typed, "ok")) for run in made)
    found = expand(
        [f"sweep.rows={{A0:{a},B0:{b}}}", "sweep.repeats=2", "task=sequence_classification"]
    )
    assert [cell.row for cell in found.cells] == ["A0", "B0", "B0", "A0"]
    config = found.cells[0].composed.config
    assert (config.data.path, config.optimizer.lr) == ("a b.csv", 1e-3)
    assert config.task.labels == ["x", "y z"]


def test_key_missing_in_an_older_version_has_its_former_value(tmp_path):
    sweep(tmp_path / "a", runs())
    sweep(tmp_path / "b", runs(), 60)
    for file in (tmp_path / "a").glob("*/record.json"):
        record = json.loads(file.read_text())
        del record["config"]["precision"]["casts"]
        file.write_text(json.dumps(record))
    found = compared(str(tmp_path / "a"), str(tmp_path / "b"))
    assert not found.keys
    assert len(found.rows) == 4


def test_single_slow_run_is_excluded_and_named(tmp_path):
    made = runs(rounds=5)
    made[4] = replace(made[4], speed=40)  # adamw's second
    sweep(tmp_path / "a", runs(rounds=5))
    sweep(tmp_path / "b", made, 60)
    found = compared(str(tmp_path / "a"), str(tmp_path / "b"))
    assert {row.label: row.repeats for row in found.rows}["adamw"] == "5 and 4"
    assert any(f"{4:016x}" in note for note in found.notes)
    assert all(row.speed.low > 0.9 for row in found.rows)


def test_folder_name_may_contain_the_separator(tmp_path):
    sweep(tmp_path / "a@home", runs())
    sweep(tmp_path / "b", runs(), 60)
    found = compared(f"{tmp_path}/a@home@optimizer=lion", f"{tmp_path}/b")
    assert [row.label for row in found.rows] == ["lion"]
    assert len(compared(f"{tmp_path}/a@home", f"{tmp_path}/b").rows) == 4


def test_folder_without_record_cannot_be_split(tmp_path):
    sweep(tmp_path, [])
    (tmp_path / SWEEP / "sweep.json").write_text(json.dumps({"cells": [{"overrides": ["a=1"]}]}))
    with pytest.raises(ConfigError, match="none"):
        compared(str(tmp_path), by="torch")


def test_rows_of_several_groups_have_the_name_of_theirs(tmp_path):
    made = [*runs(rows=ROWS[:2]), *runs(rows=ROWS[:2])]
    made[6:] = [replace(r, choices={**r.choices, "model": "small"}) for r in made[6:]]
    sweep(tmp_path / "a", made)
    sweep(tmp_path / "b", made, 60)
    found = compared(f"{tmp_path}/a", f"{tmp_path}/b")
    assert len({row.label for row in found.rows}) == 4
    of_one = compared(f"{tmp_path}/a@small", f"{tmp_path}/b@small")
    assert [row.label for row in of_one.rows] == ["adamw", "lion"]


def test_a_configuration_without_overrides_has_the_name_of_its_side(tmp_path):
    sweep(tmp_path / "a", [Run(repeat=n, seed=n) for n in range(3)])
    sweep(tmp_path / "b", [Run(repeat=n, seed=n, speed=80.0 + n) for n in range(3)], 60)
    (row,) = compared(f"{tmp_path}/a", f"{tmp_path}/b").rows
    assert row.label == f"{tmp_path}/b"


ROUNDS = REPO / "results" / "compare_rounds_cpu.json"


@pytest.fixture
def rounds(tmp_path, monkeypatch):
    """Writes the rounds of the committed sweep into a folder, each record changed by a function."""
    monkeypatch.syspath_prepend(REPO / "benchmarks")
    from compare_rounds import restored

    content = json.loads(ROUNDS.read_text())
    first = content["first"]
    records = [first, *(restored(first, each) for each in content["changes"])]

    def write(name, numbers, change=lambda record: None):
        for record in records:
            if record["config"]["repeat"] in numbers:
                made = json.loads(json.dumps(record))
                change(made)
                (tmp_path / name / made["run_id"]).mkdir(parents=True)
                file = tmp_path / name / made["run_id"] / "record.json"
                file.write_text(json.dumps(made))
        return str(tmp_path / name)

    return write


def slower(record):
    record["throughput"]["samples_per_s"] *= 0.9


def of_another_model(record):
    record["choices"]["model"] = record["config"]["model"]["option"] = "small"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        pytest.param(lambda record: None, 0, id="odd against even rounds"),
        pytest.param(slower, 1, id="speeds lowered by a tenth"),
        pytest.param(of_another_model, 2, id="another model"),
    ],
)
def test_recorded_rounds_are_compared(rounds, capsys, change, code):
    a, b = rounds("even", (0, 2, 4)), rounds("odd", (1, 3, 5), change)
    assert told(capsys, a, b)[0] == code
