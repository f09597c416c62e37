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


def test_published_report_matches_the_file(online, sweep, capsys):
    receipt = Receipt(online.url, "me", "eke", "digest", "url")
    add_receipt(RunPaths(sweep.parent / f"{0:016x}"), receipt)
    assert publish(sweep) == 0
    view_id, view = only_view(online)
    assert (view["entityName"], view["projectName"], view["type"]) == ("me", "eke", "runs")
    assert view["displayName"] == f"eke: {SWEEP}"
    spec = json.loads(view["spec"])
    (grid,) = [block["metadata"] for block in spec["blocks"] if block["type"] == "panel-grid"]
    assert len(grid["panelBankSectionConfig"]["panels"]) == 5
    (run_set,) = grid["runSets"]
    assert run_set.pop("project") == {"id": "I", "name": "eke", "entityName": "me"}
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
    told = "5 runs missing at W&B and in its panels -> eke sync "
    assert said.err.splitlines()[1].startswith(told)
    assert said.err.rstrip().endswith(SWEEP)
    written = read_json(sweep / "report.wandb.json")["spec"]
    for block in written["blocks"]:
        for each in block.get("metadata", {}).get("runSets", ()):
            each.pop("project", None)
    assert without_ids(spec) == without_ids(written)


def without_ids(tree: Any) -> Any:
    """wandb-workspaces makes a random one for each object."""
    if isinstance(tree, dict):
        return {k: without_ids(v) for k, v in tree.items() if k not in ("id", "__id__")}
    return [without_ids(each) for each in tree] if isinstance(tree, list) else tree


def test_republished_report_is_updated(online, sweep, capsys):
    write_json(sweep / "report.wandb.published.json", {"published": [{"id": 3}]})  # broken
    assert publish(sweep) == 0
    first = remembered(sweep)
    online.projects.add("other")
    assert publish(sweep, "--project", "other", "--entity", "team") == 0
    capsys.readouterr()
    assert publish(sweep) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"updated: {first[0]['url']}"
    places = {view_id: (v["entityName"], v["projectName"]) for view_id, v in online.views.items()}
    assert places == {each["id"]: (each["entity"], each["project"]) for each in remembered(sweep)}
    assert sorted(places.values()) == [("me", "eke"), ("team", "other")]
    assert places[first[0]["id"]] == ("me", "eke")


def test_deleted_wandb_report_is_recreated(online, sweep, capsys):
    place = {"server": online.url, "entity": "me", "project": "eke"}
    gone = {**place, "id": "VmlldzoxM0", "url": "gone"}
    write_json(sweep / "report.wandb.published.json", {"published": [gone]})
    online.views = {"other": {"id": "other", "spec": "{}"}}
    assert publish(sweep) == 0
    (kept,) = remembered(sweep)
    assert kept["id"] in online.views
    assert kept["id"] != gone["id"]
    assert capsys.readouterr().out.splitlines()[-1].startswith("published: ")


def failed(sweep: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit code and what was said; the specification is written in any case."""
    code = publish(sweep, *words)
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert (sweep / "report.wandb.json").exists()
    assert not (sweep / "report.wandb.published.json").exists()
    return code, said


def test_unknown_project_is_not_created(online, sweep, capsys):
    code, said = failed(sweep, capsys, "--project", "mistyped")
    assert (code, online.views) == (2, {})
    assert "--project = me/mistyped" in said
    assert "--project NAME" in said


@pytest.mark.parametrize("what", ["ProjectInternalId", "GetProjects", "upsertView"])
def test_failing_server_query_is_reported(what, online, sweep, capsys):
    online.refusals = {what: 404}
    code, said = failed(sweep, capsys)
    assert (code, online.views) == (1, {})
    assert said.strip() != ""
