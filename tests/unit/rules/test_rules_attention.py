"""What goes wrong without the rules about attention, where it shows outside of a training."""

import pytest
import torch
from recipe_plans import planned
from torch.nn.attention.flex_attention import flex_attention
from transformers import BloomForCausalLM
from unit.rules.cases import RAGGED, save_bloom
from unit.rules.devices import CPU, H200
from unit.training.model.plans import hand_plan

from eke.common.errors import RunError
from eke.config.compose import compose
from eke.config.schema import Backend
from eke.rules import RuleInputs, check
from eke.rules.attention import WIDEST_HEAD
from eke.training.model.attention_kernels import KernelProbe, pinned_backend
from eke.training.model.build_model import build_model

HALF = "precision=bf16"


def build(*overrides: str) -> torch.nn.Module:
    return build_model(hand_plan(*overrides), torch.device("cpu"))


def rules_of(*overrides: str, device=H200) -> set[str]:
    refused, warned = check(RuleInputs(compose(list(overrides)).config, device, planning=True))
    return {problem.id for problem in refused + warned}


def test_flex_has_no_cpu_backward() -> None:
    query = torch.randn(1, 1, 16, 16, requires_grad=True)
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        flex_attention(query, query, query)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("model=tiny_gpt2", "attention=flex"), "flex_attention"),
        (("model=tiny_t5", "task=seq2seq_lm", "attention=flash2"), "does not support Flash"),
        (("attention=flash2",), "FlashAttention2"),
        (("attention=flash3",), "FlashAttention3"),
    ],
    ids=["gpt2 has no flex", "t5 has no flash", "no package: flash2", "no package: flash3"],
)
def test_transformers_rejects_configurations_the_rules_reject(overrides, words) -> None:
    with pytest.raises((ValueError, ImportError), match=words):
        build(*overrides)


def test_transformers_rejects_unsupported_attention(tmp_path, monkeypatch) -> None:
    save_bloom(tmp_path / "bloom")
    words = "does not support an attention implementation through"
    with pytest.raises(ValueError, match=words):
        BloomForCausalLM.from_pretrained(tmp_path / "bloom", attn_implementation="sdpa")


def test_flex_rejects_dropout() -> None:
    model = build("attention=flex", "model.dropout=0.1").train()
    with pytest.raises(ValueError, match="does not support `dropout`"):
        model.model.layers[0].self_attn(
            torch.randn(1, 8, 128), attention_mask=None, position_embeddings=rotary(model)
        )


def rotary(model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    return model.model.rotary_emb(torch.randn(1, 8, 128), torch.arange(8)[None])


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch 2.13 warns of a kernel's reasons
@pytest.mark.parametrize("backend", ["mem_efficient", "cudnn"])
def test_missing_cpu_kernel_is_reported_with_a_fix(backend) -> None:
    plan = hand_plan(f"attention.backend={backend}")
    model = build_model(plan, torch.device("cpu"))
    words = rf"backend = {backend}.*-> attention\.backend=auto"
    with pytest.raises(RunError, match=words), pinned_backend(plan):
        model(input_ids=torch.full((1, 4), 9))


def test_unrelated_error_is_not_converted() -> None:
    with (
        pytest.raises(RuntimeError, match="something else"),
        pinned_backend(hand_plan("attention.backend=math")),
    ):
        raise RuntimeError("something else")


RAGGED_H100 = ("data=synthetic", "data.lengths=uniform", "data.seq_len=512", "hardware=h100")
SWITCHES = {
    "lengths differ": (RAGGED_H100, False),
    "multiples of 64": ((*RAGGED_H100, "data.pad_to_multiple_of=64"), True),
    "packed rows": ((*RAGGED_H100, "data.packing=on"), True),
    "one length": (("data=synthetic", "data.seq_len=512", "hardware=h100"), True),
    "a GPU where cuDNN is not first": ((*RAGGED_H100[:-1], "hardware=a100_80"), True),
    "typed": ((*RAGGED_H100, "precision=bf16", "attention.backend=cudnn"), True),
}


@pytest.mark.parametrize(("overrides", "cudnn"), SWITCHES.values(), ids=SWITCHES.keys())
def test_cudnn_is_disabled_for_variable_lengths(overrides, cudnn) -> None:
    plan = planned(*overrides)
    said = [d.value for d in plan.decisions if d.key == "attention.backend"]
    assert said == ([] if cudnn else ["auto, without cudnn"])
    with pinned_backend(plan):
        assert torch.backends.cuda.cudnn_sdp_enabled() is cudnn
        if not cudnn:
            assert torch.backends.cuda.flash_sdp_enabled()


def test_global_switches_are_restored() -> None:
    switches = (
        torch.backends.cuda.flash_sdp_enabled,
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.cudnn_sdp_enabled,
        torch.backends.cuda.math_sdp_enabled,
    )
    before = [switch() for switch in switches]
    with pinned_backend(hand_plan("attention.backend=math")):
        assert [switch() for switch in switches] == [False, False, False, True]
    assert [switch() for switch in switches] == before


@pytest.mark.parametrize(
    ("overrides", "rule"),
    [
        (("model=tiny_bert", "task=masked_lm", "model.dropout=0"), "flash_takes_no_mask"),
        (("data.packing=padding_free",), "flash_takes_no_mask"),
    ],
    ids=["padded rows", "packed rows"],
)
def test_masks_follow_from_the_data(overrides, rule) -> None:
    flash = (HALF, "attention.backend=flash")
    assert rule in rules_of(*RAGGED, *overrides, *flash)
    assert rule not in rules_of("data=synthetic", *overrides, *flash)
    efficient = (HALF, "attention.backend=mem_efficient")
    assert rule not in rules_of(*RAGGED, *overrides, *efficient)


def test_decoder_padding_needs_no_mask() -> None:
    assert not rules_of(*RAGGED, HALF, "attention.backend=flash")
    assert not rules_of(*RAGGED, HALF, "attention=flash2")


def test_cudnn_accepts_wider_heads_on_hopper() -> None:
    wide = ("attention.backend=cudnn", HALF, f"model.head_dim={WIDEST_HEAD[Backend.cudnn] + 8}")
    assert "kernel_head_is_narrow" not in rules_of(*wide)
    assert "kernel_head_is_narrow" not in rules_of("attention=eager", *wide[1:], device=CPU)


def test_kernel_probe_detects_kernels_of_other_packages() -> None:
    library = torch.library.Library("flash_attn", "DEF")
    library.define("_flash_attn_forward(Tensor x) -> Tensor")
    library.impl("_flash_attn_forward", lambda x: x + 1, "CompositeExplicitAutograd")
    with KernelProbe() as probe:
        torch.ops.flash_attn._flash_attn_forward(torch.ones(1))
    assert probe.attention_kernels == {"flash2"}
    library._destroy()
