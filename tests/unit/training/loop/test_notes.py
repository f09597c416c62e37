"""What is read into `effective` follows what was built, not what was asked for."""

import dataclasses
import itertools

import pytest
import torch
from support import TINY, last_wins
from trained import start_job

import eke.training.batches.batches as batches
import eke.training.loop.loop as loop
import eke.training.loop.training_state as job_module
import eke.training.model.checkpointing as checkpointing
from eke.config.schema import Checkpointing
from eke.training.batches.batches import CacheRelease
from eke.training.batches.dataset import TrainingData
from eke.training.loop.training_state import TrainingState
from eke.training.observe.observe_run import AT_THE_END

BASE = (
    *TINY, "model=tiny", "data=synthetic", "data.seq_len=8", "data.num_samples=8",
    "data.num_eval_samples=2", "batch.per_device=2", "train.steps=3", "train.save_final=false",
    "train.timing_warmup_steps=2",
)  # fmt: skip


@pytest.fixture
def trained(make_plan, tmp_path):
    """Overrides -> a job that has trained."""
    numbers = itertools.count()

    def run(*overrides: str) -> TrainingState:
        plan = make_plan(*last_wins(*BASE, *overrides))
        job = start_job(plan, tmp_path / str(next(numbers)))
        loop.train(job)
        for note in AT_THE_END:
            note(job)
        return job

    return run


RECOMPUTED = {
    # overrides: layer calls, layers recomputed, whether anything and linear layers were repeated
    "none": (("memory=none",), (1.0, 0, False, False)),
    "full": (("memory=checkpointing",), (2.0, 2, True, True)),
    "selective": (("memory=checkpointing_selective",), (2.0, 2, True, False)),
    "every_n": (("memory=checkpointing", "memory.every_n=2"), (1.5, 1, True, True)),
    "accumulated": (("memory=checkpointing", "batch.accumulation=2"), (2.0, 2, True, True)),
}


def recomputation(job: TrainingState) -> tuple[float, int, bool, bool]:
    seen = job.effective
    return (
        seen["layer_calls_per_micro_batch"],
        seen["layers_recomputed"],
        seen["operations_recomputed_per_micro_batch"] > 0,
        seen["matmuls_recomputed_per_micro_batch"] > 0,
    )


@pytest.mark.parametrize(("overrides", "expected"), RECOMPUTED.values(), ids=RECOMPUTED.keys())
def test_recomputation_is_recorded(overrides, expected, trained) -> None:
    job = trained(*overrides)
    assert recomputation(job) == expected
    assert job.warnings == []


CORRUPTED = {
    # what is asked for, what the builder does instead, the warning
    "nothing for full": (("memory=checkpointing",), "off", "had no effect"),
    "selective for full": (("memory=checkpointing",), "selective", "no matrix multiplication"),
    "full for selective": (("memory=checkpointing_selective",), "full", "should have kept"),
}


@pytest.mark.parametrize(("asked", "built", "words"), CORRUPTED.values(), ids=CORRUPTED.keys())
def test_different_checkpointing_is_reported(asked, built, words, trained, monkeypatch) -> None:
    wrong = checkpointing.CHECKPOINTING[Checkpointing(built)]
    monkeypatch.setattr(checkpointing, "CHECKPOINTING", dict.fromkeys(Checkpointing, wrong))
    job = trained(*asked)
    assert [words in warning for warning in job.warnings] == [True]


def test_skipped_layers_are_reported(trained, monkeypatch) -> None:
    apply = checkpointing.apply_checkpointing

    def one_off(plan, model):
        apply(plan, model)
        checkpointing.find_layers(model)[0].gradient_checkpointing = False

    monkeypatch.setattr("eke.training.model.save_model.apply_checkpointing", one_off)
    job = trained("memory=checkpointing")
    (warning,) = job.warnings
    assert warning.startswith("memory.checkpointing ")


def test_cpu_offload_settings_have_no_effect_and_warn(trained) -> None:
    job = trained("memory.activation_offload=true", "memory.empty_cache_every=1")
    assert job.effective["activation_bytes_offloaded"] == 0
    assert job.effective["empty_cache_calls"] == 0
    assert len(job.plan.warnings) >= 2  # rules: before the start


def test_offloaded_bytes_and_cache_calls_are_counted_on_a_gpu(trained, monkeypatch) -> None:
    """The host plays the GPU: its tensors count as away, and its allocator as caching."""
    monkeypatch.setattr("eke.training.model.activation_offload.is_on_device", lambda tensor: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    gpu = CacheRelease(2, torch.device("cuda"))
    monkeypatch.setattr(job_module, "CacheRelease", lambda every, device: gpu)
    job = trained("memory.activation_offload=true", "memory.empty_cache_every=2")
    assert job.effective["activation_bytes_offloaded"] > 0
    assert job.effective["empty_cache_calls"] == 1


def test_live_loader_processes_are_counted(trained) -> None:
    job = trained("dataloader.workers=1", "dataloader.prefetch=3", "dataloader.persistent=true")
    seen = job.effective
    assert (seen["loader_workers"], seen["loader_batches_ahead"]) == (1, 3)
    assert seen["loader_workers_kept"] == 1
    assert seen["loader_pinned"] is False
    assert job.warnings == []


def test_evaluations_reuse_loader_processes(make_plan) -> None:
    from eke.training.batches.dataset import build_data

    plan = make_plan(*last_wins(*BASE, "dataloader.workers=1", "dataloader.persistent=true"))
    data = build_data(plan)
    processes, batches = [], []
    for _ in range(2):
        batches.append([batch.labels.tolist() for batch in data.eval_batches()])
        processes.append([process.pid for process in data.eval_loading._iterator._workers])
    assert processes[0] == processes[1]
    assert batches[0] == batches[1] != []


def test_different_loaders_are_reported(trained, monkeypatch) -> None:
    build = TrainingData._loader

    def in_process(data, samples, batches, persistent):
        loader = build(data, samples, batches, False)
        return torch.utils.data.DataLoader(
            loader.dataset, batch_sampler=batches, collate_fn=data.collate
        )

    monkeypatch.setattr(TrainingData, "_loader", in_process)
    job = trained("dataloader.workers=1", "dataloader.persistent=true")
    assert job.effective["loader_workers"] == 0
    assert job.warnings == [
        "dataloader.workers = 1: 0 loader processes are running",
        "dataloader.persistent had no effect: evaluation's loader processes have ended",
    ]


RAGGED = ("data.lengths=uniform", "data.min_len=2", "data.seq_len=16", "data.num_samples=32",
          "train.steps=3")  # fmt: skip


@pytest.mark.parametrize("packing", ["on", "padding_free"])
def test_sequences_that_share_a_row_are_counted(packing, trained) -> None:
    job = trained(*RAGGED, f"data.packing={packing}", "attention=eager")
    assert job.effective["sequences_per_row"] > 1
    assert job.warnings == []


def test_ineffective_padding_free_is_reported(trained, monkeypatch) -> None:
    build = batches.Collator.__call__

    def one_each(collate, samples):
        return build(dataclasses.replace(collate, padding_free=False), samples)

    monkeypatch.setattr(batches.Collator, "__call__", one_each)
    job = trained(*RAGGED, "data.packing=padding_free", "attention=eager")
    assert "sequences_per_row" not in job.effective
    (warning,) = job.warnings
    assert warning.startswith("data.packing=padding_free ")


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [True, False])
def test_uncompiled_model_is_reported(compiled, trained, monkeypatch) -> None:
    if not compiled:
        monkeypatch.setattr(
            "eke.training.loop.training_state.compile_model", lambda plan, model: model
        )
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
    job = trained("compile=eager", "model.num_hidden_layers=1")
    said = [warning for warning in job.warnings if "compile" in warning]
    assert said == ([] if compiled else ["compile=eager had no effect: 0 graphs were captured"])


@pytest.mark.slow
def test_compiled_parts_are_recorded_as_unobserved(trained) -> None:
    """Its calls of kernels are seen; a hook that counts its layers' would be compiled with it."""
    job = trained("compile=eager", "memory=checkpointing", "model.num_hidden_layers=1")
    assert job.effective["not_looked_into"] == "recomputation, fused kernels: compile=eager"
    assert job.effective["matmul_dtypes"] == ["float32"]
    assert "layer_calls_per_micro_batch" not in job.effective
