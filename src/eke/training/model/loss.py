"""Loss of a micro-batch for all tasks, inputs of the decoder in seq2seq, and fused kernels.

Cross-entropy is summed in float32 and divided by the targets of the global batch. transformers' own
losses are not used, since some ignore `num_items_in_batch` (notes/loss.md).
"""

import inspect
import sys
from collections.abc import Callable
from functools import cache, partial
from operator import attrgetter
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eke.common.errors import RunError
from eke.common.text import IGNORED
from eke.config.schema import CustomModel
from eke.models.checkpoints.architecture import logits_change, router_loss
from eke.plan.planner import Plan
from eke.training.batches.batches import MicroBatch
from eke.training.custom.outputs import (
    InputsOf,
    OwnLoss,
    forward_arguments,
    has_own_loss,
    logits_of,
)
from eke.training.model.adapters import is_adapted
from eke.training.model.build_model import model_configuration
from eke.training.model.fused_loss import UNCHANGED, change_logits, fused_loss_sum, with_parts
from eke.training.model.model_checks import HEADS, has_experts


def loss_sum(
    logits: Tensor, labels: Tensor, smoothing: float = 0.0, sources: Tensor | None = None
) -> Tensor:
    """Return the loss summed over the labels, from all logits `[..., classes]`.

    Labels are class indices `[...]` or IGNORED. As float32 (NaN: ignored) they are 0 and 1
    `[samples, classes]` for binary cross-entropy, or numbers `[samples]` for squared error. The
    share `smoothing` of each target is spread over all classes. `sources`: see `with_parts`.
    """
    if labels.is_floating_point():
        take = F.mse_loss if labels.dim() == 1 else F.binary_cross_entropy_with_logits
        found = logits.to(torch.float32).reshape(labels.shape)
        each = take(found, labels.nan_to_num(), reduction="none")
        each = torch.where(labels.isnan(), 0.0, each)
        return with_parts(each.sum(), each, sources)
    losses = F.cross_entropy(
        logits.flatten(0, -2).to(torch.float32),
        labels.flatten(),
        ignore_index=IGNORED,
        reduction="sum" if sources is None else "none",
        label_smoothing=smoothing,
    )
    return losses if sources is None else with_parts(losses.sum(), losses.view_as(labels), sources)


def total_loss(loss: Tensor) -> Tensor:
    """Return only the sum, a scalar."""
    return loss[0] if loss.dim() else loss


class _LossHead(nn.Module):
    """Vocabulary projection that returns the summed loss if it has received labels.

    Positions without a label can be skipped, as in transformers' ModernBERT. If `fused`, projection
    and loss are one operation that never holds all logits. `change`: see `change_logits`.
    """

    def __init__(self, linear: nn.Linear, fused: bool, change: tuple[float, float]) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.fused, self.change = fused, change
        self.expected: tuple[Tensor, Tensor | None, float, bool, Tensor | None] | None = None
        """Inputs of the current forward pass: labels `[...]`, indices of targets in the flattened
        labels (None for all), and `smoothing`, `compiled` and `sources` of `fused_loss_sum`."""
        self.answer: Tensor | None = None
        """Loss, kept until the model has returned, in case the model changes its logits."""
        self.projected: tuple[int, int] | None = None
        """Projected and total positions of the last pass with labels, in eager mode."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the loss (`with_parts`) of `hidden` `[..., width]`, or logits without labels."""
        if self.expected is None:
            return F.linear(hidden, self.weight, self.bias)
        labels, places, smoothing, compiled, sources = self.expected
        self.expected = None
        sources = None if sources is None else sources.flatten(0, -2)
        labels, vectors = labels.reshape(-1), hidden.reshape(-1, hidden.shape[-1])
        if places is not None:
            vectors, labels = vectors.index_select(0, places), labels.index_select(0, places)
            sources = None if sources is None else sources.index_select(0, places)
        if not torch.compiler.is_compiling():
            self.projected = len(vectors), hidden.shape[:-1].numel()
        if self.fused:
            loss = fused_loss_sum(
                vectors, self.weight, self.bias, labels, smoothing, compiled, sources, self.change
            )
        else:
            take = compiled_loss_sum() if compiled else loss_sum
            logits = F.linear(vectors, self.weight, self.bias)
            logits = logits if self.change == UNCHANGED else change_logits(logits, self.change)
            loss = take(logits, labels, smoothing, sources)
        self.answer = loss
        return loss


def put_loss_head(model: nn.Module, fused: bool, change: str = "") -> None:
    """Make `model(labels=..., places=...)` return the summed loss instead of logits.

    `change` is as in `logits_change`. Raises RunError: The model has no linear projection.
    """
    linear = cast(Any, getattr(model, "get_output_embeddings", lambda: None))()
    if type(linear) is not nn.Linear:
        key = "fused_linear_cross_entropy" if fused else "sparse_prediction"
        found = "none" if linear is None else type(linear).__name__
        raise RunError(
            f"kernels.{key} = true: {type(model).__name__} has no linear projection onto a "
            f"vocabulary (found: {found})\n  -> kernels.{key}=false"
        )
    name = next(name for name, module in model.named_modules() if module is linear)
    parent, _, child = name.rpartition(".")
    owner = model.get_submodule(parent)
    how, _, attribute = change.partition(" ")
    value = attrgetter(attribute)(owner) if attribute else None
    known = UNCHANGED
    if value is not None:  # a cap can be disabled
        known = {"cap": (1.0, value), "*": (value, 0.0), "/": (1 / value, 0.0)}[how]
    setattr(owner, child, _LossHead(linear, fused, known))

    def hand_over(called: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        head = cast(_LossHead, called.get_submodule(name))  # one per DataParallel copy
        labels, places = kwargs.pop("labels", None), kwargs.pop("places", None)
        how = kwargs.pop("smoothing", 0.0), kwargs.pop("compiled", False)
        sources = kwargs.pop("sources", None)
        head.expected = None if labels is None else (labels, places, *how, sources)
        return args, kwargs

    def hand_back(called: nn.Module, args: Any, out: Any) -> None:
        head = cast(_LossHead, called.get_submodule(name))
        if head.answer is not None:
            out.logits, head.answer = head.answer, None

    model.register_forward_pre_hook(hand_over, with_kwargs=True)
    model.register_forward_hook(hand_back)


def loss_head(model: nn.Module) -> _LossHead | None:
    """Return the `_LossHead` of a model, None without one."""
    return next((module for module in model.modules() if isinstance(module, _LossHead)), None)


LossFunction = Callable[..., Tensor]
"""Function from model and micro-batch to the loss summed over targets, float32, as in `with_parts`.
`smoothing` is the share of each target spread over all classes."""


def build_loss(plan: Plan, model: nn.Module | None = None) -> LossFunction:
    """Return the function from a micro-batch to its loss. Own code needs the unwrapped `model`."""
    if has_own_loss(plan):
        return OwnLoss(plan, cast(nn.Module, model))
    if isinstance(plan.config.model, CustomModel):
        return partial(from_logits, arguments=forward_arguments(plan, cast(nn.Module, model)))
    loss = from_loss_head if has_fused_loss(plan) or is_sparse(plan) else from_logits
    coefficient = router_loss(plan.config)
    asks = coefficient is not None or getattr(plan.config.model, "router_loss", None) is not None
    return partial(with_router, loss, coefficient or 0.0) if asks else loss


def build_compiled_loss(plan: Plan, model: nn.Module | None = None) -> LossFunction:
    """Return the loss function, compiled on a GPU if the model or its layers are compiled."""
    loss = build_loss(plan, model)
    # Eager cross-entropy moves 44 bytes per logit, compiled 12 (16-bit logits; 17.8 and 2.9 ms for
    # 8,192 x 128,256 on an H100). On a CPU most runs would lose more time by compilation.
    if not plan.config.compile.is_inductor or plan.device.kind != "cuda":
        return loss
    return partial(loss, compiled=True)


@cache
def compiled_loss_sum() -> Callable[..., Tensor]:
    """Return `loss_sum` as compiled code."""
    return torch.compile(loss_sum)


def has_fused_loss(plan: Plan) -> bool:
    """Return whether the vocabulary projection and the loss are one operation."""
    return plan.config.kernels.fused_linear_cross_entropy and plan.targets.per_token


def is_sparse(plan: Plan) -> bool:
    """Return whether positions without a label skip the vocabulary projection."""
    return plan.config.kernels.sparse_prediction and plan.targets.per_token


def apply_loss(plan: Plan, model: nn.Module) -> None:
    """Prepare the model for `build_loss`. RunError: Its head cannot be replaced."""
    if has_fused_loss(plan) or is_sparse(plan):
        put_loss_head(model, has_fused_loss(plan), logits_change(plan.config) or "")


def from_loss_head(
    model: nn.Module, batch: MicroBatch, smoothing: float = 0.0, compiled: bool = False
) -> Tensor:
    """Return the loss computed by the model's head."""
    how = {"smoothing": smoothing, "compiled": compiled, "sources": batch.sources}
    loss: Tensor = model(**batch.inputs, labels=batch.labels, places=batch.places, **how).logits
    return loss


def from_logits(
    model: nn.Module,
    batch: MicroBatch,
    smoothing: float = 0.0,
    compiled: bool = False,
    arguments: InputsOf = attrgetter("inputs"),
) -> Tensor:
    """Return the loss of all logits."""
    take = compiled_loss_sum() if compiled else loss_sum
    logits = logits_of(model(**arguments(batch)))
    return take(logits, batch.labels, smoothing, batch.sources)


def with_router(
    take: LossFunction, coefficient: float, model: nn.Module, batch: MicroBatch, **how: Any
) -> Tensor:
    """Return the loss of `take`, in training with the micro-batch's router loss.

    Shape `[2 + sources]`: the trained sum, the sum of each source, and, detached, the router loss.
    """
    trains = coefficient != 0 and torch.is_grad_enabled()  # not in evaluations
    answers: list[Any] = []

    def kept(**inputs: Any) -> Any:
        # The model's configuration, which is saved, may request router logits in every pass.
        answers.append(model(**inputs, output_router_logits=trains))
        return answers[0]

    loss = take(kept, batch, **how)
    if not trains:
        return loss
    share = coefficient * (batch.labels != IGNORED).sum() * answers[0].aux_loss
    whole, *sources = loss.reshape(-1)
    return torch.stack([whole + share, *sources, share.detach()])


_Shift = Callable[[Tensor], Tensor]
"""Function from labels `[rows, longest]`, padded with IGNORED, to the decoder's inputs."""


def build_shift(plan: Plan) -> _Shift | None:
    """Return the label shift of the model's class, None for other tasks. RunError: no shift."""
    if not plan.targets.has_target or isinstance(plan.config.model, CustomModel):
        return None
    import transformers

    # Families differ: T5 starts with a token of its config, mBART with the last one of the target.
    config = model_configuration(plan)
    kind = getattr(transformers, HEADS[plan.targets.option])._model_mapping[type(config)]
    model: Any = kind.__new__(kind)
    nn.Module.__init__(model)
    model.config = config
    names = ("prepare_decoder_input_ids_from_labels", "_shift_right")
    methods = [getattr(model, name) for name in names if hasattr(kind, name)]
    alone: Any = getattr(sys.modules[kind.__module__], "shift_tokens_right", None)
    if not methods and alone is None:
        raise RunError(f"{kind.__name__} has no shift of labels -> another checkpoint")
    # input_ids, pad_token_id and, in some families, decoder_start_token_id
    inputs = [] if methods else list(inspect.signature(alone).parameters)[1:]
    read = " ".join([*inputs, *map(inspect.getsource, methods)])
    for name in ("decoder_start_token_id", "pad_token_id"):
        if name in read and getattr(config, name, None) not in range(config.vocab_size):
            raise RunError(
                f"config.json has no valid {name}, required by {kind.__name__} -> add it there"
            )
    if methods:
        return cast(_Shift, methods[0])
    values = [getattr(config, name) for name in inputs]
    return lambda labels: cast(Tensor, alone(labels, *values))


def apply_kernels(plan: Plan, model: nn.Module) -> None:
    """Replace norms, rotary positions and feed-forward by Liger's. RunError: none replaced."""
    if not plan.config.kernels.is_liger:
        return
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    # Liger would search for layers in the adapters' wrapper. Its kernel for experts supports
    # neither autocast nor `precision.tf32=off` (liger-kernel 0.8.5).
    plain = cast(Any, model).get_base_model() if is_adapted(model) else model
    _apply_liger_kernel_to_instance(
        model=plain,
        cross_entropy=False,
        fused_linear_cross_entropy=False,
        swiglu=not has_experts(model),
    )
    if not replaced_modules(model):
        raise RunError(
            f"kernels = liger: this version of liger-kernel does not support "
            f"{type(model).__name__}\n  -> kernels=none"
        )


def replaced_modules(model: nn.Module) -> int:
    """Return the number of modules with a forward pass of Liger."""
    forwards = (getattr(m.forward, "__func__", m.forward) for m in model.modules())
    return sum(forward.__module__.startswith("liger_kernel") for forward in forwards)
