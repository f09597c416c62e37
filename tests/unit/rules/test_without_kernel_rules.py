"""Without the rules about attention's packages and fused kernels: what really goes wrong."""

import pytest
import torch
from torch import nn
from unit.training.model.plans import hand_plan, long_plan

from eke.common.text import IGNORED
from eke.training.batches.dataset import build_data
from eke.training.model.attention_kernels import spare_mask_checks
from eke.training.model.build_model import build_model
from eke.training.model.loss import loss_sum, put_loss_head

CPU = torch.device("cpu")


def test_flash_attention_rejects_a_cpu(monkeypatch) -> None:
    """As if the package were there."""
    model = build_model(hand_plan(), CPU)
    monkeypatch.setattr(type(model), "_flash_attn_import_error", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no GPU available"):
        model._flash_attn_can_dispatch(2)


def test_float32_reaches_flash_attention_uncast() -> None:
    """Which has kernels for 16 bits; transformers casts to autocast's format where there is one."""
    from transformers.integrations.flash_attention import get_target_dtype

    layer = build_model(hand_plan(), CPU).model.layers[0].self_attn
    query = torch.ones(1, 1, 4, 4)
    assert get_target_dtype(query, layer) is torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert get_target_dtype(query, layer) is torch.bfloat16


@pytest.mark.parametrize("version", [2, 3])
def test_dropout_is_ignored_without_kernel_support(version) -> None:
    from transformers import modeling_flash_attention_utils as flash

    def flash2(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False): ...

    def flash3(q, k, v, softmax_scale=None, causal=False): ...

    process = flash._lazy_define_process_function(flash2 if version == 2 else flash3)
    handed = process(query_length=4, key_length=4, is_causal=True, dropout=0.1)
    assert handed.get("dropout_p") == (0.1 if version == 2 else None)


def test_packed_rows_are_detected_only_in_batches_of_one() -> None:
    from transformers import modeling_flash_attention_utils as flash

    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    spare_mask_checks(nn.Identity(), packed=True)
    try:
        assert flash._is_packed_sequence(positions, batch_size=1)
        assert not flash._is_packed_sequence(positions.repeat(2, 1), batch_size=2)
    finally:
        spare_mask_checks(nn.Identity(), packed=False)


def test_fused_head_ignores_logit_scaling() -> None:
    from transformers import GraniteConfig, GraniteForCausalLM

    torch.manual_seed(0)
    config = GraniteConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, intermediate_size=64, logits_scaling=8.0, use_cache=False,
    )  # fmt: skip
    model = GraniteForCausalLM(config)
    nn.init.normal_(model.lm_head.weight)
    ids = torch.arange(8, 24)[None]
    true = loss_sum(model(input_ids=ids).logits, ids)
    put_loss_head(model, fused=True)
    fused = model(input_ids=ids, labels=ids).logits
    assert not torch.allclose(true, fused * 1.0, rtol=0.1)


SPARSE = ("model=tiny_bert", "task=masked_lm", "kernels=sparse_prediction", "data=synthetic")


def steps(*overrides: str) -> list:
    """Micro-batches of six steps, one each."""
    return [cut[0] for cut in build_data(long_plan(6, *overrides)).train_steps(0)]


def test_positions_of_a_batch_are_wrong_for_its_parts() -> None:
    """As nn.DataParallel cuts what a module is called with."""
    batch = steps(*SPARSE)[0]
    assert batch.places is not None
    labels, places = (tensor.chunk(2)[1] for tensor in (batch.labels, batch.places))
    own = torch.flatten(labels != IGNORED).nonzero().flatten()
    assert places.tolist() != own.tolist()
    assert places.max() >= labels.numel(), "beyond this part's own positions"


def test_causal_text_has_labels_nearly_everywhere() -> None:
    for batch in steps("kernels=sparse_prediction"):
        assert batch.num_targets == batch.labels.numel() - len(batch.labels)


def test_label_count_varies_between_steps() -> None:
    assert len({batch.num_targets for batch in steps(*SPARSE)}) > 3
