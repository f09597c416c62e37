"""Loss of a micro-batch for all tasks, the decoder's inputs in seq2seq, and fused kernels.

Cross-entropy is summed over the labels that count, in float32; divided by the targets of the whole
global batch it is that batch's mean, however it was cut. transformers' own losses are not used:
some ignore `num_items_in_batch` (docs/explanation/loss.md).
"""

import functools
import inspect
import sys
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eke.common.errors import RunError
from eke.common.text import IGNORED
from eke.models.checkpoints.architecture import logits_change, router_loss
from eke.models.families import is_classification
from eke.plan.planner import Plan
from eke.training.batches.batches import MicroBatch
from eke.training.model.adapters import is_adapted
from eke.training.model.build_model import model_configuration
from eke.training.model.fused_loss import UNCHANGED, change_logits, fused_loss_sum, with_parts
from eke.training.model.unused import HEADS, has_experts


def loss_sum(
    logits: Tensor, labels: Tensor, smoothing: float = 0.0, sources: Tensor | None = None
) -> Tensor:
    """Of all logits (..., classes) at once.

    Labels (...) are IGNORED where nothing is to be predicted; or float32, NaN there: (samples,
    classes) of 0 and 1 with binary cross-entropy, or (samples,) with the squared error. Of each
    target the share `smoothing` is spread over all classes; `sources` are as of `with_parts`.
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
    """The sum alone, a scalar."""
    return loss[0] if loss.dim() else loss


class LossHead(nn.Module):
    """A vocabulary projection that answers with the summed loss once it was handed labels.

    Whatever wraps the model sees one forward pass as ever. Positions without a label may be
    skipped, as in transformers' ModernBERT; if `fused`, projection and loss are one operation,
    which never has all logits. `change` is what is done to the logits, as of `change_logits`.
    """

    def __init__(self, linear: nn.Linear, fused: bool, change: tuple[float, float]) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.fused, self.change = fused, change
        self.expected: tuple[Tensor, Tensor | None, float, bool, Tensor | None] | None = None
        """Of the forward pass under way: labels (...); places of those that count in the flattened
        labels, None for all; `smoothing`, `compiled` and `sources` as of `fused_loss_sum`."""
        self.answer: Tensor | None = None
        """The loss, until the model has made its output, whatever it did to its logits."""
        self.projected: tuple[int, int] | None = None
        """Positions that the last pass with labels projected, and all there were; not compiled."""

    def forward(self, hidden: Tensor) -> Tensor:
        """The loss as of `with_parts` of `hidden` (..., width); without labels, the logits."""
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
    """Let `model(labels=..., places=...)` answer with the summed loss in place of the logits.

    `change` is what the model does to its logits, as of `logits_change`. Raises RunError: the
    model has no plain vocabulary projection.
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
    if value is not None:  # a cap may be off
        known = {"cap": (1.0, value), "*": (value, 0.0), "/": (1 / value, 0.0)}[how]
    setattr(owner, child, LossHead(linear, fused, known))

    def hand_over(called: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        head = cast(LossHead, called.get_submodule(name))  # of nn.DataParallel's copy its own
        labels, places = kwargs.pop("labels", None), kwargs.pop("places", None)
        how = kwargs.pop("smoothing", 0.0), kwargs.pop("compiled", False)
        sources = kwargs.pop("sources", None)
        head.expected = None if labels is None else (labels, places, *how, sources)
        return args, kwargs

    def hand_back(called: nn.Module, args: Any, out: Any) -> None:
        head = cast(LossHead, called.get_submodule(name))
        if head.answer is not None:
            out.logits, head.answer = head.answer, None

    model.register_forward_pre_hook(hand_over, with_kwargs=True)
    model.register_forward_hook(hand_back)


def loss_head(model: nn.Module) -> LossHead | None:
    """The one that was put into a model."""
    return next((module for module in model.modules() if isinstance(module, LossHead)), None)


LossFunction = Callable[..., Tensor]
"""Model and micro-batch -> the loss summed over the micro-batch's targets, float32, as of
`with_parts`; and as `smoothing` the share of each target that is spread over all classes."""


def build_loss(plan: Plan) -> LossFunction:
    """How the plan gets from a micro-batch to its loss."""
    loss = from_loss_head if has_fused_loss(plan) or is_sparse(plan) else from_logits
    coefficient = router_loss(plan.config)
    asks = coefficient is not None or getattr(plan.config.model, "router_loss", None) is not None
    return partial(with_router, loss, coefficient or 0.0) if asks else loss


def build_compiled_loss(plan: Plan) -> LossFunction:
    """The same, compiled on a GPU if the model is, with its layers or as a whole.

    Eager cross-entropy moves 44 bytes per logit, compiled 12 (16-bit logits; 17.8 and 2.9 ms for
    8,192 x 128,256 on an H100). On a CPU compiling it takes longer than most runs gain.
    """
    loss = build_loss(plan)
    if plan.config.compile.option != "inductor" or plan.device.kind != "cuda":
        return loss
    return partial(loss, compiled=True)


@functools.cache
def compiled_loss_sum() -> Callable[..., Tensor]:
    """`loss_sum` as compiled code."""
    return torch.compile(loss_sum)


def has_fused_loss(plan: Plan) -> bool:
    """Whether the vocabulary projection and the loss are one operation."""
    return plan.config.kernels.fused_linear_cross_entropy and not is_classification(plan.config)


def is_sparse(plan: Plan) -> bool:
    """Whether positions without a label skip the vocabulary projection."""
    return plan.config.kernels.sparse_prediction and not is_classification(plan.config)


def apply_loss(plan: Plan, model: nn.Module) -> None:
    """Prepare the model for what `build_loss` gives; RunError if its head cannot be replaced."""
    if has_fused_loss(plan) or is_sparse(plan):
        put_loss_head(model, has_fused_loss(plan), logits_change(plan.config) or "")


def from_loss_head(
    model: nn.Module, batch: MicroBatch, smoothing: float = 0.0, compiled: bool = False
) -> Tensor:
    """The model's head answers with the loss itself."""
    how = {"smoothing": smoothing, "compiled": compiled, "sources": batch.sources}
    loss: Tensor = model(**batch.inputs, labels=batch.labels, places=batch.places, **how).logits
    return loss


def from_logits(
    model: nn.Module, batch: MicroBatch, smoothing: float = 0.0, compiled: bool = False
) -> Tensor:
    """Cross-entropy of all logits at once."""
    take = compiled_loss_sum() if compiled else loss_sum
    return take(model(**batch.inputs).logits, batch.labels, smoothing, batch.sources)


def with_router(
    take: LossFunction, coefficient: float, model: nn.Module, batch: MicroBatch, **how: Any
) -> Tensor:
    """Return the loss that `take` gives, in training with the micro-batch's router loss.

    Shape (2 + sources,): the trained sum, that of each source, and without gradient the router
    loss in the sum. A micro-batch counts by its targets, as in the cross-entropy.
    """
    trains = coefficient != 0 and torch.is_grad_enabled()  # evaluations need none
    answers: list[Any] = []

    def kept(**inputs: Any) -> Any:
        # The model's configuration, which is saved, may ask for it in every pass.
        answers.append(model(**inputs, output_router_logits=trains))
        return answers[0]

    loss = take(kept, batch, **how)
    if not trains:
        return loss
    share = coefficient * (batch.labels != IGNORED).sum() * answers[0].aux_loss
    whole, *sources = loss.reshape(-1)
    return torch.stack([whole + share, *sources, share.detach()])


Shift = Callable[[Tensor], Tensor]
"""Labels (rows, longest), padded with IGNORED, to the decoder's inputs of the same shape."""


def build_shift(plan: Plan) -> Shift | None:
    """The shift of the planned model's class, used without weights; None for other tasks.

    No formula serves all families: T5 starts with a token of its config, mBART with the last one of
    the target. Raises RunError: it has no such function, or its config.json lacks what that reads.
    """
    if plan.config.task.option != "seq2seq_lm":
        return None
    import transformers

    config = model_configuration(plan)
    head = getattr(transformers, HEADS["seq2seq_lm"])
    kind = head._model_mapping[type(config)]
    model: Any = kind.__new__(kind)
    nn.Module.__init__(model)
    model.config = config
    names = ("prepare_decoder_input_ids_from_labels", "_shift_right")
    methods = [getattr(model, name) for name in names if hasattr(kind, name)]
    alone: Any = getattr(sys.modules[kind.__module__], "shift_tokens_right", None)
    if not methods and alone is None:
        raise RunError(f"{kind.__name__} does not say how it shifts labels -> another checkpoint")
    # input_ids, pad_token_id and, where the family has one, decoder_start_token_id
    inputs = [] if methods else list(inspect.signature(alone).parameters)[1:]
    read = " ".join([*inputs, *map(inspect.getsource, methods)])
    for name in ("decoder_start_token_id", "pad_token_id"):
        if name in read and getattr(config, name, None) not in range(config.vocab_size):
            raise RunError(
                f"config.json has no valid {name}, which {kind.__name__} needs -> add it there"
            )
    if methods:
        return cast(Shift, methods[0])
    values = [getattr(config, name) for name in inputs]
    return lambda labels: cast(Tensor, alone(labels, *values))


def apply_kernels(plan: Plan, model: nn.Module) -> None:
    """Liger's normalisation, rotary positions and gated feed-forward, if planned.

    Of an adapted model Liger would look for the layers where the adapters' wrapper has none.
    Experts stay transformers': Liger's kernel for them knows neither autocast nor
    `precision.tf32=off` (liger-kernel 0.8.5). Raises RunError: nothing was replaced.
    """
    if plan.config.kernels.option != "liger":
        return
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    plain = cast(Any, model).get_base_model() if is_adapted(model) else model
    _apply_liger_kernel_to_instance(
        model=plain,
        cross_entropy=False,
        fused_linear_cross_entropy=False,
        swiglu=not has_experts(model),
    )
    if not replaced_modules(model):
        raise RunError(
            f"kernels = liger: this version of liger-kernel replaces nothing in "
            f"{type(model).__name__}\n  -> kernels=none"
        )


def replaced_modules(model: nn.Module) -> int:
    """Modules whose forward pass is Liger's own."""
    forwards = (getattr(m.forward, "__func__", m.forward) for m in model.modules())
    return sum(forward.__module__.startswith("liger_kernel") for forward in forwards)
