"""Every rule: it is found, its fix mends it, and without it something really goes wrong."""

import dataclasses
import os
from pathlib import Path

import pytest
import torch
from support import TINY

from eke.app import plan_for
from eke.check import RULES, Facts, Verdict, check
from eke.compose import compose
from eke.errors import ConfigError
from eke.hardware import DEVICES, Device

CPU = Device("cpu", "test CPU", memory_bytes=2**34)
V100 = DEVICES["v100_16"]
H200 = DEVICES["h200"]

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
    "batch_contradiction": (("batch.target=32", "batch.accumulation=2"), CPU),
    "target_is_multiple": (("batch.target=12",), CPU),
    "steps_or_epochs": (("train.steps=5", "train.epochs=1"), CPU),
    "warmup_within_run": (("train.steps=5", "schedule.warmup_steps=6"), CPU),
    "nesterov_needs_momentum": (
        ("optimizer=sgd", "optimizer.nesterov=true", "optimizer.momentum=0"),
        CPU,
    ),
    "too_short_to_time": (("train.steps=5",), CPU),
    "persistent_needs_workers": (("dataloader.persistent=true",), CPU),
    "prefetch_needs_workers": (("dataloader.prefetch=4",), CPU),
    "text_exists": (("data=text", "data.path=/nowhere/at/all"), CPU),
    "text_readable": (("data=text", "data.path={tmp}/secret.txt"), CPU),
    "runs_writable": (("paths.runs={tmp}/a.txt/runs",), CPU),
    "runs_has_space": (("paths.runs={tmp}/runs",), CPU),
    "declared_device_is_absent": (("hardware=h200",), H200),
    "tf32_needs_ampere": (("precision=tf32",), CPU),
    "bf16_needs_ampere": (("precision=bf16",), V100),
    "inductor_needs_volta": (("compile=inductor",), dataclasses.replace(V100, capability=(6, 0))),
    "inductor_needs_compiler": (("compile=inductor",), CPU),
    "more_workers_than_cores": (("dataloader.workers=256",), CPU),
    "package_missing": (("tracker=wandb",), CPU),
    "pinning_needs_cuda": (("dataloader.pin_memory=on",), CPU),
    "one_process_without_strategy": (("distributed.num_processes=2",), CPU),
    "states_do_not_fit": (("model=llama3_8b",), CPU),
    "batch_does_not_fit": (("batch.per_device=1000000",), CPU),
}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request):
    """The surroundings some rules look at."""
    (tmp_path / "a.txt").write_text("text " * 1000)
    (tmp_path / "secret.txt").write_text("text")
    rule = request.node.callspec.params["rule"]
    if rule == "text_readable":
        # root may read everything, so the answer of the system is replaced, not the file's mode
        refuse = str(tmp_path / "secret.txt")
        true_access = os.access
        monkeypatch.setattr(
            os, "access", lambda p, mode, **k: str(p) != refuse and true_access(p, mode, **k)
        )
    if rule == "package_missing":
        monkeypatch.setattr("eke.check.rules_packages.find_spec", lambda name: None)
    if rule == "runs_has_space":
        monkeypatch.setattr("eke.check.rules_work.MIN_FREE_BYTES", 2**62)
    if rule == "more_workers_than_cores":
        monkeypatch.setattr("eke.check.rules_work._cores", lambda: 4)
    if rule == "inductor_needs_compiler":
        monkeypatch.setattr("shutil.which", lambda name: None)
    return tmp_path


def facts_of(case: tuple[tuple[str, ...], Device], tmp: Path) -> Facts:
    overrides, device = case
    composed = compose([o.format(tmp=tmp) for o in overrides])
    return Facts(composed.config, dataclasses.replace(device, present=device is not H200))


@pytest.mark.parametrize("rule", CASES)
def test_rule_is_found_and_named(rule, world) -> None:
    refused, warned = check(facts_of(CASES[rule], world))
    verdict = next(r for r in RULES if r.id == rule).verdict
    found = refused if verdict is Verdict.impossible else warned
    assert rule in {p.rule for p in found}
    problem = next(p for p in found if p.rule == rule)
    assert problem.why
    assert problem.fix
    assert problem.value


FIX_IS_WORDS = {
    "text_exists", "text_readable", "runs_has_space", "runs_writable",
    "inductor_needs_compiler", "declared_device_is_absent",
}  # fmt: skip
"""A path only the user knows, or a state of the machine that the test holds on to."""


@pytest.mark.parametrize("rule", sorted(set(CASES) - FIX_IS_WORDS))
def test_fix_mends_it(rule, world) -> None:
    overrides, _ = CASES[rule]
    facts = facts_of(CASES[rule], world)
    refused, warned = check(facts)
    problem = next(p for p in refused + warned if p.rule == rule)
    typed = problem.fix.split("   (")[0].split()
    keys = {fix.split("=")[0] for fix in typed}
    kept = [o.format(tmp=world) for o in overrides if o.split("=")[0] not in keys]
    mended = Facts(compose([*kept, *typed]).config, facts.device)
    refused, warned = check(mended)
    assert rule not in {p.rule for p in refused + warned}


def test_every_rule_has_a_case() -> None:
    untested = {"more_processes_than_devices"}  # no strategy with several processes exists yet
    assert {rule.id for rule in RULES} == set(CASES) | untested


def without(rule: str) -> tuple:
    return tuple(r for r in RULES if r.id != rule)


BREAKS_THE_BUILD = {
    "heads_divide_width", "key_value_heads_divide_heads", "rotary_width_is_even",
    "rotary_head_dim_is_even",
    "sequence_fits_positions", "vocabulary_holds_bytes", "synthetic_ids_fit",
    "min_len_within_seq_len", "nesterov_needs_momentum", "persistent_needs_workers",
    "prefetch_needs_workers", "task_needs_other_model", "text_exists",
}  # fmt: skip
"""Rules whose absence shows as an exception in the first step."""


@pytest.mark.parametrize("rule", sorted(BREAKS_THE_BUILD))
def test_without_the_rule_the_run_breaks(rule, world, monkeypatch, curve_of) -> None:
    overrides, _ = CASES[rule]
    size = [o for o in TINY if not any(o.split("=")[0] == c.split("=")[0] for c in overrides)]
    size = [o for o in size if "hidden_size" not in o and "heads" not in o]
    monkeypatch.setattr("eke.app.check", lambda facts: check(facts, without(rule)))
    with pytest.raises(Exception):  # noqa: B017, PT011  # whatever the libraries raise
        curve_of(*[o.format(tmp=world) for o in overrides], *size, "train.steps=2")


def test_without_its_rule_t5_stays_tied_and_loses_the_scale_of_its_logits(monkeypatch) -> None:
    from eke.build.model import build_model

    monkeypatch.setattr("eke.app.check", lambda facts: check(facts, without("t5_is_always_tied")))
    plan = plan_for(compose([*CASES["t5_is_always_tied"][0], "hardware=cpu"]), planning=True)
    model = build_model(plan, torch.device("meta"))
    assert model.lm_head.weight is model.shared.weight
    assert model.config.scale_decoder_outputs is False


def test_untied_bert_really_has_a_bias_that_nothing_trains() -> None:
    from eke.build.model import build_model

    composed = compose([*CASES["untied_bert_has_dead_bias"][0], *TINY, "hardware=cpu"])
    model = build_model(plan_for(composed, planning=True), torch.device("cpu"))
    model(input_ids=torch.full((1, 4), 9)).logits.sum().backward()
    untrained = [name for name, p in model.named_parameters() if p.grad is None]
    assert untrained == ["cls.predictions.bias"]


def test_all_problems_at_once() -> None:
    composed = compose(
        ["optimizer.lr=-1", "model.num_attention_heads=3", "precision=tf32", "batch.target=12"]
    )
    refused, _ = check(Facts(composed.config, CPU))
    assert {p.rule for p in refused} >= {
        "limit", "heads_divide_width", "tf32_needs_ampere", "target_is_multiple",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optimizer.lr=0", "above 0"),
        ("optimizer.lr=nan", "above 0"),
        ("optimizer.beta1=1.5", "at least 0 and below 1"),
        ("train.steps=0", "between 1 and 1000000000"),
        ("train.steps=1000000000000", "between 1 and 1000000000"),
        ("optimizer.lr=inf", "at most 9007199254740992"),
        ("optimizer.beta2=1", "at least 0 and below 1"),
        ("optimizer.lr=1e400", "at most 9007199254740992"),
        ("batch.per_device=10000000000000000", "at most 9007199254740992"),
        ("dataloader.workers=100000", "between 0 and 256"),
        ("train.epochs=-2", "above 0"),
        ("batch.per_device=-8", "at least 1"),
        ("model.dropout=2", "at least 0 and below 1"),
        ("model.num_hidden_layers=0", "between 1 and 10000"),
        ("seed=-1", "between 0 and 4294967295"),
    ],
    ids=lambda value: value,
)
def test_limits(override, words) -> None:
    refused, _ = check(Facts(compose([override]).config, CPU))
    assert [p.path for p in refused if p.rule == "limit"] == [override.split("=")[0]]
    assert words in next(p.why for p in refused if p.rule == "limit")


def test_a_plan_is_refused_with_every_rule_in_one_error() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_for(compose(["hardware=cpu", "precision=tf32", "train.steps=0"]), planning=False)
    assert {p.rule for p in caught.value.problems} >= {"limit", "tf32_needs_ampere"}
