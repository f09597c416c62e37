"""The formulas of each layer against what autograd really keeps of it."""

import functools
import itertools

import pytest
import torch
from unit.plan.cases import plan_of

from eke.estimate.memory.activations import attention_kernel
from eke.estimate.memory.components import shape_of
from eke.training.model.attention_kernels import spare_mask_checks
from eke.training.model.build_model import build_model
from eke.training.model.checkpointing import apply_checkpointing
from eke.training.model.number_formats import build_formats

ROWS, LENGTH = 3, 20

SIZES = (
    "data=synthetic",
    f"data.seq_len={LENGTH}",
    f"batch.per_device={ROWS}",
    "model.hidden_size=48",
    "model.num_attention_heads=4",
    "model.intermediate_size=112",
    "model.vocab_size=331",
)

FAMILIES = {
    "tiny": ("model.head_dim=10", "model.num_key_value_heads=2"),
    "tiny_qwen3": ("model.head_dim=10", "model.num_key_value_heads=2"),
    "tiny_moe": ("model.head_dim=10", "model.num_key_value_heads=2"),
    "tiny_bert": ("task=masked_lm",),
    "tiny_gpt2": (),
    "tiny_t5": ("task=seq2seq_lm", "model.head_dim=10"),
}
"""Option of `model` -> what makes its widths differ from each other."""


def kept_bytes(layers: int, *overrides: str) -> int:
    """Bytes that a forward pass saves for the backward pass, weights and their copies left out."""
    plan = plan_of(*overrides, *SIZES, f"model.num_hidden_layers={layers}")
    model = build_model(plan, torch.device("cpu"))
    spare_mask_checks(model)
    apply_checkpointing(plan, model)
    formats = build_formats(plan, torch.device("cpu"))
    inputs = {"input_ids": torch.randint(8, 331, (ROWS, LENGTH))}
    if plan.config.model.family == "t5":
        inputs["decoder_input_ids"] = torch.randint(8, 331, (ROWS, LENGTH))
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    shapes = {tuple(p.shape) for p in model.parameters()}
    copies = shapes | {(*shape[:-2], *shape[:-3:-1]) for shape in shapes}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        is_copy = tensor.dtype is torch.bfloat16 and tuple(tensor.shape) in copies
        if place not in weights and not (is_copy and plan.compute.autocast):
            saved[place] = tensor
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, formats.autocast():
        model(**inputs, use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@functools.cache
def one_layer(*overrides: str) -> int:
    return kept_bytes(3, *overrides) - kept_bytes(2, *overrides)


WAYS = list(itertools.product(["sdpa", "eager"], [0.0, 0.1]))
PRECISIONS = ["fp32", "bf16", "bf16_pure"]
LAYERS = [
    (model, PRECISIONS[(i + j) % 3], *way)
    for i, model in enumerate(FAMILIES)
    for j, way in enumerate(WAYS)
]
"""Every family in each way, and both in each precision."""


@pytest.mark.parametrize(("model", "precision", "attention", "dropout"), LAYERS)
def test_activations_of_a_layer_match_the_formula(model, precision, attention, dropout) -> None:
    overrides = (
        f"model={model}",
        f"precision={precision}",
        f"attention={attention}",
        f"model.dropout={dropout}",
        *FAMILIES[model],
    )
    plan = plan_of(*overrides, *SIZES)
    shape = shape_of(plan)
    layers = [
        stack.layer for stack in shape.architecture.stacks(shape, attention_kernel(plan, shape))
    ]
    true = one_layer(*overrides)
    assert sum(layer.kept for layer in layers) == pytest.approx(true, rel=0.03)
    assert sum(layer.needed for layer in layers) < true


def test_gated_t5_layer_matches_the_formula() -> None:
    overrides = ("model=tiny_t5", "model.gated=true", "attention=eager", *FAMILIES["tiny_t5"])
    shape = shape_of(plan_of(*overrides, *SIZES))
    kept = sum(stack.layer.kept for stack in shape.architecture.stacks(shape, "eager"))
    assert kept == pytest.approx(one_layer(*overrides), rel=0.02)
