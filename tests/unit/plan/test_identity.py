"""Which runs are the same run: every key counts, except those that only change what is shown."""

import copy
import dataclasses
import functools
import json
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from unit.plan.cases import CPU, GPU, config_of, plan_config, plan_of

import eke.plan.planner.planner as making
from eke.config.schema import (
    AdamW,
    AutoBool,
    CallbackEntry,
    Config,
    DecayingSchedule,
    Evaluation,
    Implementation,
    LlamaModel,
    MetricEntry,
    Synthetic,
    Task,
)
from eke.config.schema.codec import make_converter
from eke.config.schema.resources import Resources, Slurm
from eke.plan.identity import FORMER_VALUES, canonical, changed_fingerprint, meaningful, run_id

# --- every key ----------------------------------------------------------------------------------

BASES = {
    "llama-causal": (),
    "bert-masked-wsd": ("model=tiny_bert", "task=masked_lm", "schedule=wsd", "optimizer=sgd"),
    "gpt2-classify": ("model=tiny_gpt2", "task=sequence_classification", "schedule=constant",
                      "optimizer=adafactor"),
    "t5-seq2seq": ("model=tiny_t5", "task=seq2seq_lm", "data.lengths=uniform"),
    "experts": ("model=tiny_moe",),
}  # fmt: skip
"""Together they have every field of every variant (data=text: see below; model=pretrained:
tests/unit/models/checkpoints)."""

PRESENTATION = {
    "tracker.option", "tracker.mode", "tracker.project", "tracker.entity", "tracker.group",
    "tracker.uri", "code.path",
    "hardware.option", "hardware.network_gbit_per_s", "paths.runs", "launcher.cpu_slots",
    "launcher.prefix",
    "launcher.runs_per_device", "launcher.detach",
    *(f"resources.{f.name}" for f in dataclasses.fields(Resources)),
    *(f"slurm.{f.name}" for f in dataclasses.fields(Slurm)),
    "sweep.product", "sweep.rows", "sweep.zip", "sweep.exclude", "sweep.repeats", "sweep.strict",
    "sweep.seeds", "sweep.max_repeats", "sweep.resolve", "sweep.budget",
    "recipe.horizon", "rerun", "plan_only", "ignore_forecast", "train.log_every",
    "train.checkpoint_every", "train.checkpoint_async", "train.resume", "train.keep_checkpoints",
    "train.save_final", "train.save_on_signal", "distributed.timeout_s",
}  # fmt: skip
"""They change neither the result nor what is measured."""

RESOLVED_THE_SAME = {
    "batch.option": "a preset of numbers that stand beside it",
    "dataloader.pin_memory": "a CPU has nothing to pin for",
    "precision.master": "float32 weights are their own copy",
    "task.router_loss": "a Llama has no router",
}
"""Keys whose other value is the same run on this device, and why."""


@functools.cache
def shared_config(base: str) -> Config:
    return config_of(*BASES[base], "data=synthetic", "train.steps=100")


def base_config(base: str) -> Config:
    return copy.deepcopy(shared_config(base))


def leaves(config: Config) -> dict[str, Any]:
    found = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            inner = dataclasses.fields(value)
            found |= {f"{field.name}.{f.name}": getattr(value, f.name) for f in inner}
        else:
            found[field.name] = value
    return found


OTHER = {
    "sweep.budget": 2.0,
    "train.checkpoint_async": True,
    "train.resume": "a run",
    "batch.accumulation": 2,
    "batch.target": 16,
    "batch.eval_per_device": 5,
    "code.path": "folder",
    "loss.per": "targets",
    "metrics": {"bits": MetricEntry("net:Bits")},
    "callbacks": {"texts": CallbackEntry("net:Texts")},
    "data.min_len": 20,
    "data.num_samples": 100,
    "data.median_len": 9,
    "data.pad_to_multiple_of": 8,
    "dataloader.prefetch": 4,
    "hardware.network_gbit_per_s": 100.0,
    "model.freeze": ["embed_tokens"],
    "model.head_dim": 8,
    "model.num_decoder_layers": 3,
    "model.num_key_value_heads": 2,
    "model.rope_scaling_factor": 8.0,
    "optimizer.option": "adamw_fused",  # one that is registered
    "optimizer.implementation": Implementation.foreach,  # auto is fused
    "schedule.warmup_steps": 7,
    "task.target_len": 9,
    "tracker.entity": "team",
    "tracker.group": "sweep",
    "tracker.uri": "https://host",
    "train.epochs": 1.5,
    "train.eval_every": 50,
    "train.early_stop_patience": 2,
    "train.keep_best": "loss",
    "memory.empty_cache_every": 2,
    **{f"resources.{n}": "x" for n in ("memory", "partition", "account", "qos", "constraint")},
    **{f"slurm.{n}": "x" for n in ("partition", "account", "qos", "constraint", "gpu_type")},
    "slurm.python": "python",
    "resources.gpus": 1,
    "trainer.extra": {"label_smoothing_factor": 0.1},
    "precision.tf32": AutoBool.on,
    "precision.master": AutoBool.on,
    "precision.evaluation": Evaluation.bfloat16,
}
"""Another value for what is open (null) by default, or where the next one means the same."""


def another(path: str, value: Any) -> Any:
    if value is None or path in OTHER:
        return OTHER[path]
    if isinstance(value, bool):
        return not value
    if isinstance(value, Enum):
        members = list(type(value))
        return members[(members.index(value) + 1) % len(members)]
    if isinstance(value, int):
        return 2 * value + 2
    return value * 0.75 + 0.125 if isinstance(value, float) else f"{value}x"


def with_leaf(config: Config, path: str, value: Any) -> Config:
    group, _, key = path.rpartition(".")
    setattr(getattr(config, group) if group else config, key, value)
    return config


def identity(config: Config) -> str:
    """As the plan resolves and hashes it; `option` keys are names here, not looked up."""
    return plan_config(config, CPU).run_id


def cases():
    """Every key once, in the first base that has it."""
    first = {path: base for base in reversed(BASES) for path in leaves(base_config(base))}
    # Choosing among sizes and heads is done by these two; made-up names have no closed form.
    del first["model.family"], first["task.option"]
    # The content of the file counts (tests/unit/plan), not its name.
    for mapping in ("distributed.deepspeed_config", "sweep.product", "sweep.rows", "sweep.zip",
                    "slurm.options"):  # fmt: skip
        del first[mapping]
    return [pytest.param(base, path, id=path) for path, base in first.items()]


@pytest.fixture(autouse=True)
def quick_fingerprint(monkeypatch):
    """It reads all of eke's source, and is no part of the identity."""
    monkeypatch.setattr(making, "machine_fingerprint", lambda device: {})


@pytest.mark.parametrize(("base", "path"), cases())
def test_every_key_except_presentation_changes_the_run_id(base, path) -> None:
    config = base_config(base)
    value = another(path, leaves(config)[path])
    same = identity(config) == identity(with_leaf(base_config(base), path, value))
    assert same == (path in PRESENTATION or path in RESOLVED_THE_SAME)


def test_every_exception_is_a_key() -> None:
    keys = {path for base in BASES for path in leaves(base_config(base))}
    assert keys >= PRESENTATION | set(RESOLVED_THE_SAME)


def test_models_and_tasks_are_different_runs() -> None:
    ids = [identity(base_config(base)) for base in BASES]
    ids.append(identity(config_of("task=sequence_classification", "data=synthetic")))
    assert len(set(ids)) == len(ids)


# --- resolved values ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "typed",
    [
        ("train.steps=300",),
        ("batch.accumulation=1",),
        ("batch.target=8",),
        ("batch.eval_per_device=8",),
        ("schedule.warmup_steps=15",),
        ("schedule.warmup_steps=15", "schedule.warmup_frac=0.9"),
        ("data.num_samples=512",),
        ("precision.tf32=auto",),
        ("dataloader.pin_memory=off",),
        ("train.steps=300", "batch.accumulation=1", "schedule.warmup_steps=15"),
        ("train.epochs=4.6875",),
    ],
    ids=lambda typed: " ".join(typed),
)
def test_explicit_default_is_the_same_run(typed) -> None:
    assert plan_of("data=synthetic", *typed).run_id == plan_of("data=synthetic").run_id


def test_run_id_depends_on_text_content_only(tmp_path) -> None:
    ids = []
    for folder, text in (("a", "one " * 500), ("b", "one " * 500), ("c", "two " * 500)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "text.txt").write_text(text)
        path = f"data.path={tmp_path / folder / 'text.txt'}"
        ids.append(plan_of("data=text", path, "data.seq_len=16").run_id)
    assert ids[0] == ids[1] != ids[2]


def test_machine_does_not_change_the_run_id() -> None:
    other = dataclasses.replace(CPU, name="another cpu", count=2, memory_bytes=None)
    assert plan_of("data=synthetic").run_id == plan_of("data=synthetic", device=other).run_id


# --- the hash -----------------------------------------------------------------------------------


def synthetic_config() -> Config:
    """Fixed values of the schema, whatever the presets say."""
    parts = {"optimizer": AdamW(), "schedule": DecayingSchedule()}
    return Config(model=LlamaModel(), task=Task(), data=Synthetic(option="synthetic"), **parts)


def test_golden_run_ids() -> None:
    """An identity that changes by accident makes every finished run be done again.

    When it changes on purpose (a key added, removed or with a new meaning), put the new value here.
    """
    assert plan_config(synthetic_config()).run_id == "86ec374a825f7889"


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_recorded_runs_keep_their_ids(every) -> None:
    """`run_ids.txt` holds the ids of an earlier version: finished runs must still be found.

    A key that is added later belongs into `FORMER_VALUES`, unless it changes the training at its
    default.
    """
    recorded = (Path(__file__).parents[2] / "frozen" / "run_ids.txt").read_text().splitlines()
    rows = [row.split() for row in recorded[::every]]
    changed = [row for row in rows if plan_of(*row[1:], device=GPU).run_id != row[0]]
    assert changed == []


def test_new_keys_at_former_values_keep_the_run_id(monkeypatch) -> None:
    content = make_converter().unstructure(synthetic_config())
    before = run_id(content, {}, "d")
    monkeypatch.setitem(FORMER_VALUES, "train.new_key", None)
    content["train"] |= {"new_key": None}
    assert run_id(content, {}, "d") == before
    assert run_id(content, {"train.new_key": 3}, "d") != before


def test_router_loss_is_identified_by_its_coefficient() -> None:
    def run(*typed):
        return plan_of("model=tiny_moe", "data=synthetic", *typed, device=CPU).run_id

    plain = run()
    assert run("task.router_loss=off") == plain
    assert plain != run("task.router_loss=0.5") == run("task.router_loss=5e-1")


def test_data_changes_the_run_id() -> None:
    content = make_converter().unstructure(synthetic_config())
    assert run_id(content, {}, "one") != run_id(content, {}, "two")


def test_hashing_does_not_modify_the_configuration() -> None:
    content = make_converter().unstructure(synthetic_config())
    before = json.dumps(content)
    run_id(content, {"train.steps": 5, "schedule.warmup_steps": 1}, "")
    assert json.dumps(content) == before


def test_equal_values_have_equal_canonical_text() -> None:
    assert canonical({"b": [1, 2.5], "a": None}) == '{"a":null,"b":[1,2.5]}'
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical({"a": float("nan")})


def test_new_data_keys_keep_former_run_ids() -> None:
    """A key that is new at its default, and hashed, would have every finished sweep run again."""
    config = config_of("data=jsonl", "data.path=rows.jsonl", "data.max_row_bytes=100")
    later = {path.removeprefix("data.") for path in FORMER_VALUES}
    hashed = (
        "eval_frac eval_path label length_grouping max_bad_frac num_eval_samples num_samples "
        "option packing pad_to_multiple_of path pattern prompt response separator seq_len text "
        "tokenizer"
    )
    data = meaningful(make_converter().unstructure(config))["data"]
    assert set(data) - later == set(hashed.split())


def test_changed_fingerprints_are_described() -> None:
    before = {"device": "a", "torch": "2.13.0", "peft": "1"}
    now = {"device": "a", "torch": "2.14.0", "accelerate": "1.15"}
    assert changed_fingerprint(before, now) == [
        "accelerate: absent -> 1.15",
        "peft: 1 -> absent",
        "torch: 2.13.0 -> 2.14.0",
    ]
    assert changed_fingerprint(before, dict(before)) == []
