"""Reports really saved at a loopback server by wandb-workspaces, and what arrived there."""

import json
from pathlib import Path
from typing import Any

import pytest
from unit.results.report.made import SWEEP
from unit.results.trackers.stub import Server

from eke.cli import main
from eke.common.files import read_json, write_json
from eke.common.paths import RunPaths
from eke.results.trackers.sync.account import Receipt, add_receipt

QUIET = ("--quiet", "--formats=none")


def publish(sweep: Path, *words: str) -> int:
    return main(["report", str(sweep), *QUIET, "--publish", *words])


def remembered(sweep: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read_json(sweep / "report.wandb.published.json")["published"]
    return found


def only_view(server: Server) -> tuple[str, dict[str, Any]]:
    ((view_id, view),) = server.views.items()
    return view_id, view


def test_it_arrives(online, sweep, capsys):
    assert publish(sweep) == 0
    view_id, view = only_view(online)
    assert (view["entityName"], view["projectName"], view["type"]) == ("me", "eke", "runs")
    assert view["displayName"] == f"eke: {SWEEP}"
    blocks = json.loads(view["spec"])["blocks"]
    (grid,) = [block["metadata"] for block in blocks if block["type"] == "panel-grid"]
    assert len(grid["panelBankSectionConfig"]["panels"]) == 6
    (run_set,) = grid["runSets"]
    assert run_set["project"] == {"id": "I", "name": "eke", "entityName": "me"}
    (only,) = run_set["filters"]["filters"]
    assert (only["key"], only["op"], only["value"]) == (
        {"section": "run", "name": "group"}, "=", SWEEP
    )  # fmt: skip
    assert [each["name"] for each in run_set["grouping"]] == ["precision.value"]
    said = capsys.readouterr()
    (kept,) = remembered(sweep)
    assert kept["id"] == view_id
    assert kept["url"].endswith(f"/me/eke/reports/eke:-{SWEEP}--{view_id}")
    assert said.out.splitlines()[-1] == f"published: {kept['url']}"


def test_what_is_sent_is_the_file_with_the_project_named(online, sweep):
    assert publish(sweep) == 0
    written = read_json(sweep / "report.wandb.json")["spec"]
    sent = json.loads(only_view(online)[1]["spec"])
    for spec in (written, sent):
        for block in spec["blocks"]:
            for run_set in block.get("metadata", {}).get("runSets", ()):
                run_set.pop("project", None)
    assert without_ids(sent) == without_ids(written)


def without_ids(tree: Any) -> Any:
    """wandb-workspaces makes a random one for each object."""
    if isinstance(tree, dict):
        return {k: without_ids(v) for k, v in tree.items() if k not in ("id", "__id__")}
    return [without_ids(each) for each in tree] if isinstance(tree, list) else tree


@pytest.mark.slow
def test_runs_that_eke_sync_sent_are_those_it_shows(online, sweep, capsys):
    assert main(["sync", str(sweep)]) == 0
    capsys.readouterr()
    assert publish(sweep) == 0
    assert capsys.readouterr().err == f"W&B's server: {online.url}\n"  # none is missing
    assert {run["groupName"] for run in online.runs.values()} == {SWEEP}
    for run_id, run in online.runs.items():
        assert json.loads(run["config"])["precision"]["value"] in ("fp32", "bf16")
        assert online.summaries[run_id]["samples_per_s"] >= 100
        assert online.summaries[run_id]["peak_allocated_bytes"] == 100 * 2**20
        assert [row["train/time_s"] for row in online.rows[run_id]] == [0.5, 1.0, 1.5]


def test_runs_that_were_not_sent_are_counted(online, sweep, capsys):
    sent = Receipt(online.url, "me", "eke", "digest", 3, "url", True)
    add_receipt(RunPaths(sweep.parent / f"{0:016x}"), sent)
    assert publish(sweep) == 0
    error = capsys.readouterr().err
    told = "5 runs without a sign of being at W&B: panels lack them -> eke sync "
    assert error.splitlines()[1].startswith(told)
    assert error.rstrip().endswith(SWEEP)


def test_typed_again_it_is_the_same_report(online, sweep, capsys):
    assert publish(sweep) == 0
    first = remembered(sweep)
    assert publish(sweep) == 0
    assert only_view(online)[0] == first[0]["id"]
    assert remembered(sweep) == first
    assert capsys.readouterr().out.splitlines()[-1] == f"updated: {first[0]['url']}"


def test_a_report_that_was_deleted_there_is_made_anew(online, sweep, capsys):
    assert publish(sweep) == 0
    view_id, view = only_view(online)
    online.views = {"other": view}
    assert publish(sweep) == 0
    (kept,) = remembered(sweep)
    assert kept["id"] in online.views
    assert kept["id"] != view_id
    assert capsys.readouterr().out.splitlines()[-1].startswith("published: ")


def test_another_project_has_a_report_of_its_own(online, sweep):
    online.projects.add("other")
    for words in ((), ("--project", "other"), ()):
        assert publish(sweep, *words) == 0
    assert {view["projectName"] for view in online.views.values()} == {"eke", "other"}
    assert len(online.views) == 2
    assert {each["project"] for each in remembered(sweep)} == {"eke", "other"}


def test_a_broken_memory_makes_a_new_one(online, sweep):
    write_json(sweep / "report.wandb.published.json", {"published": [{"id": 3}]})
    assert publish(sweep) == 0
    assert [each["id"] for each in remembered(sweep)] == list(online.views)


def test_the_entity_that_is_typed_goes_first(online, sweep):
    assert publish(sweep, "--entity", "team") == 0
    assert only_view(online)[1]["entityName"] == "team"


def failed(sweep: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit code and what was said; the specification is written in any case."""
    code = publish(sweep, *words)
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert (sweep / "report.wandb.json").exists()
    assert not (sweep / "report.wandb.published.json").exists()
    return code, said


def test_an_unknown_project_is_not_made(online, sweep, capsys):
    code, said = failed(sweep, capsys, "--project", "mistyped")
    assert (code, online.views) == (2, {})
    assert "project me/mistyped: the server knows none of this name" in said
    assert "--project NAME" in said


@pytest.mark.parametrize("what", ["ProjectInternalId", "GetProjects", "upsertView"])
def test_a_server_that_refuses_a_question(what, online, sweep, capsys):
    online.refusals = {what: 404}
    code, said = failed(sweep, capsys)
    assert (code, online.views) == (1, {})
    assert said.strip() != ""
