"""Adapters on the device: the model they start from, and what they do not train takes no state."""

import pytest

pytestmark = pytest.mark.gpu

METHODS = {"lora": 1e-5, "dora": 1e-5, "ia3": 1e-5, "qlora": 2e-2}
"""Method -> how far its first loss may be from the model's own; qlora has rounded the weights."""


@pytest.mark.parametrize("method", METHODS)
def test_adapters_start_at_the_base_model_and_learn(method, trained) -> None:
    same = ("train.steps=10", "data.num_samples=4")
    plain, adapted = trained(*same), trained(*same, f"peft={method}", "optimizer.lr=1e-2")
    assert adapted.losses[0] == pytest.approx(plain.losses[0], rel=METHODS[method])
    assert adapted.losses[-1] < adapted.losses[0]
    found = adapted.effective["peft"]
    assert 0 < found["trained_frac"] < 0.2
    assert adapted.effective["optimizer_state_bytes"] == 8 * found["trained_parameters"]


def test_qlora_weights_take_four_bits(trained) -> None:
    whole, rounded = (trained("train.steps=4", f"peft={m}") for m in ("lora", "qlora"))
    found = rounded.effective["peft"]
    assert found["four_bit_tensors"] > 0
    assert found["frozen_weight_bytes"] < 0.5 * whole.effective["peft"]["frozen_weight_bytes"]


@pytest.mark.parametrize("technique", ["memory=checkpointing", "precision=bf16"])
def test_qlora_works_with_techniques_of_the_guides(technique, trained) -> None:
    plain = trained("train.steps=4", "peft=qlora")
    beside = trained("train.steps=4", "peft=qlora", technique)
    assert beside.losses[-1] == pytest.approx(plain.losses[-1], rel=10 * 2**-9)
