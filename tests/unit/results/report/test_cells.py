"""Names of a sweep's runs, and the failures and the table at its end."""

import pytest
from unit.plan.record.samples import bare_record

from eke.common.screen import plain
from eke.plan.record import Throughput
from eke.results.report.summary import describe_factors, distinct_overrides, factor_columns
from eke.results.report.sweep_result import (
    Failed,
    SweepCellResult,
    failure_lines,
    means_over_repeats,
    result_table,
)


def test_only_differing_overrides_are_shown():
    cells = [("seed=1", "precision=bf16"), ("seed=1", "precision=fp16"), ("seed=1",)]
    assert distinct_overrides(cells) == [("precision=bf16",), ("precision=fp16",), ()]
    assert distinct_overrides([("seed=1",)]) == [("seed=1",)]
    assert distinct_overrides([]) == []


def columns_of(cells, rows=()):
    return {c.title: c.cells for c in factor_columns(cells, rows or [""] * len(cells))}


def test_each_differing_key_has_a_column():
    cells = [("a=1", "b=x y", "+c=1"), ("a=1", "b=z"), ("a=1",)]
    assert columns_of(cells) == {"b": ["x y", "z", ""], "c": ["1", "", ""]}
    assert columns_of(cells[:1]) == {}


def test_many_differing_keys_have_one_column():
    cells = [tuple(f"k{n}={m}" for n in range(6) if m != n) for m in range(3)]
    assert columns_of(cells)["configuration"][1] == "k2=1 k3=1 k4=1 k5=1 k0=1"


def test_what_a_row_sets_is_not_repeated():
    cells = [(f"a={n}", f"b={n}", f"seed={s}") for n in (0, 1) for s in (0, 1)]
    found = columns_of(cells, ["one", "one", "two", "two"])
    assert found == {"row": ["one", "one", "two", "two"], "seed": ["0", "1", "0", "1"]}


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        ([(f"a={n}", f"seed={s}") for n in range(3) for s in range(2)], "6 runs (3 a x 2 seeds)"),
        ([("a=1", "b=1"), ("a=2",), ("b=3",)], "3 runs"),
        ([("a=1",)], "1 run"),
    ],
    ids=["product", "no product", "one"],
)
def test_factors_of_a_product_are_counted(cells, told):
    assert describe_factors(cells, [""] * len(cells)) == told


def cell(*overrides, outcome="ok", samples=None, tokens=None, loss=None, row=""):
    record = bare_record()
    record.outcome = outcome
    record.throughput = Throughput(samples, tokens)
    record.loss.eval_final = loss
    return SweepCellResult(overrides, row, outcome, record)


def test_means_are_over_what_was_measured():
    cells = [
        cell("a=1", "seed=0", samples=10.0, loss=2.0),
        cell("a=1", "seed=1", samples=20.0),
        cell("a=1", "seed=2", outcome="oom", samples=99.0, loss=9.0),
        cell("a=2", "seed=0"),
        SweepCellResult(("a=3", "seed=0"), "", "refused", None),
    ]
    first, second, third = means_over_repeats(cells)
    assert (first["runs"], first["ok"]) == (3, 2)
    assert (first["samples_per_s"], first["eval_final"]) == (15.0, 2.0)
    assert (second["ok"], second["samples_per_s"]) == (1, None)
    assert (third["overrides"], third["ok"]) == (["a=3"], 0)


def test_table_is_sorted_by_speed_with_blank_missing_values():
    cells = [
        cell("a=1", "seed=0", samples=10.0, tokens=2000.0, loss=2.0),
        cell("a=2", "seed=0", samples=20.0, tokens=4000.0),
        cell("a=2", "seed=1", outcome="oom"),
    ]
    header, *rows = map(plain, result_table(means_over_repeats(cells)))
    assert header.split() == ["a", "runs", "samples/s", "eval", "loss"]
    assert rows[0].split() == ["2", "1", "of", "2", "20"]
    assert rows[1].split() == ["1", "1", "10", "2.0000"]
    assert rows[1].endswith("2.0000")
    assert len(rows[1]) == len(header), "numbers are aligned to the right"


def test_tokens_are_shown_if_samples_differ_in_length():
    cells = [
        cell("data.seq_len=128", samples=20.0, tokens=2560.0),
        cell("data.seq_len=256", samples=10.0, tokens=2560.0),
    ]
    header, row, _ = result_table(means_over_repeats(cells))
    assert "tokens/s" in header
    assert "2.56 k" in row


def test_same_reason_is_shown_once_with_its_fix():
    failed = [Failed(f"seed={n}", "oom", "out of memory", "memory=checkpointing") for n in range(3)]
    failed += [Failed("precision=tf32", "refused", "needs Ampere -> precision=fp32", "eke logs")]
    assert failure_lines(failed) == [
        "  oom  seed=0 and 2 others",
        "    out of memory",
        "    -> memory=checkpointing",
        "  refused  precision=tf32",
        "    needs Ampere",
        "    -> precision=fp32",
    ]


def test_many_different_failures_are_counted():
    lines = failure_lines([Failed(f"seed={n}", "crashed", f"reason {n}") for n in range(9)])
    assert lines[-1].split() == ["...", "and", "4", "more", "failures"]


def test_many_keys_begin_with_those_that_differ_most() -> None:
    cells = [("a=1", "b=1", "c=1", "d=1", "e=1", f"seed={n}") for n in range(3)]
    text = columns_of([*cells, ("a=2", "b=2", "c=2", "d=2", "e=2", "seed=3")])["configuration"]
    assert [each.split()[0] for each in text] == ["seed=0", "seed=1", "seed=2", "seed=3"]
