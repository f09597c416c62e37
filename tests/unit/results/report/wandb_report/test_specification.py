"""What a report at W&B holds: the same content, over keys that eke really logs."""

import builtins
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from unit.results.report.made import SWEEP, make_run
from unit.results.report.wandb_report.runs import make_sweep, three_repeats, tracked

from eke.cli import main
from eke.common.errors import ConfigError
from eke.common.output import escape
from eke.common.paths import RunPaths
from eke.plan.record import metrics, read_record
from eke.results.report import wandb_report as module
from eke.results.report.compare import Comparison, compare_runs
from eke.results.report.compare.sentences import verdict_lines
from eke.results.report.show.file_formats import main_table
from eke.results.report.wandb_report import (
    MAX_FACTORS,
    WandbProject,
    dump,
    find_filter,
    find_project,
    specification,
)
from eke.results.trackers import summary_values
from eke.results.trackers.async_tracker import Totals
from eke.results.trackers.wandb import make_config

PLACE = WandbProject("me", "eke")


def sent(comparison: Comparison) -> dict[str, Any]:
    return json.loads(dump(specification(comparison, PLACE)))


def blocks(comparison: Comparison, kind: str) -> list[dict[str, Any]]:
    return [b for b in sent(comparison)["spec"]["blocks"] if b["type"] == kind]


def text_of(comparison: Comparison) -> str:
    return "\n".join(block["content"] for block in blocks(comparison, "markdown-block"))


def grid(comparison: Comparison) -> dict[str, Any]:
    (found,) = blocks(comparison, "panel-grid")
    return found["metadata"]


def run_set(comparison: Comparison) -> dict[str, Any]:
    (found,) = grid(comparison)["runSets"]
    return found


def test_report_panels(sweep):
    panels = grid(compare_runs([sweep]))["panelBankSectionConfig"]["panels"]
    kinds = [panel["viewType"] for panel in panels]
    assert kinds == ["Scatter Plot", *["Run History Line Plot"] * 4]
    scatter, *lines = (panel["config"] for panel in panels)
    assert scatter["xAxis"] == "summary:peak_allocated_gib"
    assert scatter["yAxis"] == "summary:samples_per_s"
    assert [(*each["metrics"], each["xAxis"]) for each in lines] == [
        ("eval/loss", "train/global_step"), ("train/loss", "train/global_step"),
        ("train/loss", "train/total_tokens"), ("train/loss", "train/time_s"),
    ]  # fmt: skip


def test_charts_precede_the_verdict_and_table(sweep):
    found = sent(compare_runs([sweep]))["spec"]["blocks"]
    kinds = [each["type"] for each in found if each["type"] != "paragraph"]
    assert kinds == ["panel-grid", "markdown-block", "markdown-block"]
    lines = text_of(compare_runs([sweep])).splitlines()
    assert sum(line.startswith("| --") for line in lines) == 1


def test_panels_do_not_overlap(sweep):
    panels = grid(compare_runs([sweep]))["panelBankSectionConfig"]["panels"]
    cells = [cell for panel in panels for cell in _cells(panel["layout"])]
    assert len(cells) == len(set(cells)) == 3 * 24 * 8
    assert max(x for x, _ in cells) == 23


def _cells(layout: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    for x in range(layout["x"], layout["x"] + layout["w"]):
        for y in range(layout["y"], layout["y"] + layout["h"]):
            yield x, y


def test_wandb_panels_use_logged_keys(sweep):
    paths = RunPaths(sweep.parent / f"{0:016x}")
    record = read_record(paths)
    assert record is not None
    rows = [{**row, metrics.TOKENS: 9} for row in metrics.read_rows(paths.metrics)[0]]
    rows.append({metrics.STEP: rows[-1][metrics.STEP], metrics.EVAL_LOSS: 2.0})
    logged = {key for row in Totals(paths.metrics, 0).add(rows) for key in row}
    logged |= set(summary_values(record))
    for panel in grid(compare_runs([sweep]))["panelBankSectionConfig"]["panels"]:
        config = panel["config"]
        axes = [config[axis] for axis in ("xAxis", "yAxis") if axis in config]
        named = {name.removeprefix("summary:") for name in (*axes, *config.get("metrics", []))}
        assert named <= logged, panel["viewType"]


@pytest.mark.parametrize("key", ["precision", "optimizer.lr"])
def test_runs_are_grouped_by_wandb_keys(key, tmp_path):
    values = ("fp32", "bf16") if key == "precision" else ("fp32", "fp32")
    runs = [tracked(value, keys={"optimizer.lr": (n + 1) * 1e-3} if "." in key else {})
            for n, value in enumerate(values)]  # fmt: skip
    found = compare_runs([make_sweep(tmp_path, runs)])
    ((section, path),) = [(g["section"], g["name"]) for g in run_set(found)["grouping"]]
    assert section == "config"
    assert f"config:{path}" in run_set(found)["runFeed"]["columnPinned"]
    record = found.rows[0].variant.records[0]
    # As the server has a run's configuration: each key at the top wrapped into `value`.
    config = {k: {"value": v} for k, v in make_config(record.choices, record.config).items()}
    assert _at(config, path) == ("fp32" if key == "precision" else 1e-3)


def _at(tree: Any, path: str) -> Any:
    for name in path.split("."):
        tree = tree[name]
    return tree


def test_very_different_runs_are_listed_separately(tmp_path):
    changes = {
        "optimizer.lr": 0.125, "optimizer.weight_decay": 0.125, "train.steps": 7,
        "batch.per_device": 3, "dataloader.num_workers": 5, "model.dropout": 0.5,
        "model.hidden_size": 64,
    }  # fmt: skip
    found = compare_runs([make_sweep(tmp_path, [tracked("fp32"), tracked("fp32", keys=changes)])])
    assert len(found.factors) > MAX_FACTORS
    assert run_set(found)["grouping"] == []
    assert len(run_set(found)["runFeed"]["columnPinned"]) > MAX_FACTORS


def filter_of(comparison: Comparison) -> tuple[str, str, Any]:
    (found,) = run_set(comparison)["filters"]["filters"]
    assert found["disabled"] is False
    return found["key"]["name"], found["op"], found["value"]


@pytest.mark.parametrize(
    ("groups", "found"),
    [
        ([SWEEP, SWEEP], ("group", "=", SWEEP)),
        # One's record answered for this sweep's cell; at W&B it is in the group of the earlier one.
        (["sweep-earlier", SWEEP], ("name", "IN", [f"{0:016x}", f"{1:016x}"])),
    ],
)
def test_sweep_is_filtered_by_group_or_ids(groups, found, tmp_path):
    runs = [tracked(p, group=g) for p, g in zip(("fp32", "bf16"), groups, strict=True)]
    comparison = compare_runs([make_sweep(tmp_path, runs)])
    assert filter_of(comparison) == found
    which = f"group {SWEEP}" if found[0] == "group" else "2 runs by their ids"
    assert f"{which} in project eke" in text_of(comparison)


def test_several_sweeps_are_filtered_by_groups(tmp_path):
    one = make_sweep(tmp_path / "a", [tracked("fp32", group="sweep-a")], "sweep-a")
    other = make_sweep(tmp_path / "b", [tracked("bf16", group="sweep-b")], "sweep-b")
    assert filter_of(compare_runs([one, other])) == ("group", "IN", ["sweep-a", "sweep-b"])
    run = make_run(tmp_path / "0123456789abcdef-2", tracked("fp32", group=None))
    assert filter_of(compare_runs([run])) == ("name", "=", "0123456789abcdef-2")


@pytest.mark.parametrize("name", ["a=b", "q'uote", 'q"uote', "ü"])
def test_group_changed_by_the_library_is_not_used(name, tmp_path):
    found = compare_runs([make_sweep(tmp_path, [tracked("fp32", group=name)], name)])
    assert filter_of(found) == ("name", "=", f"{0:016x}")


def test_report_without_runs_has_no_panels(tmp_path):
    sweep = make_sweep(tmp_path, [])
    content = json.loads((sweep / "sweep.json").read_text())
    content["cells"] = [{"overrides": ["precision=fp8"], "outcome": "refused", "reason": "no fp8"}]
    (sweep / "sweep.json").write_text(json.dumps(content))
    found = compare_runs([sweep])
    assert find_filter(found) is None
    assert blocks(found, "panel-grid") == []
    assert "refused" in text_of(found)


def test_wandb_report_has_the_texts_of_other_formats(sweep):
    found = compare_runs([sweep])
    text = text_of(found)
    assert all(escape(line) in text for line in verdict_lines(found))
    assert "6 runs of 2 configurations: 6 ok" in text
    assert "\n".join(main_table(found, 100)) in text


def test_long_table_is_shortened(sweep, monkeypatch):
    monkeypatch.setattr(module, "MAX_TABLE_ROWS", 1)
    assert "report.csv" in text_of(compare_runs([sweep]))


HOSTILE = "<script>x</script> [a](javascript:b) | `c` $d$ ~e~ *f* \\ \x00 \ud800"


def test_hostile_names_are_escaped(tmp_path):
    runs = [tracked("fp32"), tracked("bf16")]
    found = compare_runs([make_sweep(tmp_path, runs, rows=["first", "#" + HOSTILE])])
    text = text_of(found)
    assert "&lt;script&gt;x&lt;/script&gt; \\[a\\](" in text
    assert "\\| \\`c\\`" in text
    assert "\\$d\\$ \\~e\\~ \\*f\\* \\\\" in text
    assert not [part for part in ("<script", "\x00", "\ud800") if part in text]
    assert json.dumps(sent(found)).encode()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("# x", "\\# x"),
        ("- x", "\\- x"),
        ("a # x", "a # x"),
        ("==", "\\=\\="),
        ("", ""),
        ("a_b __c__ d_", "a_b \\_\\_c\\_\\_ d\\_"),
    ],
)
def test_sentence_is_not_parsed_as_a_block(text, shown):
    assert escape(text) == shown


def test_title_is_shortened(tmp_path):
    found = compare_runs([make_sweep(tmp_path, [tracked("fp32")], "s" * 200)])
    assert len(sent(found)["displayName"]) == module._MAX_TITLE_CHARS
    assert sent(found)["displayName"].startswith("eke: sss")


def test_wandb_report_uses_the_project_of_its_runs(tmp_path):
    found = compare_runs([make_sweep(tmp_path, three_repeats(project="mine"))])
    assert find_project(found) == WandbProject("", "mine")
    assert find_project(found, "other", "team") == WandbProject("team", "other")


def test_runs_of_several_projects_need_a_flag(tmp_path):
    runs = [tracked("fp32", project="one"), tracked("bf16", project="two")]
    found = compare_runs([make_sweep(tmp_path, runs)])
    with pytest.raises(ConfigError, match="one, two") as caught:
        find_project(found)
    assert "--project one" in str(caught.value)
    assert find_project(found, "two") == WandbProject("", "two")


def test_wandb_file_holds_the_published_report(sweep, capsys):
    assert main(["report", str(sweep), "--quiet", "--formats=none", "--wandb"]) == 0
    content = json.loads((sweep / "report.wandb.json").read_text())
    assert content["displayName"] == f"eke: {SWEEP}"
    assert (content["entityName"], content["projectName"]) == ("", "eke")
    said = capsys.readouterr()
    assert "report.wandb.json" in said.out
    assert said.err == ""
    assert sorted(file.name for file in sweep.iterdir()) == ["report.wandb.json", "sweep.json"]


@pytest.mark.parametrize("option", ["--wandb", "--publish"])
def test_missing_wandb_package_is_reported(option, sweep, monkeypatch, capsys):
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("wandb_workspaces"):
            raise ModuleNotFoundError("gone", name=name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["report", str(sweep), "--quiet", "--formats=md", option]) == 2
    told = capsys.readouterr().err
    assert "wandb-workspaces" in told
    assert '-> pip install "eke[report]"' in told
    assert (sweep / "report.md").exists()  # the other files have been written
    assert not (sweep / "report.wandb.json").exists()


def test_project_without_wandb_flag_has_no_effect(sweep, capsys):
    assert main(["report", str(sweep), "--quiet", "--formats=none", "--project=p"]) == 0
    assert "without --wandb" in capsys.readouterr().err
