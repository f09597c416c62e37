"""The libraries that the guides' memory was measured with, as far as memory can tell them apart.

The guide (tests/reference/published.py) names no version; it is of January 2022: transformers 4.15
and torch 1.9 or 1.10. What they did otherwise than today's, each with its source:

- softmax kept its input beside its output (pytorch#49600, pytorch#64000; torch up to 1.10);
- a float32 mask was always added to the attention scores, which made half-precision ones float32
  (transformers 4.15, modeling_bert.py);
- gradients were zeroed and not freed (`zero_grad`, torch before 2.0);
- Trainer's AdamW was transformers' own: one temporary per parameter (optimization.py of 4.15);
- Trainer had two groups of parameters, decayed ones first (trainer.py of 4.15, create_optimizer);
- checkpointing was reentrant; cuBLAS had no workspace from PyTorch (it came with torch 1.11);
- autocast ran gelu in float32 (pytorch#59639; torch up to 1.9: inferred from one row, see
  notes/lab/memory.md).
"""

import contextlib
import math
from collections.abc import Iterator
from unittest import mock

import torch

from eke.config.schema import Checkpointing
from eke.models.families import Role
from eke.training.optimizer.build_optimizer import build_optimizer
from eke.training.trace.fake_device import autocast_kernel
from eke.training.trace.fake_gpu import FAKE_GPU, fake_gpu
from eke.training.trace.trace_plan import Training

aten = torch.ops.aten


class SoftmaxKeepsInput(torch.autograd.Function):
    """torch up to 1.10."""

    @staticmethod
    def forward(ctx, x, dim, half_to_float):
        with torch._C._AutoDispatchBelowAutograd():
            out = aten._softmax(x, dim, half_to_float)
        ctx.dim = dim
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, out = ctx.saved_tensors
        return aten._softmax_backward_data(grad, out, ctx.dim, x.dtype), None, None


def attention(module, query, key, value, attention_mask, dropout=0.0, **_):
    """transformers 4.15's BERT."""
    scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(query.size(-1))
    scores = scores + torch.zeros(query.size(0), 1, 1, key.size(-2), device=query.device)
    weights = torch.nn.functional.softmax(scores, dim=-1)
    weights = torch.nn.functional.dropout(weights, dropout, module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


class AdamW(torch.optim.Optimizer):
    """transformers 4.15's."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-4})

    @torch.no_grad()
    def step(self):
        for p in (p for group in self.param_groups for p in group["params"]):
            state = self.state[p]
            if not state:
                state["mean"], state["square"] = torch.zeros_like(p), torch.zeros_like(p)
            state["mean"].mul_(0.9).add_(p.grad, alpha=0.1)
            state["square"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
            p.addcdiv_(state["mean"], state["square"].sqrt().add_(1e-8), value=-1e-4)


def decayed_first(model, weight_decay):
    """Trainer's groups in their order; embeddings apart, for whom eke has a role."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    groups = {Role.embedding: [], Role.outer: [], Role.vector: []}
    for name, p in model.named_parameters():
        plain = "bias" in name or "LayerNorm" in name
        role = Role.vector if plain else Role.embedding if id(p) in tables else Role.outer
        groups[role].append(p)
    return [{"params": params, "role": role.value} for role, params in groups.items()]


def optimizer_of(plan, model):
    """Of two groups, whose gradients are zeroed and not freed."""
    if plan.config.optimizer.option == "adamw":
        groups = build_optimizer(plan, model).param_groups
        optimizer = AdamW([{"params": group["params"]} for group in groups])
    else:
        optimizer = build_optimizer(plan, model)
    zero = optimizer.zero_grad
    optimizer.zero_grad = lambda set_to_none=True: zero(set_to_none=False)
    return optimizer


@contextlib.contextmanager
def libraries_of_2022() -> Iterator[None]:
    """Traces inside are of those libraries."""
    fake_gpu()
    rules = torch.library.Library("aten", "IMPL")
    rules.impl("_softmax", SoftmaxKeepsInput.apply, "AutogradPrivateUse1")
    rules.impl(
        "gelu", autocast_kernel(aten.gelu.default, "float32", FAKE_GPU), "AutocastPrivateUse1"
    )

    def reentrant(plan):
        full = plan.config.memory.checkpointing is Checkpointing.full
        return {"use_reentrant": True} if full else None

    bert = "transformers.models.bert.modeling_bert.eager_attention_forward"
    try:
        with (
            mock.patch(bert, attention),
            mock.patch("eke.training.optimizer.build_optimizer.parameter_groups", decayed_first),
            mock.patch("eke.training.trace.trace_plan.build_optimizer", optimizer_of),
            mock.patch("eke.training.trace.operations.workspace_bytes", return_value=0),
            mock.patch("eke.training.model.checkpointing._checkpoint_arguments", reentrant),
            mock.patch.object(Training, "_evaluate"),
        ):
            yield
    finally:
        rules._destroy()
