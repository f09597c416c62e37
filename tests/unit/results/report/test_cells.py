"""The table at the end of a sweep."""

from unit.plan.record.samples import bare_record, full_record

from eke.results.report.summary import distinct_overrides, render_cells


def test_only_differing_overrides_are_shown():
    cells = [("seed=1", "precision=bf16"), ("seed=1", "precision=fp16"), ("seed=1",)]
    assert distinct_overrides(cells) == [("precision=bf16",), ("precision=fp16",), ()]
    assert distinct_overrides([("seed=1",)]) == [("seed=1",)]
    assert distinct_overrides([]) == []


def test_table_has_one_line_per_run_with_blank_missing_values():
    table = render_cells(
        [
            (("precision=bf16",), "ok", "", full_record()),
            (("precision=fp16",), "diverged", "loss is nan", bare_record()),
            (("precision=tf32",), "refused", "needs Ampere", None),
            (("precision=fp32",), "", "", None),
        ]
    )
    lines = table.splitlines()
    assert lines[0].split() == (
        ["outcome", "samples/s", "step", "peak", "memory", "eval", "loss", "what", "differs"]
    )
    assert lines[1].split() == (
        ["ok", "80.00", "100", "ms", "3.00", "GiB", "2.5000", "precision=bf16"]
    )
    assert lines[2].split() == ["diverged", "precision=fp16"]
    assert lines[4].split() == ["not", "run", "precision=fp32"]
    at = lines[0].index("what differs")
    assert [line[at:] for line in lines[1:5]] == [
        "precision=bf16",
        "precision=fp16",
        "precision=tf32",
        "precision=fp32",
    ]
    assert "diverged: precision=fp16\n  loss is nan" in table
    assert "refused: precision=tf32\n  needs Ampere" in table
