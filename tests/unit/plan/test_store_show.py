"""plan.json comes back as the very same plan; on the screen nothing that was decided is missing."""

import dataclasses
import json

import pytest
from unit.plan.cases import GPU, SYNTHETIC, config_of, plan_config, plan_of

from eke.common.errors import RunError
from eke.common.paths import RunPaths, conf_folder
from eke.config.schema import VARIANTS
from eke.models.families import FAMILIES
from eke.plan.planner import outline_record, plan_to_plain, read_plan, render_plan, write_plan
from eke.plan.record import Failure, Loss, Outcome, Timing, read_record, write_record

MODELS = sorted(
    {path.stem for path in (conf_folder() / "model").glob("*.yaml")} - {"pretrained", "custom"}
)


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path)


@pytest.mark.parametrize("model", MODELS)
def test_every_model_and_task_round_trips(model, paths) -> None:
    config = config_of(*SYNTHETIC, f"model={model}", "optimizer=sgd", "schedule=wsd")
    for task in FAMILIES[config.model.family].tasks:
        cls = VARIANTS["task"][task]
        plan = plan_config(dataclasses.replace(config, task=cls(option=task)))
        write_plan(paths, plan)
        assert read_plan(paths) == plan, "each variant as its own class"


@pytest.mark.parametrize(
    "content",
    ["", "[]", "null", "3", '"plan"', "{}", '{"run_id": "a"}', "{torn"],
    ids=["empty", "list", "null", "number", "text", "no keys", "one key", "torn"],
)
def test_invalid_plan_file_is_named(content, paths) -> None:
    paths.plan.write_text(content)
    with pytest.raises(RunError, match=r"plan\.json: not a readable plan"):
        read_plan(paths)


def test_missing_plan_is_reported(paths) -> None:
    with pytest.raises(RunError, match=r"plan\.json"):
        read_plan(paths)


@pytest.mark.parametrize(
    ("group", "key"), [("model", "speed"), ("batch", "speed"), ("optimizer", "momentum")]
)
def test_unknown_key_is_rejected(group, key, paths) -> None:
    content = plan_to_plain(plan_of(*SYNTHETIC))
    content["config"][group][key] = 1
    paths.plan.write_text(json.dumps(content))
    with pytest.raises(RunError, match="not a readable plan"):
        read_plan(paths)


# --- on the screen ------------------------------------------------------------------------------


def test_screen_shows_every_decision_with_its_reason(monkeypatch) -> None:
    plan = plan_of("data=synthetic", "batch.target=16", "precision=bf16")
    assert render_plan(plan).startswith(f"plan {plan.run_id}\n")
    monkeypatch.setenv("COLUMNS", "400")
    text = render_plan(plan)
    for one in plan.decisions:
        (line,) = [line for line in text.splitlines() if line.startswith(f"  {one.key} ")]
        assert line.endswith(one.reason)
        assert one.value in line
    assert "precision=bf16" in text
    assert "recipe=none" not in text


def test_screen_shows_the_size_of_the_run(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    plan = plan_of(*SYNTHETIC, "batch.per_device=8", device=GPU)
    text = render_plan(plan)
    assert "160" in text, "20 steps of 8 samples"
    assert "2.50 epochs of 64 samples" in text
    assert "80.00 GiB  declared, not present: for planning only" in text
    assert plan.size.flops_formula in text


def test_unknown_memory_stays_unknown() -> None:
    device = dataclasses.replace(GPU, memory_bytes=None)
    (line,) = [
        line
        for line in render_plan(plan_of(*SYNTHETIC, device=device)).splitlines()
        if line.startswith("  device memory")
    ]
    assert "unknown" in line


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_reasons_are_wrapped_between_words(columns, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    plan = plan_of(*SYNTHETIC)
    text = render_plan(plan)
    assert max(map(len, text.splitlines())) <= columns
    words = text.split()
    for one in plan.decisions:
        assert " ".join(one.reason.split()) in " ".join(words)


# --- the record that follows from it --------------------------------------------------------------


def test_record_outline_holds_plan_and_rows(paths) -> None:
    from unit.plan.record.samples import eval_row, step_row

    plan = plan_of(*SYNTHETIC, "precision=bf16", device=GPU, warnings=("careful",))
    rows = [eval_row(0, 5.5), step_row(1, seconds=0.5), step_row(2, seconds=0.5)]
    failure = Failure("worker", "killed")
    record = outline_record(plan, rows, 3, Outcome.crashed, failure)
    assert (record.outcome, record.exit_code, record.attempt) == ("crashed", 1, 3)
    assert record.steps_done == 2
    assert record.loss == Loss(4.0, 2.0, 5.5)
    assert record.throughput.samples_per_s == pytest.approx(16)
    expected = plan.size.flops_per_token * 200 / 1e15  # tokens seen a second
    assert record.throughput.mfu_frac == pytest.approx(expected), "of the peak in bfloat16"
    assert record.config["seed"] == 0
    assert "config" not in record.plan
    assert record.plan["steps"]["total"] == 20
    assert record.warnings == ["careful"]
    assert record.failure == failure
    write_record(paths, record)
    assert read_record(paths) == json_like(record)


def json_like(record):
    """JSON has no tuples."""
    return dataclasses.replace(record, plan=json.loads(json.dumps(record.plan)))


def test_record_outline_without_rows_has_no_measurements() -> None:
    record = outline_record(plan_of(*SYNTHETIC), [], 0, Outcome.crashed, None)
    assert record.steps_done == 0
    assert record.timing == Timing(clock="wall")
    assert record.loss == Loss()
    assert record.throughput.samples_per_s is None
    assert record.memory.measured is None
