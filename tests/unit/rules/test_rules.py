"""Every rule: it is found, and its fix mends it. What it is needed for: test_necessity.py."""

from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from support import TINY, last_wins
from typed_fixes import typed_fixes
from unit.rules.cases import CASES, facts_of, prepare
from unit.rules.devices import CPU, H200

from eke.common.errors import ConfigError
from eke.config.compose import compose, is_set
from eke.models.checkpoints import resolve_model
from eke.rules import RULES, RuleInputs, Severity, check
from eke.rules.requirements import NEEDS
from eke.workflows.planning import plan_for


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request) -> Path:
    """The surroundings some rules look at."""
    prepare(request.node.callspec.params["rule"], tmp_path, monkeypatch)
    return tmp_path


@pytest.mark.parametrize("rule", CASES)
def test_rule_is_found_and_its_fix_is_valid(rule, world) -> None:
    overrides, _ = CASES[rule]
    facts = facts_of(CASES[rule], world)
    refused, warned = check(facts)
    verdict = next(r for r in RULES if r.id == rule).verdict
    found = refused if verdict is Severity.impossible else warned
    assert rule in {p.id for p in found}
    problem = next(p for p in found if p.id == rule)
    assert problem.why
    assert str(problem.fix)
    assert problem.value
    if not problem.overrides:  # a path that only the user knows, or a state of the machine
        return
    typed = typed_fixes(tuple(o.format(tmp=world) for o in overrides), [problem])
    composed = compose(typed)
    device = CPU if "hardware=auto" in typed else facts.device
    setting = partial(is_set, composed)
    fixed = RuleInputs(resolve_model(composed.config), device, is_set=setting)
    refused, warned = check(fixed, tuple(each for each in RULES if each.id == rule))
    assert rule not in {p.id for p in refused + warned}


@pytest.mark.parametrize(
    ("version", "refused"), [("0.18.9", True), ("0.19.2", True), ("0.19.3", False), ("1.0", False)]
)
def test_frozen_weight_rule_depends_on_the_deepspeed_version(
    version, refused, tmp_path, monkeypatch
) -> None:
    """0.19.2 and 0.19.3 were run by hand (notes/lab/sharding.md)."""
    monkeypatch.setattr("eke.rules.deepspeed.version", lambda _: version)
    rule = "zero3_recomputes_frozen_weights"
    found, _ = check(facts_of(CASES[rule], tmp_path))
    assert (rule in {p.id for p in found}) is refused


def test_every_rule_has_a_case() -> None:
    assert {rule.id for rule in RULES} == set(CASES)


def without(rule: str) -> tuple:
    return tuple(r for r in RULES if r.id != rule)


def test_tied_t5_without_its_rule_loses_logit_scale(monkeypatch) -> None:
    from eke.training.model.build_model import build_model

    monkeypatch.setattr(
        "eke.workflows.auto_batch.check", lambda facts: check(facts, without("t5_is_always_tied"))
    )
    plan = plan_for(compose([*CASES["t5_is_always_tied"][0], "hardware=cpu"]), planning=True)
    model = build_model(plan, torch.device("meta"))
    assert model.lm_head.weight is model.shared.weight
    assert model.config.scale_decoder_outputs is False


def test_untied_bert_has_an_untrained_bias() -> None:
    from eke.training.model.build_model import build_model

    composed = compose([*CASES["untied_bert_has_dead_bias"][0], *TINY, "hardware=cpu"])
    model = build_model(plan_for(composed, planning=True), torch.device("cpu"))
    model(input_ids=torch.full((1, 4), 9)).logits.sum().backward()
    untrained = [name for name, p in model.named_parameters() if p.grad is None]
    assert untrained == ["cls.predictions.bias"]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optimizer.lr=0", "above 0"),
        ("optimizer.weight_decay=1e9", "between 0 and 100"),
        ("optimizer.beta1=1.5", "at least 0 and below 1"),
        ("train.steps=1000000000000", "between 1 and 1000000000"),
        ("optimizer.lr=1e400", "a finite number, above 0 and at most 100"),
        ("batch.per_device=10000000000000000", "at most 9007199254740992"),
        ("batch.per_device=-8", "at least 1"),
        ("seed=-1", "between 0 and 4294967295"),
    ],
    ids=lambda value: value,
)
def test_numeric_limits_are_checked(override, words) -> None:
    refused, _ = check(RuleInputs(compose([override]).config, CPU))
    assert [p.key for p in refused if p.id == "limit"] == [override.split("=")[0]]
    assert words in next(p.why for p in refused if p.id == "limit")


def test_plan_lists_every_violated_rule() -> None:
    typed = ("optimizer.lr=-1", "model.num_attention_heads=3", "precision=tf32", "batch.target=12")
    with pytest.raises(ConfigError) as caught:
        plan_for(compose([*typed, "hardware=cpu"]), planning=False)
    assert {p.id for p in caught.value.problems} >= {
        "limit", "heads_divide_width", "tf32_needs_ampere", "target_is_multiple",
    }  # fmt: skip


@pytest.mark.parametrize(("group", "option"), NEEDS)
def test_package_of_each_option_is_named(group, option, monkeypatch) -> None:
    monkeypatch.setattr("eke.rules.requirements.find_spec", lambda name: None)
    refused, _ = check(
        RuleInputs(compose(last_wins("tracker=none", f"{group}={option}")).config, CPU)
    )
    (problem,) = [p for p in refused if p.id == "package_missing"]
    assert (problem.key, problem.value) == (group, option)
    assert f"(or: {NEEDS[group, option][1]}" in str(problem.fix)


@pytest.mark.parametrize(
    ("typed", "device", "fix"),
    [
        (
            ("distributed=zero2", "precision=fp32", "precision.weights=bfloat16", "peft=lora"),
            CPU,
            "precision.weights=float32",
        ),
        (
            ("attention=flash2", "precision=bf16", "precision.compute=float32"),
            H200,
            "precision.compute=bfloat16",
        ),
    ],
    ids=["weights", "compute"],
)
def test_explicit_format_has_a_fix_for_its_key(typed, device, fix) -> None:
    """Another option of the group would leave the key as it was typed."""
    problems, _ = check(RuleInputs(compose(list(typed)).config, device))
    assert fix in {str(problem.fix) for problem in problems}
    fixed = compose([*(o for o in typed if fix.split("=")[0] not in o), fix]).config
    paths = {"precision.weights", "attention"}
    left, _ = check(RuleInputs(fixed, device))
    assert not [p for p in left if p.key in paths and p.id != "package_missing"]


def test_cuda_graph_rules_do_not_apply_to_a_cpu() -> None:
    typed = ("model=tiny_bert", "task=masked_lm", "kernels=sparse_prediction",
             "compile=inductor", "compile.mode=reduce_overhead")  # fmt: skip
    problems, _ = check(RuleInputs(compose(typed).config, CPU, planning=True))
    assert not problems


def test_rule_ids_are_unique() -> None:
    """Only a missing package is asked for group by group, under one id."""
    counts = Counter(rule.id for rule in RULES)
    assert {rule for rule, number in counts.items() if number > 1} == {"package_missing"}


def test_indivisible_heads_are_one_problem(tmp_path) -> None:
    """Of the width of such heads nothing is said: what mends it would contradict the other."""
    odd = ("model.hidden_size=63", "model.num_attention_heads=4")
    refused, _ = check(facts_of((odd, CPU), tmp_path))
    assert [problem.key for problem in refused] == ["model.num_attention_heads"]


@pytest.mark.parametrize(
    ("files", "warned"),
    [
        pytest.param((), True, id="of others"),
        pytest.param(("manifest.json", "state.json"), False, id="of eke's, trained on bytes"),
        pytest.param(
            ("manifest.json", "state.json", "tokenizer.json"), True, id="of eke's, on other tokens"
        ),
    ],
)
def test_checkpoint_trained_on_bytes_accepts_bytes(files, warned, tmp_path) -> None:
    prepare("bytes_on_checkpoint", tmp_path, None)
    for name in files:
        (tmp_path / "model" / name).write_text("{}")
    _, warnings = check(facts_of(CASES["bytes_on_checkpoint"], tmp_path))
    assert ("bytes_on_checkpoint" in {each.id for each in warnings}) is warned
