"""A mix trains the same however it is cut or stopped, and its losses are those of its sources."""

import json
import os
import signal

import pytest
import torch
import torch.nn.functional as F
from equivalence_compare import curve, largest_difference
from live import record_of as record_in
from live import rows_of, run_folders
from prepared import write_jsonl
from support import TINY, last_wins
from trained import continue_job, record_of, start_job, train_job

from eke.plan.planner import plans_of_sources
from eke.plan.record import metrics
from eke.training.batches.tasks import MixSamples, open_split

MODEL_INPUTS = ("input_ids", "position_ids")
NAMES = ("first", "second", "third")
SHORT = (
    "model=tiny", "data=mix", "data.seq_len=24", "data.num_eval_samples=20", "train.steps=9",
    "train.log_every=4", "train.checkpoint_every=null", "train.save_final=false",
    "optimizer.lr=3e-3", "batch.per_device=12",
)  # fmt: skip
STREAMED = "the first source is a stream, which is read several times"
CASES = {
    "causal_lm": (),
    "masked_lm": ("model=tiny_bert", "task=masked_lm"),
    "classification": ("model=tiny_bert", "task=sequence_classification"),
    "packed": ("data.packing=on",),
    "padding-free": ("data.packing=padding_free",),
    "grouped": ("data.length_grouping=true",),
    "streamed": (STREAMED,),
    "streamed and masked": ("model=tiny_bert", "task=masked_lm", STREAMED),
    "streamed, padding-free": ("data.packing=padding_free", STREAMED, "data.num_samples=100"),
}


@pytest.fixture
def mixed(tmp_path, prepared_here):
    """Overrides of a mix of two files of rows and a text, or of rows alone for classes."""

    def make(*overrides: str) -> tuple[str, ...]:
        classes = "task=sequence_classification" in overrides
        for name, count in zip(NAMES, (60, 9, 30), strict=True):
            rows = [
                {"text": f"{name} {n} " + "word " * (n % 5), "label": n % 2} for n in range(count)
            ]
            write_jsonl(tmp_path / f"{name}.jsonl", rows)
        (tmp_path / "third.txt").write_text("a text that is cut into windows. " * 40)
        third = "option:jsonl,path:third.jsonl" if classes else "option:text,path:third.txt"
        listed = (
            "{option:jsonl,path:first.jsonl,weight:5},{option:jsonl,path:second.jsonl,weight:3},"
            f"{{{third},weight:2}}"
        ).replace("path:", f"path:{tmp_path}/")
        if STREAMED in overrides:
            listed = listed.replace("}", ",streaming:true,shuffle_buffer:16}", 1)
        typed = [override for override in overrides if override != STREAMED]
        return last_wins(*SHORT, *TINY, *typed, f"data.sources=[{listed}]")

    return make


def losses_of(job_or_folder) -> list[list[float]]:
    """Of each step the loss, and that of each source it has samples of."""
    paths = getattr(job_or_folder, "paths", None)
    rows, _ = metrics.read_rows(paths.metrics if paths else job_or_folder / "metrics.jsonl")
    keys = (metrics.LOSS, *(f"{metrics.LOSS}/{name}" for name in NAMES))
    return [[row[key] for key in keys if key in row] for row in metrics.latest(rows, metrics.LOSS)]


@pytest.mark.parametrize("case", CASES)
def test_micro_batch_size_does_not_change_training(case, mixed, job_of) -> None:
    base = mixed(*CASES[case])
    whole = job_of("whole", *base)
    cut = job_of("cut", *last_wins(*base, "batch.per_device=3", "batch.accumulation=4"))
    assert largest_difference(curve(whole), curve(cut)) < 1e-5
    assert curve(whole)[0][0] != curve(whole)[-1][0], "the loss never moved"
    for one, other in zip(losses_of(whole), losses_of(cut), strict=True):
        assert one == pytest.approx(other, rel=2e-5)


@pytest.mark.parametrize("case", ["classification", "streamed"])
def test_trainer_matches_the_loop_exactly(case, mixed, job_of) -> None:
    base = mixed(*CASES[case])
    loop, trainer = job_of("loop", *base), job_of("trainer", *base, "engine=trainer")
    assert curve(loop) == curve(trainer)
    assert losses_of(loop) == losses_of(trainer)


HEADS = {
    "plain": (),
    "fused": ("kernels.fused_linear_cross_entropy=true",),
    "sparse": ("kernels=sparse_prediction",),
    "both": ("kernels=sparse_prediction", "kernels.fused_linear_cross_entropy=true"),
    "cut up": ("batch.per_device=5", "batch.target=15", "engine=trainer"),
}


@pytest.mark.parametrize(("case", "head"), [
    *((case, "plain") for case in CASES if "streamed " not in case), ("padding-free", "both"),
    ("masked_lm", "fused"), ("masked_lm", "sparse"), ("masked_lm", "cut up"),
])  # fmt: skip
def test_training_loss_per_source_matches_its_rows(case, head, mixed, make_plan, tmp_path) -> None:
    """Of the first step: row by row, with the logits of the untrained model."""
    base = mixed(*CASES[case], "model.dropout=0", "train.steps=1")
    trained = train_job(make_plan(*last_wins(*base, *HEADS[head])), tmp_path / "run")
    fresh = start_job(make_plan(*base), tmp_path / "fresh")
    fresh.model.eval()
    samples = fresh.data.train
    assert isinstance(samples, MixSamples)
    sums, counts = [0.0] * 3, [0] * 3
    (keys,) = trained.data.order().steps(0, 1)
    for key in keys:
        sample = samples[key]
        loss, count = loss_of(fresh, sample)
        source = int(sample["source"].flat[0])
        sums[source] += loss
        counts[source] += count
    expected = [sum(sums) / sum(counts), *(a / b for a, b in zip(sums, counts, strict=True))]
    assert losses_of(trained) == [pytest.approx(expected, rel=1e-5)]


@pytest.mark.parametrize("case", ["streamed", pytest.param("packed", marks=pytest.mark.slow)])
def test_two_ranks_match_one(case, mixed, job_of, train_ranks) -> None:
    base = mixed(*CASES[case], "data.num_eval_samples=5")
    one = job_of("one", *base)
    folder = train_ranks("distributed=ddp", *last_wins(*base, "batch.per_device=6"))
    rows, _ = metrics.read_rows(folder / "metrics.jsonl")
    alone, _ = metrics.read_rows(one.paths.metrics)
    for key in [metrics.LOSS, *(f"{metrics.EVAL_LOSS}/{name}" for name in NAMES)]:
        expected = [row[key] for row in metrics.latest(alone, key)]
        assert [row[key] for row in metrics.latest(rows, key)] == pytest.approx(expected, rel=1e-5)
    for one_step, other in zip(losses_of(one), losses_of(folder), strict=True):
        assert one_step == pytest.approx(other, rel=2e-5)
    for name in NAMES:
        key = f"{metrics.SAMPLES}/{name}"
        assert [r[key] for r in rows if key in r] == [r[key] for r in alone if key in r]


@pytest.mark.parametrize("case", ["causal_lm", "grouped", "streamed and masked"])
def test_resumed_mix_is_bit_exact(case, mixed, job_of, tmp_path) -> None:
    """Behind the end of every source's first epoch."""
    base = last_wins(*mixed(*CASES[case]), "train.steps=13", "train.checkpoint_every=10")
    whole = job_of("whole", *base)
    again = continue_job(whole, 10, tmp_path / "again")
    assert curve(again) == curve(whole)[10:]


def loss_of(job, sample) -> tuple[float, int]:
    """Sum over the targets of a sample, with logits of the plain model, and their number."""
    labels = torch.from_numpy(sample["labels"]).reshape(-1)
    inputs = {k: torch.from_numpy(v)[None] for k, v in sample.items() if k in MODEL_INPUTS}
    with torch.no_grad():
        logits = job.bare_model(**inputs).logits
    logits = logits.reshape(-1, logits.shape[-1]).double()
    loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum").item()
    return loss, int((labels != -100).sum())


def test_loader_processes_do_not_change_a_stream(mixed, job_of) -> None:
    base = mixed(*CASES["streamed"], "train.steps=16")
    alone, by_others = job_of("alone", *base), job_of("others", *base, "dataloader.workers=2")
    assert curve(alone) == curve(by_others)
    found = record_of(alone).sources["first"]
    assert found["samples"] > 2 * 40, "it begins again after its 40 rows"
    assert "epochs" not in found, "nobody counted them"


def test_rows_of_a_mixed_stream_keep_their_order(mixed, make_plan, tmp_path) -> None:
    """In the order of the files, through the buffer; none is left out between two epochs."""
    base = mixed(*CASES["streamed"], "train.steps=16")
    job = start_job(make_plan(*base), tmp_path / "mix")
    own = ("data=jsonl", f"data.path={tmp_path}/first.jsonl", "data.streaming=true")
    kept = [word for word in base if not word.startswith("data.sources")]
    alone = make_plan(*last_wins(*kept, *own, "data.shuffle_buffer=16"))
    stream = open_split(alone, evaluation=False)
    keys = [key for step in job.data.order().steps(0, 16) for key in step]
    drawn = [sample for key in keys if not (sample := job.data.train[key])["source"][0]]
    assert len(drawn) > 2 * 40
    for number, sample in enumerate(drawn):
        assert sample["input_ids"].tolist() == stream[0, number]["input_ids"].tolist()


def by_hand(job, source: int) -> float:
    """The mean over the targets of one source, row by row, with logits of the plain model."""
    samples = job.data.evaluation
    assert isinstance(samples, MixSamples)
    total, count = 0.0, 0
    for index in range(len(samples.parts[source])):
        sample = samples.parts[source][source, index]  # epoch 0 of this source
        loss, targets = loss_of(job, sample)
        total, count = total + loss, count + targets
    return total / count


@pytest.mark.parametrize("case", ["causal_lm", "masked_lm", "classification"])
def test_eval_loss_per_source_matches_its_rows(case, mixed, job_of) -> None:
    job = job_of("run", *mixed(*CASES[case]))
    job.model.eval()
    rows, _ = metrics.read_rows(job.paths.metrics)
    last = metrics.latest(rows, metrics.EVAL_LOSS)[-1]
    losses = [last[f"{metrics.EVAL_LOSS}/{name}"] for name in NAMES]
    for number in range(3):
        assert losses[number] == pytest.approx(by_hand(job, number), rel=1e-5)
    assert min(losses) < last[metrics.EVAL_LOSS] < max(losses)


def test_record_counts_the_samples_of_each_source(mixed, job_of) -> None:
    job = job_of("run", *mixed())
    found = record_of(job).sources
    assert list(found) == list(NAMES)
    counts = [found[name]["samples"] for name in NAMES]
    assert sum(counts) == sum(
        row[metrics.SAMPLES]
        for row in metrics.read_rows(job.paths.metrics)[0]
        if "train/loss" in row
    )
    for count, share in zip(counts, (0.5, 0.3, 0.2), strict=True):
        assert abs(count - sum(counts) * share) <= 3
    second = plans_of_sources(job.plan)[1].steps.num_train_samples
    assert found["second"]["epochs"] == pytest.approx(counts[1] / second)
    assert found["second"]["epochs"] > 2, "a small source repeats"
    assert [found[name]["train_loss"] for name in NAMES] == losses_of(job)[-1][1:]
    json.dumps(found)


@pytest.mark.slow
def test_killed_mix_resumes_bit_exact(mixed, start, train_ranks, tmp_path) -> None:
    more = ("train.steps=150", "train.checkpoint_every=20", "hardware=cpu")
    base = last_wins(*mixed(*CASES["streamed"]), *more)
    whole = train_ranks(*base).rename(tmp_path / "whole")
    live = start(*base)
    live.wait_for_step(50)
    os.kill(live.worker_pid(), signal.SIGKILL)
    live.finish()
    (folder,) = run_folders(tmp_path)
    os.remove(folder / "record.json")
    assert train_ranks(*base) == folder
    assert record_in(folder)["attempt"] == 1

    def losses(run) -> list[tuple]:
        best = {row[metrics.STEP]: row for row in rows_of(run) if "train/loss" in row}
        keys = (metrics.LOSS, *(f"{metrics.SAMPLES}/{name}" for name in NAMES))
        return [tuple(best[step][key] for key in keys) for step in sorted(best)]

    assert losses(folder) == losses(whole)
    assert record_in(folder)["sources"] == record_in(whole)["sources"]
