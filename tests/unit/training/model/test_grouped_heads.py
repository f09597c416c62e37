"""Heads of keys and values are repeated where no kernel of the GPU would share them."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from unit.training.model.plans import hand_plan
from unit.training.model.steps import make_inputs

from eke.hardware import DEVICES
from eke.training.model.attention_kernels import repeat_heads
from eke.training.model.build_model import build_model

CPU = torch.device("cpu")
GROUPED = ("model=tiny", "model.num_attention_heads=4", "model.num_key_value_heads=2")
NARROW = {"precision=bf16": torch.bfloat16, "precision=fp16": torch.float16}


@pytest.fixture(autouse=True)
def shared_again():
    """As other tests of this process have it."""
    yield
    repeat_heads(hand_plan())


@pytest.fixture
def heads(monkeypatch) -> list[tuple[int, bool]]:
    """Key heads that attention is handed, and whether it is to share them."""
    seen = []
    attend = F.scaled_dot_product_attention

    def noted(query, key, value, enable_gqa=False, **more):
        seen.append((key.shape[1], enable_gqa))
        return attend(query, key, value, enable_gqa=enable_gqa, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    return seen


@pytest.mark.parametrize(
    ("gpu", "overrides", "shared"),
    [
        ("h200", (), False),
        ("h200", ("precision=tf32",), False),
        ("h200", ("precision=bf16",), True),
        ("h200", ("precision=bf16", "attention.backend=cudnn"), True),
        ("h200", ("precision=bf16", "attention.backend=mem_efficient"), False),
        ("h200", ("attention.backend=math",), True),
        ("t4", ("precision=fp16",), False),
        ("cpu", (), True),
    ],
    ids=str,
)
def test_grouped_heads_are_passed_to_supporting_kernels(gpu, overrides, shared, heads) -> None:
    plan = hand_plan(*GROUPED, *overrides)
    if gpu != "cpu":
        plan = dataclasses.replace(plan, device=DEVICES[gpu])
    repeat_heads(plan)
    model = build_model(hand_plan(*GROUPED), CPU)
    narrow = NARROW.get(overrides[0]) if overrides else None
    with torch.autocast("cpu", narrow or torch.bfloat16, enabled=narrow is not None):
        model(**make_inputs(model))
    assert set(heads) == {(2, True) if shared else (4, False)}


def test_float32_evaluation_repeats_grouped_heads(heads) -> None:
    """And the logits are the same either way; the next plan begins with transformers' own."""
    repeat_heads(dataclasses.replace(hand_plan(*GROUPED), device=DEVICES["h200"]))
    model = build_model(hand_plan(*GROUPED), CPU)
    with torch.autocast("cpu", torch.bfloat16):
        model(**make_inputs(model))
    repeated = model(**make_inputs(model)).logits
    assert set(heads) == {(2, True), (4, False)}
    heads.clear()
    repeat_heads(hand_plan(*GROUPED))
    torch.testing.assert_close(model(**make_inputs(model)).logits, repeated)
    assert set(heads) == {(2, True)}


# torch 2.13's Dynamo uses what torch itself deprecates.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_grouped_heads_check_causes_no_graph_break(heads) -> None:
    repeat_heads(dataclasses.replace(hand_plan(*GROUPED), device=DEVICES["h200"]))
    model = build_model(hand_plan(*GROUPED), CPU)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(
            compiled(**make_inputs(model)).logits, model(**make_inputs(model)).logits
        )
    assert set(heads) == {(4, False)}
