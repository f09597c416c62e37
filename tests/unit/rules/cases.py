"""For every rule a command and a device that break it; and the surroundings it looks at."""

import dataclasses
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from checkpoints import save_checkpoint
from unit.rules import (
    cases_attention,
    cases_compile,
    cases_deepspeed,
    cases_distributed,
    cases_engine,
    cases_float8,
    cases_kernels,
    cases_memory,
    cases_nvme,
    cases_offload,
    cases_optimizer,
    cases_peft,
    cases_precision,
    cases_shapes,
    cases_usual,
)
from unit.rules.devices import CPU, H200

from eke.config.compose import compose, is_set
from eke.hardware import Device
from eke.models.checkpoints import resolve_model
from eke.rules import Facts

TOPICS = (
    cases_precision,
    cases_float8,
    cases_shapes,
    cases_optimizer,
    cases_memory,
    cases_attention,
    cases_compile,
    cases_kernels,
    cases_distributed,
    cases_deepspeed,
    cases_offload,
    cases_nvme,
    cases_peft,
    cases_engine,
    cases_usual,
)
"""Modules with the cases of one group's rules."""

SYNTHETIC = ("data=synthetic",)

CASES: dict[str, tuple[tuple[str, ...], Device]] = {
    "task_needs_other_model": (("model=tiny_bert",), CPU),
    "heads_divide_width": (("model.num_attention_heads=3",), CPU),
    "key_value_heads_divide_heads": (("model.num_key_value_heads=3",), CPU),
    "rotary_width_is_even": (("model.hidden_size=36", "model.num_attention_heads=4"), CPU),
    "rotary_head_dim_is_even": (("model.head_dim=7",), CPU),
    "sequence_fits_positions": (
        ("model=tiny_bert", "task=masked_lm", "data.seq_len=513"),
        CPU,
    ),
    "vocabulary_holds_bytes": (("model.vocab_size=200",), CPU),
    "synthetic_ids_fit": ((*SYNTHETIC, "data.min_token=400"), CPU),
    "synthetic_ids_not_special": ((*SYNTHETIC, "data.min_token=0"), CPU),
    "min_len_within_seq_len": (
        (*SYNTHETIC, "data.lengths=uniform", "data.min_len=300"),
        CPU,
    ),
    "experts_hidden_size_is_aligned": (("model=tiny_moe", "model.hidden_size=130"), CPU),
    "experts_intermediate_size_is_aligned": (("model=tiny_moe", "model.intermediate_size=33"), CPU),
    "bytes_on_checkpoint": (
        ("model=pretrained", "model.name_or_path={tmp}/model", "data.tokenizer=bytes"),
        CPU,
    ),
    "datasets_missing": (("data=parquet", "data.path={tmp}/a.txt"), CPU),
    "early_stop_needs_evaluations": (("train.early_stop_patience=2",), CPU),
    "keep_best_is_a_metric": (("train.keep_best=eval_los", "train.eval_every=2"), CPU),
    "stop_keeps_nothing": (("train.save_on_signal=false", "train.checkpoint_every=null"), CPU),
    "keep_best_needs_evaluations": (("train.keep_best=loss",), CPU),
    "packing_needs_causal_decoder": (
        (
            *SYNTHETIC,
            "data.lengths=uniform",
            "data.packing=on",
            "model=tiny_bert",
            "task=masked_lm",
        ),
        CPU,
    ),
    "packing_needs_ragged": ((*SYNTHETIC, "data.packing=padding_free"), CPU),
    "grouping_needs_ragged": (("data.length_grouping=true",), CPU),
    "multiple_needs_padding": (("data.pad_to_multiple_of=8",), CPU),
    "padded_fits_positions": (
        (
            *SYNTHETIC,
            "model=tiny_bert",
            "task=masked_lm",
            "data.seq_len=500",
            "data.pad_to_multiple_of=64",
            "model.max_position_embeddings=510",
            "data.lengths=uniform",
            "data.min_len=490",
        ),
        CPU,
    ),
    "padding_needs_eps": (
        (*SYNTHETIC, "data.lengths=uniform", "model.rms_norm_eps=0"),
        CPU,
    ),
    "prompt_needs_response": (("data=jsonl", "data.path={tmp}/a.txt", "data.prompt=ask"), CPU),
    "seq2seq_needs_pairs": (
        ("data=jsonl", "data.path={tmp}/a.txt", "model=tiny_t5", "task=seq2seq_lm"),
        CPU,
    ),
    "pairs_need_a_task": (
        (
            "data=jsonl",
            "data.path={tmp}/a.txt",
            "model=tiny_bert",
            "task=masked_lm",
            "data.prompt=ask",
            "data.response=say",
        ),
        CPU,
    ),
    "pair_needs_classifier": (("data=jsonl", "data.path={tmp}/a.txt", "data.text_pair=b"), CPU),
    "outputs_suit_problem": (
        (
            "data=synthetic",
            "task=sequence_classification",
            "task.problem=regression",
            "task.num_labels=3",
        ),
        CPU,
    ),
    "problem_needs_labels": (("task=sequence_classification", "task.problem=multi_label"), CPU),
    "chat_is_causal": (
        (
            "data=chat",
            "data.path={tmp}/a.txt",
            "data.tokenizer={tmp}",
            "model=tiny_bert",
            "task=masked_lm",
        ),
        CPU,
    ),
    "chat_needs_a_tokenizer": (("data=chat", "data.path={tmp}/a.txt"), CPU),
    "stream_has_no_lengths": (
        ("data=jsonl", "data.path={tmp}/a.txt", "data.streaming=true", "data.length_grouping=true"),
        CPU,
    ),
    "shuffle_buffer_needs_stream": (
        ("data=jsonl", "data.path={tmp}/a.txt", "data.shuffle_buffer=5"),
        CPU,
    ),
    "stream_needs_steps": (
        ("data=jsonl", "data.path={tmp}/a.txt", "data.streaming=true", "train.epochs=1"),
        CPU,
    ),
    "median_needs_lognormal": ((*SYNTHETIC, "data.median_len=10"), CPU),
    "lengths_are_counted": (
        (*SYNTHETIC, "data.lengths=uniform", "data.packing=on", "data.num_samples=1000001"),
        CPU,
    ),
    "min_len_needs_ragged": ((*SYNTHETIC, "data.min_len=10"), CPU),
    "tied_embeddings_need_head": (
        ("task=sequence_classification", "model.tie_word_embeddings=false"),
        CPU,
    ),
    "untied_bert_has_dead_bias": (
        ("model=tiny_bert", "task=masked_lm", "model.tie_word_embeddings=false"),
        CPU,
    ),
    "t5_is_always_tied": (
        ("model=tiny_t5", "task=seq2seq_lm", "model.tie_word_embeddings=false"),
        CPU,
    ),
    "experts_for_each_token": (("model=tiny_moe", "model.num_experts_per_tok=5"), CPU),
    "dropout_is_known": (("model.dropout=null",), CPU),
    "stretching_needs_long_positions": (("model.rope_scaling_factor=8",), CPU),
    "batch_contradiction": (("batch.target=32", "batch.accumulation=2"), CPU),
    "target_is_multiple": (("batch.target=12",), CPU),
    "auto_chooses_micro_batch": (("batch=auto", "batch.per_device=4"), CPU),
    "auto_derives_accumulation": (("batch=auto", "batch.accumulation=3"), CPU),
    "steps_or_epochs": (("train.steps=5", "train.epochs=1"), CPU),
    "warmup_within_run": (("train.steps=5", "schedule.warmup_steps=6"), CPU),
    "nesterov_needs_momentum": (
        ("optimizer=sgd", "optimizer.nesterov=true", "optimizer.momentum=0"),
        CPU,
    ),
    "norm_is_known_anyway": (("train.record_grad_norm=false",), CPU),
    "too_short_to_time": (("train.steps=5",), CPU),
    "persistent_needs_workers": (("dataloader.persistent=true",), CPU),
    "prefetch_needs_workers": (("dataloader.prefetch=4",), CPU),
    "text_exists": (("data=text", "data.path=/nowhere/at/all"), CPU),
    "text_readable": (("data=text", "data.path={tmp}/secret.txt"), CPU),
    "runs_writable": (("paths.runs={tmp}/a.txt/runs",), CPU),
    "runs_has_space": (("paths.runs={tmp}/runs",), CPU),
    "declared_device_is_absent": (("hardware=h200",), H200),
    "more_workers_than_cores": (("dataloader.workers=256",), CPU),
    "package_missing": (("tracker=wandb",), CPU),
    "online_needs_key": (("tracker.mode=online",), CPU),
    "mode_is_wandbs": (("tracker=none", "tracker.mode=online"), CPU),
    "entity_is_wandbs": (("tracker=none", "tracker.entity=team"), CPU),
    "uri_is_mlflows": (("tracker=none", "tracker.uri=sqlite:///mlflow.db"), CPU),
    "uri_is_no_folder": (("tracker=mlflow", "tracker.uri=mlruns"), CPU),
    "uri_has_a_store": (("tracker=mlflow", "tracker.uri=htp://host:5000"), CPU),
    "pinning_needs_cuda": (("dataloader.pin_memory=on",), CPU),
    "states_do_not_fit": (("model=llama3_8b",), CPU),
    "batch_does_not_fit": (("batch.per_device=1000000",), CPU),
}

PREPARE: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {}
"""Rule -> what its surroundings need, where that is more than a command and a device."""

for topic in TOPICS:
    CASES |= topic.CASES
    PREPARE |= getattr(topic, "PREPARE", {})


FIX_IS_WORDS = {
    "text_exists", "text_readable", "runs_has_space", "runs_writable",
    "declared_device_is_absent", "datasets_missing",
}  # fmt: skip
"""A path only the user knows, or a state of the machine that the test holds on to."""

for topic in TOPICS:
    FIX_IS_WORDS |= topic.FIX_IS_WORDS


def prepare(rule: str, tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the files and the state of the machine that this rule is about."""
    PREPARE.get(rule, lambda *_: None)(tmp, monkeypatch)
    (tmp / "a.txt").write_text("text " * 1000)
    (tmp / "secret.txt").write_text("text")
    if rule == "bytes_on_checkpoint":
        save_checkpoint(tmp / "model")
    if rule == "text_readable":
        # root may read everything, so the answer of the system is replaced, not the file's mode
        refuse = str(tmp / "secret.txt")
        true_access = os.access
        monkeypatch.setattr(
            os, "access", lambda p, mode, **k: str(p) != refuse and true_access(p, mode, **k)
        )
    if rule == "package_missing":
        monkeypatch.setattr("eke.rules.device.find_spec", lambda name: None)
    if rule == "datasets_missing":
        monkeypatch.setattr("eke.rules.data.find_spec", lambda name: None)
    if rule == "online_needs_key":
        monkeypatch.setenv("HOME", str(tmp))
        monkeypatch.delenv("WANDB_API_KEY", raising=False)
    if rule == "runs_has_space":
        monkeypatch.setattr("eke.rules.training.MIN_FREE_BYTES", 2**62)
    if rule == "more_workers_than_cores":
        monkeypatch.setattr("eke.rules.training.usable_cores", lambda: 4)
    if rule == "zero3_recomputes_frozen_weights":
        monkeypatch.setattr("eke.rules.deepspeed.version", lambda name: "0.19.2")
    if rule.endswith("_needs_compiler"):
        monkeypatch.setattr("shutil.which", lambda name: None)
        monkeypatch.delenv("CC", raising=False)


def facts_of(case: tuple[tuple[str, ...], Device], tmp: Path) -> Facts:
    overrides, device = case
    composed = compose([o.format(tmp=tmp) for o in overrides])
    config = resolve_model(composed.config)
    present = dataclasses.replace(device, present=device is not H200)
    return Facts(config, present, is_set=partial(is_set, composed))
