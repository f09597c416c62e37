"""Experts under autocast, the product that PyTorch's autocast does not know; and router losses."""

import copy
import sys
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from unit.training.model.plans import hand_plan
from unit.training.model.steps import make_inputs, step

from eke.hardware import Device
from eke.models.checkpoints.architecture import change_of_logits
from eke.rules import RuleInputs, check
from eke.training.batches.batches import MicroBatch
from eke.training.model.attention_kernels import KernelProbe
from eke.training.model.build_model import build_model
from eke.training.model.loss import (
    from_logits,
    from_loss_head,
    put_loss_head,
    with_router,
)
from eke.training.model.model_checks import cast_experts, has_experts

CPU = torch.device("cpu")


def build(*overrides: str) -> torch.nn.Module:
    return build_model(hand_plan("model=tiny_moe", *overrides), CPU)


def test_only_moe_models_have_experts() -> None:
    assert has_experts(build())
    assert not has_experts(build_model(hand_plan("model=tiny"), CPU))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None], ids=str)
@pytest.mark.parametrize("fallback", [False, True], ids=["PyTorch's", "transformers'"])
def test_experts_multiply_in_the_autocast_format(dtype, fallback, monkeypatch) -> None:
    """And only there: forward and backward, by either of the two products transformers has."""
    from transformers.integrations import moe

    if fallback:
        monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *_: False)
    model = build()
    context = torch.autocast("cpu", dtype) if dtype else nullcontext()
    with KernelProbe() as probe:
        with context:
            loss = model(**make_inputs(model)).logits.float().square().mean()
        loss.backward()
    wanted = str(dtype or torch.float32).removeprefix("torch.")
    assert probe.matmul_dtypes == [wanted]
    assert all(p.grad.dtype is torch.float32 for p in model.parameters())


def test_expert_loss_matches_float32_within_rounding() -> None:
    loss, gradients = step(build())
    with torch.autocast("cpu", torch.bfloat16):
        narrow, found = step(build())
    # As for bf16 in tests/equivalence/test_same_mathematics.py.
    assert narrow.item() == pytest.approx(loss.item(), rel=10 * 2**-9)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert found[name].dtype is torch.float32
    assert (found[name] - gradients[name]).norm() < 0.05 * gradients[name].norm()


@pytest.mark.parametrize(("width", "fits"), [(36, False), (40, True)])
def test_expert_rows_must_be_aligned_after_the_cast(width, fits) -> None:
    """Four float32 numbers fill 16 bytes, of 16 bits it takes eight; 36 is no multiple of these."""
    sizes = ("model=tiny_moe", f"model.intermediate_size={width}")
    for precision in ("fp32", "bf16"):
        config = hand_plan(*sizes, f"precision={precision}").config
        refused, _ = check(RuleInputs(config, Device("cpu", "cpu", memory_bytes=2**34)))
        found = {problem.id for problem in refused}
        expected = not fits and precision == "bf16"
        assert ("experts_intermediate_size_is_aligned" in found) is expected
    with torch.autocast("cpu", torch.bfloat16), nullcontext() if fits else _misaligned():
        step(build(*sizes[1:]))


def _misaligned() -> AbstractContextManager[object]:
    return pytest.raises(RuntimeError, match="multiple of 16 bytes")


def test_expert_product_is_patched_once() -> None:
    from transformers.integrations import moe

    model = build()
    replaced = moe._grouped_mm
    assert replaced.__wrapped__.__module__ == moe.__name__
    cast_experts(model)
    assert moe._grouped_mm is replaced


def test_transformers_without_grouped_product_is_not_patched(monkeypatch) -> None:
    from transformers.integrations import moe

    model = build()
    monkeypatch.delattr(moe, "_grouped_mm")
    cast_experts(model)
    assert not hasattr(moe, "_grouped_mm")


SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
FOUR = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "mixtral": {**SIZES, "num_local_experts": 4},
    "qwen3_moe": {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8,
                  "moe_intermediate_size": 32},
    "gpt_oss": {**SIZES, **FOUR, "head_dim": 8, "layer_types": ["full_attention"] * 2},
    "granitemoe": {**SIZES, **FOUR, "logits_scaling": 4.0},
    "jetmoe": {**SIZES, **FOUR, "kv_channels": 8},
    "dbrx": {
        "vocab_size": 64, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 48, "moe_loss_weight": 0.5},
    },
}  # fmt: skip
"""transformers' name of an architecture -> its sizes: the ways in which a class adds the loss."""


def routed_model(kind: str) -> torch.nn.Module:
    import transformers

    config = transformers.CONFIG_MAPPING[kind](**ROUTED[kind], output_router_logits=True)
    for name in ("router_aux_loss_coef", "aux_loss_coef"):
        if hasattr(config, name):
            setattr(config, name, 0.5)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config).train()


def padded_rows() -> tuple[dict[str, torch.Tensor], torch.Tensor, MicroBatch]:
    """Inputs and labels as transformers takes them, and as eke does."""
    ids = torch.randint(3, 64, (3, 10), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(10) < torch.tensor([[10], [7], [4]])
    inputs, labels = {"input_ids": ids * mask, "attention_mask": mask.long()}, ids.where(mask, -100)
    aligned = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    return inputs, labels, MicroBatch(inputs, aligned, 3, int((aligned != -100).sum()), 0)


@pytest.mark.parametrize("fused", [False, True], ids=["logits", "fused"])
@pytest.mark.parametrize("kind", ROUTED)
def test_router_loss_matches_transformers(kind, fused) -> None:
    plain = routed_model(kind)
    mine = copy.deepcopy(plain)
    inputs, labels, batch = padded_rows()
    whole = plain(**inputs, labels=labels).loss
    alone = plain(**inputs, labels=labels, output_router_logits=False).loss
    whole.backward()
    if fused:
        put_loss_head(mine, True, change_of_logits(kind, "causal_lm") or "")
    take = from_loss_head if fused else from_logits
    found = with_router(take, 0.5, mine, batch) / batch.num_targets
    found[0].backward()
    right = torch.stack([whole, whole - alone])
    torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-6)
    assert right[1] > 0.4, "a coefficient that shows"
    gradients = [[torch.zeros(()) if p.grad is None else p.grad for p in m.parameters()]
                 for m in (mine, plain)]  # fmt: skip
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("coefficient", "trains"), [(0.5, False), (0.0, True)])
def test_untrained_router_loss_is_not_computed(coefficient, trains, monkeypatch):
    model, (_, _, batch) = routed_model("mixtral"), padded_rows()
    plain = from_logits(model, batch)
    monkeypatch.delattr(sys.modules[type(model).__module__], "load_balancing_loss_func")
    with torch.set_grad_enabled(trains):
        torch.testing.assert_close(with_router(from_logits, coefficient, model, batch), plain)
