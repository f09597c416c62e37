"""Number formats, float32 copies of narrower weights, and torch.compile.

The only file that sets torch's global flags. All runs of a user on a machine share what is compiled
(`eke.training.loop.environment`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from eke.common.errors import RunError
from eke.config.schema import CompileMode
from eke.plan.planner import Plan
from eke.training.distributed.fsdp import part
from eke.training.model.adapted_layers import expert_weights, is_linear
from eke.training.model.checkpointing import find_layers

Context = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Formats:
    """How a forward pass computes, and how its loss is scaled."""

    autocast: Context
    """A fresh context for each forward pass of training."""
    eval_autocast: Context
    """The same for evaluation."""
    scaler: torch.amp.GradScaler | None
    """Loss scaling for float16, on CPUs too; None for the other formats."""
    copies: AbstractContextManager[Any] = field(default_factory=nullcontext)
    """Context of all forward and backward passes of a step."""

    @property
    def held(self) -> list[nn.Parameter]:
        """16-bit copies of the model's weights, which are there between steps, too."""
        return [*self.copies.made.values()] if isinstance(self.copies, NarrowCopies) else []


def build_formats(plan: Plan, device: torch.device, model: nn.Module | None = None) -> Formats:
    """Torch's own autocast and loss scaler: Accelerate's fp16 is a silent no-op on a CPU.

    Without a model to train, it only evaluates.
    """
    if device.type == "cuda":
        set_tf32(plan.compute.tf32)
    compute, copies = plan.compute, plan.compute.copies
    return Formats(
        autocast=_context(None if copies else compute.autocast, device, keep=True),
        eval_autocast=_context(compute.eval_autocast, device, keep=False),
        scaler=torch.amp.GradScaler(device.type) if compute.loss_scaling else None,
        copies=NarrowCopies(model, getattr(torch, copies))
        if model and copies and not compute.gathered
        else nullcontext(),
    )


def _context(autocast: str | None, device: torch.device, keep: bool) -> Context:
    """Without `keep` a copy goes once it was used; backward passes need those of training."""
    if autocast is None:
        return nullcontext
    dtype = getattr(torch, autocast)
    return partial(torch.autocast, device.type, dtype=dtype, cache_enabled=keep)


def trained_dtype(plan: Plan) -> torch.dtype:
    """Format of trained weights and gradients; adapters are float32."""
    return cast(torch.dtype, getattr(torch, plan.compute.weights))


def frozen_dtype(plan: Plan) -> torch.dtype:
    """Format of frozen weights; where none are that of all weights."""
    return cast(torch.dtype, getattr(torch, plan.compute.frozen))


def base_dtype(plan: Plan) -> torch.dtype:
    """Format that a model is built in; `model.freeze` narrows what it names."""
    return trained_dtype(plan) if plan.config.model.freeze else frozen_dtype(plan)


def kept_in_float32(model: torch.nn.Module, dtype: torch.dtype) -> tuple[str, ...]:
    """Parts of names of weights that transformers 5.23 keeps in float32 (`_get_dtype_plan`)."""
    names = list(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype is torch.float16:
        names += getattr(model, "_keep_in_fp32_modules", None) or ()
    return tuple(names)


class NarrowCopies:
    """Context of a step's forward and backward passes: the model computes with 16-bit weights.

    Float32 weights are rounded when it is entered, in place of autocast; gradients are added in
    float32 to those of the weights. As FSDP2's MixedPrecisionPolicy(param_dtype,
    reduce_dtype=float32). The copies stay, so that compiled code finds them where they were.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        kind = next(model.parameters()).device.type
        found = _narrow(model, dtype, kind)
        self._places = [(m._parameters, name, weight) for m, name, weight in found]
        """Of each weight in its modules: a tied one has several."""
        self.made = {weight: _narrow_copy(weight, dtype) for *_, weight in self._places}
        """Float32 weight -> its copy."""

    @torch.no_grad()
    def __enter__(self) -> None:
        _copy_all(list(self.made.values()), list(self.made))
        for owner, name, weight in self._places:
            owner[name] = self.made[weight]

    def __exit__(self, *_: object) -> None:
        for owner, name, weight in self._places:
            owner[name] = weight


def _narrow(
    model: nn.Module, dtype: torch.dtype, kind: str, tables: bool = False
) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """What a step computes with in 16 bits; the other modules take and give them from now on.

    `kind` is the device's, where the weights may have no numbers yet.
    """
    kept = kept_in_float32(model, dtype)
    for prefix, module in model.named_modules():
        if tables and isinstance(module, nn.Embedding):
            vars(module)["forward"] = partial(_look_up, module.forward)
        elif _sums_over_tokens(module, kind):
            _compute_in_float32(module, dtype)
            continue
        for name, weight in module.named_parameters(recurse=False):
            is_kept = any(part in f"{prefix}.{name}" for part in kept)
            if weight.dtype is torch.float32 and not is_kept:
                yield module, name, weight


def kept_wide(plan: Plan, model: nn.Module) -> set[Tensor]:
    """Weights that FSDP2 sends in their own format, not in `plan.compute.gathered`.

    Per use, those are what autocast does not cast: all but operands of products. A tied weight is
    wide if it is so anywhere.
    """
    every = [(m, n, p) for m in model.modules() for n, p in m.named_parameters(recurse=False)]
    if plan.compute.copies:
        dtype = getattr(torch, plan.compute.gathered)
        found = _narrow(model, dtype, plan.device.kind, tables=True)
        narrow = {(module, name) for module, name, _ in found}
    else:
        experts = {*expert_weights(model).values()}
        # Switch's router gives its matrix another format in each forward pass.
        routers = [m for m in model.modules() if isinstance(vars(m).get("dtype"), torch.dtype)]
        own = {child for module in routers for child in module.children()}
        narrow = {(m, n) for m, n, p in every if p in experts or (is_linear(m) and m not in own)}
    return {weight for module, name, weight in every if (module, name) not in narrow}


class _Rows(torch.autograd.Function):
    """Rows of a 16-bit table, whose gradients are summed in float32 and rounded once."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.sizes = len(table), -1 if padding is None else padding
        return F.embedding(ids, table)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        add: Any = torch.ops.aten.embedding_dense_backward
        return None, add(gradient.float(), *ctx.saved_tensors, *ctx.sizes, False), None


class _Float32Rows(TorchFunctionMode):
    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.embedding:
            return func(*args, **(kwargs or {}))
        return cast(Any, _Rows).apply(*args, kwargs["padding_idx"])


def _look_up(forward: Callable[..., Tensor], *args: Any) -> Tensor:
    with _Float32Rows():
        return forward(*args)


def _narrow_copy(weight: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """A copy whose gradient moves over to the weight, as if autograd had added it there."""
    copy = nn.Parameter(weight.detach().to(dtype), weight.requires_grad)

    def move(_: Tensor) -> None:
        assert copy.grad is not None, "this is its hook"
        before, found, copy.grad = weight.grad, copy.grad, None
        weight.grad = found.to(weight.dtype) if before is None else before.add_(found)
        for hook in (getattr(weight, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(weight)

    if weight.requires_grad:
        hook: Any = copy.register_post_accumulate_grad_hook  # torch 2.13: no annotations
        hook(move)
    return copy


def _sums_over_tokens(module: nn.Module, kind: str) -> bool:
    """Whether a kernel would round the gradient of its weights with each token that it adds.

    In bfloat16 such a sum stops growing: of 12,000 tokens a LayerNorm's was wrong by half on a CPU
    (docs/lab/numerics.md); a GPU's LayerNorm adds in float32. Tables spare their copy, too.
    """
    mine = [p for p in module.parameters(recurse=False) if p.requires_grad]
    is_norm = isinstance(module, nn.LayerNorm) and kind == "cpu"
    sums = is_norm or isinstance(module, nn.Embedding)
    return sums and any(p.dtype is torch.float32 for p in mine)


def _compute_in_float32(module: nn.Module, dtype: torch.dtype) -> None:
    """Let a module take and give 16 bits in training, with its weights in float32, in place."""

    def widen(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        narrow = module.training and inputs[0].dtype is dtype
        return (inputs[0].float(), *inputs[1:]) if narrow else inputs

    def narrow(module: nn.Module, _: Any, output: Tensor) -> Tensor:
        return output.to(dtype) if module.training else output

    module.register_forward_pre_hook(widen)
    module.register_forward_hook(narrow)


def set_tf32(on: bool) -> None:
    """TF32 in the float32 products and convolutions of every GPU, or full float32.

    The newer `fp32_precision` (torch 2.9) sets one of torch's two records of it; torch 2.13 raises
    if the other is read, as inductor does for its cache.
    """
    torch.set_float32_matmul_precision("high" if on else "highest")
    torch.backends.cudnn.allow_tf32 = on


Groups = list[dict[str, Any]]

Pairs = list[tuple[nn.Parameter, nn.Parameter]]
"""A weight of the model, and its copy."""

_PAIRS: WeakKeyDictionary[torch.optim.Optimizer, Pairs] = WeakKeyDictionary()

MASTER = "master"
"""Key of the copies in the optimizer's state dict."""

AT_ONCE_BYTES = 64 * 2**20
"""Of float32 gradients that come into being before those they are copied from go: a choice. A GPU
copies all of them by a few kernels; tensor by tensor each would be a launch."""


def build_with_master(
    groups: Groups, build: Callable[[Groups], torch.optim.Optimizer]
) -> torch.optim.Optimizer:
    """The optimizer of float32 copies of these weights, which writes back what it has done.

    bfloat16 keeps 8 bits of a number: what an update changes below the ninth is lost, and never
    adds up. Kept in float32 it does (Micikevicius et al. 2017, arXiv:1710.03740, section 3.1).
    Gradients move over to the copies before each step, which are rounded into the weights after
    it. The optimizer's state dict holds the copies.
    """
    pairs: Pairs = []
    copied = []
    for group in groups:
        copies = [nn.Parameter(p.detach().to(torch.float32, copy=True)) for p in group["params"]]
        pairs += zip(group["params"], copies, strict=True)
        copied.append({**group, "params": copies})
    optimizer = build(copied)
    _connect(optimizer, pairs)
    _PAIRS[optimizer] = pairs
    return optimizer


def stepped_weights(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The model's weights that an optimizer steps, be it on copies of them."""
    if optimizer in _PAIRS:
        return [weight for weight, _ in _PAIRS[optimizer]]
    return [p for group in optimizer.param_groups for p in group["params"]]


def copied_from(optimizer: torch.optim.Optimizer) -> dict[Tensor, Tensor]:
    """Copy -> the weight of the model that it is a copy of; empty without copies."""
    return {copy: weight for weight, copy in _PAIRS.get(optimizer, [])}


def _connect(optimizer: torch.optim.Optimizer, pairs: Pairs) -> None:
    together = list(_stretches(pairs))

    @torch.no_grad()
    def take_gradients(*_: Any) -> None:
        for stretch in together:
            narrow, wide = [], []
            for weight, copy in stretch:
                copy.grad = None if weight.grad is None else torch.empty_like(copy)
                if weight.grad is not None and copy.grad is not None:
                    narrow.append(weight.grad)
                    wide.append(copy.grad)
                weight.grad = None
            _copy_all(wide, narrow)

    @torch.no_grad()
    def write_back(*_: Any) -> None:
        _copy_all([weight for weight, _ in pairs], [copy for _, copy in pairs])

    def save(_: Any, state: dict[str, Any]) -> None:
        state[MASTER] = [copy.detach() for _, copy in pairs]

    @torch.no_grad()
    def load(_: Any, state: dict[str, Any]) -> None:
        saved: list[Tensor] = state.pop(MASTER)
        for (_, copy), tensor in zip(pairs, saved, strict=True):
            part(copy).copy_(part(tensor))

    optimizer.register_step_pre_hook(take_gradients)
    optimizer.register_step_post_hook(write_back)
    optimizer.register_state_dict_post_hook(save)
    optimizer.register_load_state_dict_pre_hook(load)


def _stretches(pairs: Pairs) -> Iterator[Pairs]:
    """The pairs in order, AT_ONCE_BYTES of copies at a time; a larger one alone."""
    stretch: Pairs = []
    num_bytes = 0
    for weight, copy in pairs:
        size = part(copy).nbytes
        if stretch and num_bytes + size > AT_ONCE_BYTES:
            yield stretch
            stretch, num_bytes = [], 0
        stretch.append((weight, copy))
        num_bytes += size
    if stretch:
        yield stretch


def _copy_all(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy tensors into others, of another format perhaps; cut ones are cut alike."""
    if into:
        torch._foreach_copy_([part(tensor) for tensor in into], [part(value) for value in values])


def master_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of what the optimizer steps on without its being a weight of the model."""
    weights = {id(p) for p in model.parameters()}
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    return sum(p.numel() * p.element_size() for p in stepped if id(p) not in weights)


VARIANTS_OF_LAYERS = 32
"""Versions of one layer's code that regional compilation may keep: T5 has four kinds of layer
(encoder's and decoder's, the first of each with position biases), each is trained and evaluated,
and lengths become dynamic with the second that is met. At PyTorch's 8 it would silently run the
rest operation by operation."""


def compile_model(plan: Plan, model: torch.nn.Module) -> torch.nn.Module:
    """The model, wrapped for compilation at its first call, or itself when nothing is compiled.

    With `compile.regional` its layers compile when first called; layers of one class share their
    code. Drops earlier graphs of this process and the counters of `compile_report`. Raises
    RunError: layers are to be compiled, and the model has none.
    """
    config = plan.config.compile
    if not is_compiled(plan):
        return model
    from torch._dynamo import utils

    arguments: dict[str, Any] = {"backend": config.option}
    if config.option == "inductor" and config.mode is not CompileMode.default:
        arguments["mode"] = config.mode.value.replace("_", "-")
    torch._dynamo.reset()
    utils.counters.clear()
    # Dynamo keeps the last 64 by default; a run with many graph breaks would lose its first ones.
    utils.set_compilation_metrics_limit(4096)  # far above what a usable run has
    utils.clear_compilation_metrics()
    if not config.regional:
        return cast(torch.nn.Module, torch.compile(model, **arguments))
    layers = find_layers(model)
    if not layers:
        raise RunError(
            f"compile.regional = true: {type(model).__name__} has no layers that transformers "
            "marks as repeated\n  -> compile.regional=false"
        )
    torch._dynamo.config.recompile_limit = VARIANTS_OF_LAYERS
    for layer in layers:
        layer.compile(**arguments)
    return model


def is_compiled(plan: Plan) -> bool:
    """Whether torch.compile has anything to do; the other options are names of its backends."""
    return plan.config.compile.option != "none"


def num_graphs(plan: Plan) -> int:
    """Graphs captured so far: more after a step in which the compiler ran."""
    if not is_compiled(plan):
        return 0
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def compile_report() -> dict[str, Any]:
    """What the compiler has done in this process since `compile_model`.

    `graphs` include those of `recompiles`, for which a guard failed; `operations` are in them;
    `graph_breaks` ended one early. Cache hits and misses are passes, forward or backward; bypasses
    those that PyTorch keeps for no other run. `compile_s` are wall seconds, backend included.
    """
    from torch._dynamo.utils import counters, get_compilation_metrics

    metrics = get_compilation_metrics()
    return {
        "graphs": int(counters["stats"]["unique_graphs"]),
        "operations": sum(m.graph_op_count or 0 for m in metrics),
        "graph_breaks": sum(counters["graph_break"].values()),
        "recompiles": sum(m.recompile_reason is not None for m in metrics),
        "cache_hits": int(counters["inductor"]["fxgraph_cache_hit"]),
        "cache_misses": int(counters["inductor"]["fxgraph_cache_miss"]),
        "cache_bypasses": counters["inductor"]["fxgraph_cache_bypass"]
        + counters["aot_autograd"]["autograd_cache_bypass"],
        "compile_s": sum(m.duration_us or 0 for m in metrics) / 1e6,
    }
