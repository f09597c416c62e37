"""`eke show`: keys, options, groups and runs, at every width."""

import json
from pathlib import Path

import pytest
from unit.plan.record.samples import full_record

from eke.cli import main
from eke.common.screen import plain, take_flags
from eke.plan.record import write_record
from eke.results.report.summary import render_summary


def shown(capsys, *words: str) -> str:
    assert main(["show", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("what", "facts"),
    [
        ("optimizer.lr", {"type": "a number", "limits": "above 0 and at most 100",
                          "default": "0.001"}),
        ("train.steps", {"default": "null", "null": "from epochs, else 300"}),
        ("seed", {"default": "0", "page": "docs/reference/configuration/run.md"}),
        ("model.name_or_path", {"default": "required", "defaults": {"pretrained": "required"}}),
        ("optimizer=lion", {"about": "Lion: the sign of a momentum, by bitsandbytes."}),
        ("recipe=fastest", {"option": "recipe=fastest"}),
        ("trainer", {"group": "trainer", "options": {}}),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)  # fmt: skip
def test_facts_of_a_word(what, facts, capsys) -> None:
    found = json.loads(shown(capsys, what, "--json"))
    assert facts.items() <= found.items()
    assert {"rules", "page"} <= set(found)


def test_page_is_found_from_another_folder(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Path(json.loads(shown(capsys, "seed", "--json"))["page"]).is_file()


def test_explanation_names_defaults_of_options_and_rules(capsys) -> None:
    text = shown(capsys, "optimizer.lr")
    assert "0.0003 (lion, lion_8bit)" in text
    assert "lr_far_off" in text
    card = shown(capsys, "optimizer=muon")
    assert "Saves" in card
    assert "muon_needs_matrices" in card
    assert "apex_needs_cuda" in card  # a rule about the group
    assert "rank_saves_nothing" not in card  # a rule about a key that muon does not have


@pytest.fixture
def run(make_run):
    paths = make_run("9dfebed7d5fce6b0")
    paths.plan.unlink()
    write_record(paths, full_record(run_id="9dfebed7d5fce6b0"))
    return paths


@pytest.mark.parametrize("what", ["runs/9dfebed7d5fce6b0", "runs/9dfe", "9dfe"])
def test_run_is_found_by_folder_or_unique_beginning(what, run, capsys) -> None:
    assert json.loads(shown(capsys, what, "--json")) == json.loads(run.record.read_text())


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_figures_of_a_run_are_complete_and_fit(columns, run, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = shown(capsys, "9dfe")
    assert all(len(line) <= columns or "/" in line for line in text.splitlines())
    summary = render_summary(full_record(), "").replace("warning:", "warning")
    words = [word.strip(",;") for line in summary.splitlines()[1:] for word in line.split()]
    assert not {word for word in words if word not in text} - {"record"}
    assert [line for line in text.splitlines() if line in ("speed", "memory", "loss")]


@pytest.mark.parametrize(
    ("what", "fix"),
    [
        ("optimizer.lrr", "eke show optimizer.lr"),
        ("optimizer=moun", "eke show optimizer=muon"),
        ("xyzzy", "eke train --help all"),
        ("runs/9", "runs/9a"),
        ("runs/2", "eke status runs/2"),
    ],
)
def test_unknown_word_is_one_problem(what, fix, make_run, capsys) -> None:
    for name in ("9a", "9b"):
        make_run(name, "ok")
    make_run("2")
    assert main(["show", what, "--json"]) == 2
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["key"] == "WHAT"
    assert problem["remark"].startswith(fix)


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
@pytest.mark.parametrize("what", ["optimizer.lr", "optimizer=muon", "model", "train"])
def test_explanations_fit(what, columns, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = shown(capsys, what, "--color=always")
    take_flags([])
    assert "\x1b[" in text
    lines = plain(text).splitlines()
    assert all(len(line) <= columns or len(line.split()) == 1 for line in lines)
