"""Metrics and callbacks of own code."""

from typing import Any

import pytest
from own_plans import chars, frozen, on_path, own_plan, run_folder, shapes
from trained import continue_job, steps_of, train_job

from eke.common.errors import RunError
from eke.config.schema import CallbackEntry, MetricEntry
from eke.config.schema.custom import OnError
from eke.plan.record import metrics

on_path()

SAVED = ("train.checkpoint_every=2", "train.keep_checkpoints=9", "train.save_final=true")


def evaluations(job: Any) -> list[dict[str, float]]:
    rows, _ = metrics.read_rows(job.paths.metrics)
    return metrics.latest(rows, metrics.EVAL_LOSS)


BITS = {
    "bits": MetricEntry(target="chars.metrics.Bits"),
    "first": MetricEntry(target="chars.metrics.first_is_right"),
}


def test_metrics_have_one_value_for_any_cut(make_plan, tmp_path, train_plan) -> None:
    plain = own_plan(make_plan, "batch.per_device=8", **chars())
    watched = own_plan(
        make_plan, "batch.per_device=8", "batch.eval_per_device=2", **chars(), metrics=BITS
    )
    whole = own_plan(
        make_plan, "batch.per_device=8", "batch.eval_per_device=6", **chars(), metrics=BITS
    )
    first, other = (train_job(plan, run_folder(tmp_path, plan)) for plan in (watched, whole))
    assert steps_of(first) == steps_of(train_job(plain, run_folder(tmp_path, plain)))
    names = ("eval/bits/mean", "eval/bits/count", "eval/first")
    for one, two in zip(evaluations(first), evaluations(other), strict=True):
        assert [one[n] for n in names] == pytest.approx([two[n] for n in names], abs=1e-5)
        assert one["eval/bits/mean"] == pytest.approx(one["eval/loss"] / 0.693147, abs=1e-4)
    two = own_plan(
        make_plan, "batch.per_device=4", "batch.eval_per_device=2", "distributed=ddp", **chars(),
        metrics=BITS,
    )  # fmt: skip
    folder = train_plan(frozen(two, tmp_path / "runs"))
    rows, _ = metrics.read_rows(folder / "metrics.jsonl")
    last = metrics.latest(rows, metrics.EVAL_LOSS)[-1]
    end = evaluations(first)[-1]
    assert [last[n] for n in names] == pytest.approx([end[n] for n in names], abs=1e-5)


def test_torchmetrics_and_compute_metrics(make_plan, tmp_path) -> None:
    found = {
        "accuracy": MetricEntry(
            target="torchmetrics.classification.MulticlassAccuracy",
            args={"num_classes": 4, "average": "micro"},
            inputs={"preds": "logits", "target": "label"},
        ),
        "plain": MetricEntry(target="shapes.parts.compute_metrics"),
    }
    plan = own_plan(
        make_plan, "batch.per_device=10", samples=20, eval_samples=8, **shapes(), metrics=found
    )
    job = train_job(plan, run_folder(tmp_path, plan))
    for row in evaluations(job):
        assert row["eval/accuracy"] == pytest.approx(row["eval/plain/accuracy"])
    assert any(row["eval/accuracy"] > 0 for row in evaluations(job))


def test_a_failing_metric_is_switched_off_unless_it_is_needed(make_plan, tmp_path) -> None:
    found = {
        "wrong": MetricEntry(target="chars.metrics.Bits", inputs={"output": "logits", "batch": "z"})
    }
    plan = own_plan(make_plan, "batch.per_device=8", **chars(), metrics=found)
    job = train_job(plan, run_folder(tmp_path, plan))
    assert any("metrics.wrong" in warning for warning in job.warnings)
    assert "eval/wrong/mean" not in evaluations(job)[-1]
    needed = own_plan(
        make_plan, "batch.per_device=8", "train.keep_best=loss", **chars(), metrics=found
    )
    needed.config.train.keep_best = "wrong/mean"
    with pytest.raises(RunError, match="keep_best=loss"):
        train_job(needed, run_folder(tmp_path, needed))


def test_a_callback_changes_no_loss(make_plan, tmp_path) -> None:
    plain = own_plan(make_plan, "batch.per_device=8", *SAVED, **chars(dropout=0.2))
    texts = {"texts": CallbackEntry(target="chars.watch.Texts", args={"length": 4})}
    plan = own_plan(make_plan, "batch.per_device=8", *SAVED, **chars(dropout=0.2), callbacks=texts)
    job = train_job(plan, run_folder(tmp_path, plan))
    assert not job.warnings
    assert steps_of(job) == steps_of(train_job(plain, run_folder(tmp_path, plain)))
    written = (job.paths.folder / "callbacks/texts/texts.txt").read_text().splitlines()
    assert [line.split()[:2] for line in written] == [[str(n), str(n)] for n in range(1, 7)]
    again = continue_job(job, 4, run_folder(tmp_path, plan) / "again")
    more = (again.paths.folder / "callbacks/texts/texts.txt").read_text().splitlines()
    assert more == written[4:]


def test_a_callback_stops_a_run(make_plan, tmp_path) -> None:
    stops = {"stops": CallbackEntry(target="chars.watch.Stops", args={"at": 3})}
    plan = own_plan(make_plan, "batch.per_device=8", *SAVED, **chars(), callbacks=stops)
    job = train_job(plan, run_folder(tmp_path, plan))
    assert list(steps_of(job)) == [1, 2, 3]
    assert evaluations(job)[-1][metrics.STEP] == 3
    assert job.effective["callback_stop"] == 3
    assert (job.paths.model / "config.json").is_file()


def breaks(how: str, on_error: OnError = OnError.warn) -> dict[str, CallbackEntry]:
    return {
        "breaks": CallbackEntry(target="chars.watch.Breaks", args={"how": how}, on_error=on_error)
    }


@pytest.mark.parametrize(("how", "named"), [("raise", "broken"), ("attribute", "deepspeed_plugin")])
def test_a_failing_callback_is_switched_off(how, named, make_plan, tmp_path) -> None:
    plan = own_plan(make_plan, "batch.per_device=8", **chars(), callbacks=breaks(how))
    job = train_job(plan, run_folder(tmp_path, plan))
    (warning,) = job.warnings
    assert "callbacks.breaks" in warning
    assert named in warning
    plan = own_plan(make_plan, "batch.per_device=8", **chars(), callbacks=breaks(how, OnError.fail))
    with pytest.raises(RunError, match=named):
        train_job(plan, run_folder(tmp_path, plan))


def test_a_callback_that_changes_weights_ends_the_run(make_plan, tmp_path) -> None:
    plan = own_plan(make_plan, "batch.per_device=8", **chars(), callbacks=breaks("weights"))
    with pytest.raises(RunError, match=r"callbacks\.breaks"):
        train_job(plan, run_folder(tmp_path, plan))


def test_callbacks_of_transformers(make_plan, tmp_path) -> None:
    found = {"printer": CallbackEntry(target="transformers.PrinterCallback")}
    plan = own_plan(make_plan, "batch.per_device=8", **chars(), callbacks=found)
    assert not train_job(plan, run_folder(tmp_path, plan)).warnings


@pytest.mark.parametrize("target", ["chars.watch.Misnamed", "chars.watch.Nothing"])
def test_unknown_events_are_refused(target, make_plan, tmp_path) -> None:
    found = {"x": CallbackEntry(target=target)}
    plan = own_plan(make_plan, "batch.per_device=8", **chars(), callbacks=found)
    with pytest.raises(RunError, match=r"callbacks\.x\.target"):
        train_job(plan, run_folder(tmp_path, plan))
