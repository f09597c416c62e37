"""engine=trainer: what Trainer is told, what the record says of it, and how it ends."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support import DIVERGES, last_wins
from trained import BRIEF, changed, start_job

from eke.common.errors import RunError
from eke.common.paths import RunPaths
from eke.plan.record import metrics
from eke.training.loop.attempt import ENGINES, run_engine
from eke.training.loop.failure import Diverged
from eke.training.loop.trainer_engine import build_arguments, render_arguments
from eke.training.model.loss import loss_head

BASE = last_wins(
    *BRIEF, "engine=trainer", "data.seq_len=8", "data.num_samples=10", "data.num_eval_samples=2",
    "batch.per_device=2", "batch.accumulation=2", "train.steps=6", "train.log_every=1",
)  # fmt: skip


@pytest.fixture
def job_of(make_plan, tmp_path):
    """Overrides -> a job in one and the same folder; None of its steps taken."""

    def make(*overrides: str, attempt: int = 0):
        return start_job(make_plan(*last_wins(*BASE, *overrides)), tmp_path, attempt)

    return make


def run(job):
    run_engine(job)
    return job


def rows_of(job) -> list[dict]:
    return metrics.latest(metrics.read_rows(job.paths.metrics)[0], metrics.LOSS)


def curve(job) -> list[tuple[float, float, float]]:
    names = (metrics.LOSS, "train/grad_norm", "train/learning_rate")
    return [tuple(row[name] for name in names) for row in rows_of(job)]


def test_plan_is_converted_to_training_arguments(make_plan, tmp_path) -> None:
    plan = make_plan(*BASE, "train.max_grad_norm=null", "trainer.extra.neftune_noise_alpha=5")
    told = render_arguments(plan, RunPaths(tmp_path))
    assert told["gradient_accumulation_steps"] == 2
    assert told["per_device_train_batch_size"] == 2
    assert told["max_steps"] == 6
    assert told["max_grad_norm"] == 0.0, "Trainer's way to say: do not clip"
    assert told["neftune_noise_alpha"] == 5
    assert told["use_cpu"] is True


def test_arguments_rejected_by_trainer_are_reported(make_plan, tmp_path) -> None:
    plan = make_plan(*BASE, "trainer.extra.debug=nonsense")
    with pytest.raises(RunError, match=r"engine = trainer: .*nonsense"):
        build_arguments(plan, RunPaths(tmp_path))


def test_one_of_several_gpus_is_used(make_plan, tmp_path, monkeypatch) -> None:
    """With two of them Trainer would split the plan's rows, and average what has been divided."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    plan = make_plan(*BASE)
    on_gpu = replace(plan, device=replace(plan.device, kind="cuda"))
    arguments = build_arguments(on_gpu, RunPaths(tmp_path))
    assert arguments.n_gpu == 1
    assert arguments.train_batch_size == plan.batch.per_device
    assert build_arguments(plan, RunPaths(tmp_path)).n_gpu == 0


@pytest.mark.slow
def test_record_names_the_engine_and_phase_times(job_of) -> None:
    job = run(job_of())
    told = job.effective["trainer"]
    assert told["class"] == "transformers.trainer.Trainer"
    assert told["arguments"]["gradient_accumulation_steps"] == 2
    assert told["arguments"]["save_strategy"] == "no"
    assert job.effective["layer_calls_per_micro_batch"] == 1
    assert job.profiled_peak > 0
    assert job.warnings == []
    rows = rows_of(job)
    assert [row[metrics.SAMPLES] for row in rows] == [4, 4, 2] * 2, "ten samples in steps of four"
    for row in rows:
        assert all(row[metrics.PHASE_KEYS[phase]] > 0 for phase in metrics.PHASES[1:])
        assert row[metrics.STEP_TIME] == pytest.approx(
            sum(row[metrics.PHASE_KEYS[phase]] for phase in metrics.PHASES)
        )
    assert [metrics.WARMUP in row for row in rows] == [True] * 2 + [False] * 4


@pytest.mark.slow
@pytest.mark.parametrize("first", ["loop", "trainer"])
def test_either_engine_resumes_the_other(first, job_of, tmp_path) -> None:
    second = {"loop": "trainer", "trainer": "loop"}[first]
    precise = ("precision=fp16", "optimizer=adamw_foreach", f"engine={first}")
    run(job_of(*precise, "train.steps=4", "train.save_final=true", "schedule=constant"))
    (tmp_path / "metrics.jsonl").unlink()
    ends = []
    for engine in (first, second):
        job = run(job_of(*precise, f"engine={engine}", "schedule=constant", attempt=1))
        assert job.start_step == 4
        ends.append(curve(job))
        (tmp_path / "metrics.jsonl").unlink()
    assert ends[0] == ends[1]
    assert len(ends[0]) == 2


@pytest.mark.slow
def test_skipped_step_does_not_delay_the_schedule(job_of) -> None:
    """fp16: Trainer moves its schedule only when a step was taken; eke's goes by step number."""
    overrides = ("precision=fp16", "optimizer=adamw_foreach", "schedule=linear", "train.steps=9")
    jobs = [job_of(*overrides, f"engine={engine}") for engine in ENGINES]
    curves = []
    for job in jobs:
        assert job.formats.scaler is not None
        too_high = torch.amp.GradScaler("cpu", init_scale=2.0**20)
        job.formats = replace(job.formats, scaler=too_high)
        job.update.scaler = too_high
        curves.append(curve(run(job)))
        job.paths.metrics.unlink()
    loop, trainer = curves
    skipped = [not math.isfinite(norm) for _, norm, _ in loop]
    assert any(skipped)
    assert not all(skipped)
    assert [(loss, lr) for loss, _, lr in loop] == [(loss, lr) for loss, _, lr in trainer]


@pytest.mark.slow
def test_divergence_ends_training(job_of) -> None:
    job = job_of(*DIVERGES, "train.steps=9")
    with pytest.raises(Diverged, match="the loss is"):
        run(job)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["loop", "trainer"])
def test_non_finite_final_evaluation_is_a_failure(engine, job_of, monkeypatch) -> None:
    monkeypatch.setattr(
        "eke.training.loop.evaluation.add_evaluation",
        lambda job, batch, total, *_: total.fill_(math.nan),
    )
    short = (f"engine={engine}", "train.steps=2")
    with pytest.raises(Diverged, match="nan at the last step, 2"):
        run(job_of(*short))
    run(job_of(*short, "train.stop_on_nonfinite=false"))


@pytest.mark.slow
def test_extra_arguments_take_effect(job_of, tmp_path) -> None:
    plain = curve(run(job_of("train.steps=2")))
    (tmp_path / "metrics.jsonl").unlink()
    job = run(job_of("train.steps=2", "trainer.extra.neftune_noise_alpha=5"))
    assert curve(job)[0][0] != plain[0][0]
    assert job.effective["trainer"]["arguments"]["neftune_noise_alpha"] == 5


@pytest.mark.parametrize(
    "kernels",
    [
        "sparse_prediction",
        pytest.param("fused_linear_cross_entropy", marks=pytest.mark.slow),
        pytest.param("none", marks=pytest.mark.slow),
    ],
)
def test_label_smoothing_matches_torch_for_each_loss_head(job_of, kernels) -> None:
    typed = ("train.steps=2", "trainer.extra.label_smoothing_factor=0.3")
    plain = job_of(*typed)
    batch = next(plain.data.train_steps(0))
    with torch.no_grad():
        total = sum(
            torch.nn.functional.cross_entropy(
                plain.model(**micro.inputs).logits.flatten(0, 1),
                micro.labels.flatten(),
                label_smoothing=0.3,
                reduction="sum",
            ).item()
            for micro in batch
        )
    mean = total / sum(micro.num_targets for micro in batch)
    job = run(job_of(*typed, f"kernels={kernels}"))
    assert curve(job)[0][0] == pytest.approx(mean, rel=1e-5)
    if kernels != "none":
        assert loss_head(job.bare_model).projected is not None


@pytest.mark.slow
def test_default_extra_argument_is_warned_about(job_of) -> None:
    job = run(job_of("train.steps=2", "trainer.extra.full_determinism=false"))
    assert job.warnings == [
        "trainer.extra.full_determinism=False had no effect: equal to Trainer's default"
    ]


def test_different_update_class_is_rejected(job_of) -> None:
    with pytest.raises(RunError, match="-> engine=loop"):
        run(changed(job_of(), update=SimpleNamespace()))


@pytest.mark.slow
def test_no_tensor_value_is_read_between_writes(job_of, monkeypatch) -> None:
    """Trainer waits for no device between two writes, either; the first two steps are looked at."""
    from unit.training.loop.test_no_sync import trapped

    job = job_of("train.log_every=100", "train.steps=6", "data.num_samples=64")
    batches = iter(list(itertools.islice(job.data.train_steps(0), 6)))
    monkeypatch.setattr(type(job.data), "train_steps", lambda *_: batches)
    reads = []
    finish = job.meter.end_step

    def end_step(step, *rest) -> None:
        finish(step, *rest)
        reads.append(trap.reads)

    job.meter.end_step = end_step
    with trapped(monkeypatch) as trap:
        run(job)
    assert reads[4] == reads[2]
