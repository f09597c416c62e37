"""Sizes that tensor cores like: who is told, and what is proposed."""

import pytest
from unit.plan.cases import config_of
from unit.rules.devices import CPU, H200, V100

from eke.hardware import DEVICES
from eke.rules import RULES, RuleInputs, check

SHAPES = tuple(rule for rule in RULES if rule.id.startswith("tensor_cores_like_"))
A100 = DEVICES["a100_80"]
ALIGNED = ("data=synthetic", "data.seq_len=128", "model.vocab_size=320", "model.hidden_size=128")


def proposals(device, *overrides):
    """Path -> what to type instead."""
    _, warned = check(RuleInputs(config_of(*ALIGNED, *overrides), device), SHAPES)
    return {problem.key: str(problem.fix) for problem in warned}


@pytest.mark.parametrize(
    ("device", "overrides", "unit"),
    [
        (H200, ("precision=bf16",), 8),
        (V100, ("precision=fp16",), 8),
        (A100, ("precision=bf16_pure",), 64),
        (A100, ("precision=tf32",), 32),
        (H200, ("precision=tf32",), 4),
        (H200, ("precision=fp32",), 1),
        (CPU, ("precision=bf16",), 1),
    ],
    ids=["h200-bf16", "v100-fp16", "a100-bf16", "a100-tf32", "h200-tf32", "h200-fp32", "cpu"],
)
def test_alignment_follows_format_and_device(device, overrides, unit) -> None:
    for size in (384, 384 + unit // 2):
        found = proposals(device, *overrides, f"model.intermediate_size={size}")
        next_one = f"model.intermediate_size={384 + unit}"
        assert found == ({} if size % unit == 0 else {"model.intermediate_size": next_one})


def test_aligned_width_is_divisible_by_heads() -> None:
    typed = ("precision=bf16", "model.hidden_size=36", "model.num_attention_heads=6")
    assert proposals(H200, *typed)["model.hidden_size"] == "model.hidden_size=48"


def test_classifier_has_no_vocabulary_projection() -> None:
    typed = ("precision=bf16", "model.vocab_size=50257")
    assert "model.vocab_size" in proposals(H200, *typed)
    assert "model.vocab_size" not in proposals(H200, *typed, "task=sequence_classification")


@pytest.mark.parametrize(
    ("per_device", "seq_len", "more", "fix"),
    [
        (13, 127, (), "batch.per_device=8"),
        (29, 126, (), "batch.per_device=28"),
        (3, 127, (), "batch.per_device=8"),
        (13, 127, ("batch.target=26",), "batch.per_device=8 batch.target=32"),
        (
            13,
            127,
            ("batch.target=26", "distributed=ddp", "distributed.num_processes=2"),
            "batch.per_device=8 batch.target=32",
        ),
        (13, 128, (), None),
    ],
    ids=["odd", "even", "smaller than the unit", "target", "target of two", "aligned length"],
)
def test_nearest_aligned_batch_is_proposed(per_device, seq_len, more, fix) -> None:
    typed = (f"batch.per_device={per_device}", f"data.seq_len={seq_len}")
    assert proposals(H200, "precision=bf16", *typed, *more).get("batch.per_device") == fix
