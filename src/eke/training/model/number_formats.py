"""Number formats, torch.compile, and all uses of torch's global flags."""

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
from eke.training.distributed.fsdp import local_tensor
from eke.training.model.adapted_layers import expert_weights, is_linear
from eke.training.model.checkpointing import find_layers

_Context = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Formats:
    """Number formats of forward passes, and loss scaling."""

    autocast: _Context
    """Function that returns a new context for each forward pass of training."""
    eval_autocast: _Context
    """Function that returns a new context for each forward pass of evaluation."""
    scaler: torch.amp.GradScaler | None
    """Loss scaling for float16, also on CPUs. None for other formats."""
    copies: AbstractContextManager[Any] = field(default_factory=nullcontext)
    """Context of all forward and backward passes of a step."""

    @property
    def held(self) -> list[nn.Parameter]:
        """16-bit copies of the model's weights, which also exist between steps."""
        return [*self.copies.made.values()] if isinstance(self.copies, NarrowCopies) else []


def build_formats(plan: Plan, device: torch.device, model: nn.Module | None = None) -> Formats:
    """Build torch's autocast contexts and loss scaler. `model` is only needed for training."""
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


def _context(autocast: str | None, device: torch.device, keep: bool) -> _Context:
    """Return a function for autocast contexts. `keep` caches cast weights for backward."""
    if autocast is None:
        return nullcontext
    dtype = getattr(torch, autocast)
    return partial(torch.autocast, device.type, dtype=dtype, cache_enabled=keep)


def trained_dtype(plan: Plan) -> torch.dtype:
    """Return the format of trained weights and gradients. Adapters are float32."""
    return cast(torch.dtype, getattr(torch, plan.compute.weights))


def frozen_dtype(plan: Plan) -> torch.dtype:
    """Return the format of frozen weights, or of all weights if none are frozen."""
    return cast(torch.dtype, getattr(torch, plan.compute.frozen))


def base_dtype(plan: Plan) -> torch.dtype:
    """Return the format that a model is built in, before `model.freeze` casts its entries."""
    return trained_dtype(plan) if plan.config.model.freeze else frozen_dtype(plan)


def kept_in_float32(model: torch.nn.Module, dtype: torch.dtype) -> tuple[str, ...]:
    """Return parts of names of weights that transformers 5.23 keeps in float32."""
    names = list(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype is torch.float16:
        names += getattr(model, "_keep_in_fp32_modules", None) or ()
    return tuple(names)


class NarrowCopies:
    """Context of a step's forward and backward passes with 16-bit copies of the weights.

    Instead of autocast, float32 weights are rounded on entry, and gradients are added in float32,
    as in FSDP2's MixedPrecisionPolicy. The copies keep their memory for compiled code.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        kind = next(model.parameters()).device.type
        found = _narrow(model, dtype, kind)
        self._places = [(m._parameters, name, weight) for m, name, weight in found]
        """Modules and names of each weight. A tied weight has several."""
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
    """Yield the weights that a step computes with in 16 bits, and make other modules cast."""
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
    """Return the weights that FSDP2 gathers in their own format instead of `compute.gathered`."""
    every = [(m, n, p) for m in model.modules() for n, p in m.named_parameters(recurse=False)]
    if plan.compute.copies:
        dtype = getattr(torch, plan.compute.gathered)
        found = _narrow(model, dtype, plan.device.kind, tables=True)
        narrow = {(module, name) for module, name, _ in found}
    else:
        # Autocast casts only operands of products. One use in float32 makes a weight wide.
        experts = {*expert_weights(model).values()}
        # Switch's router casts its matrix in each forward pass.
        routers = [m for m in model.modules() if isinstance(vars(m).get("dtype"), torch.dtype)]
        own = {child for module in routers for child in module.children()}
        narrow = {(m, n) for m, n, p in every if p in experts or (is_linear(m) and m not in own)}
    return {weight for module, name, weight in every if (module, name) not in narrow}


class _Rows(torch.autograd.Function):
    """Rows of a 16-bit table, with gradients summed in float32 and rounded once."""

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
    """Return a copy whose gradient is moved to the weight, as if autograd had added it there."""
    copy = nn.Parameter(weight.detach().to(dtype), weight.requires_grad)

    def move(_: Tensor) -> None:
        assert copy.grad is not None, "this is its hook"
        before, found, copy.grad = weight.grad, copy.grad, None
        weight.grad = found.to(weight.dtype) if before is None else before.add_(found)
        for hook in (getattr(weight, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(weight)

    if weight.requires_grad:
        copy.register_post_accumulate_grad_hook(move)  # type: ignore[no-untyped-call]  # torch 2.13
    return copy


def _sums_over_tokens(module: nn.Module, kind: str) -> bool:
    """Return whether a kernel would round the gradient of the module's weights per token."""
    # Such a bfloat16 sum stops growing: of 12,000 tokens a LayerNorm's gradient was wrong by half
    # on a CPU (notes/lab/numerics.md). A GPU's LayerNorm adds in float32. Tables also save their
    # copy.
    mine = [p for p in module.parameters(recurse=False) if p.requires_grad]
    is_norm = isinstance(module, nn.LayerNorm) and kind == "cpu"
    sums = is_norm or isinstance(module, nn.Embedding)
    return sums and any(p.dtype is torch.float32 for p in mine)


def _compute_in_float32(module: nn.Module, dtype: torch.dtype) -> None:
    """Make a module take and return 16 bits in training, with float32 weights."""

    def widen(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        narrow = module.training and inputs[0].dtype is dtype
        return (inputs[0].float(), *inputs[1:]) if narrow else inputs

    def narrow(module: nn.Module, _: Any, output: Tensor) -> Tensor:
        return output.to(dtype) if module.training else output

    module.register_forward_pre_hook(widen)
    module.register_forward_hook(narrow)


def set_tf32(on: bool) -> None:
    """Enable TF32 in float32 products and convolutions on all GPUs, or require full float32."""
    # `fp32_precision` (torch 2.9) sets only one of torch's two flags. torch 2.13 raises if the
    # other flag is read, and inductor reads it for its cache.
    torch.set_float32_matmul_precision("high" if on else "highest")
    torch.backends.cudnn.allow_tf32 = on


_Groups = list[dict[str, Any]]

_Pairs = list[tuple[nn.Parameter, nn.Parameter]]
"""Weights of the model and their copies."""

_PAIRS: WeakKeyDictionary[torch.optim.Optimizer, _Pairs] = WeakKeyDictionary()

MASTER = "master"
"""Key of the copies in the optimizer's state dict."""

AT_ONCE_BYTES = 64 * 2**20
"""Bytes per copy: more need more memory, fewer more kernel launches. An arbitrary choice."""


def build_with_master(
    groups: _Groups, build: Callable[[_Groups], torch.optim.Optimizer]
) -> torch.optim.Optimizer:
    """Return an optimizer of float32 copies of these weights, which updates the weights.

    Updates below bfloat16's 8 significant bits would be lost (Micikevicius et al. 2017,
    arXiv:1710.03740, section 3.1). Gradients are moved to the copies before each step, and the
    copies are rounded into the weights after it. The state dict holds the copies.
    """
    pairs: _Pairs = []
    copied = []
    for group in groups:
        copies = [nn.Parameter(p.detach().to(torch.float32, copy=True)) for p in group["params"]]
        pairs += zip(group["params"], copies, strict=True)
        copied.append({**group, "params": copies})
    optimizer = build(copied)
    _connect(optimizer, pairs)
    _PAIRS[optimizer] = pairs
    return optimizer


def optimized_weights(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the model's weights that an optimizer steps, directly or on copies."""
    copied: dict[Any, Any] = copied_from(optimizer)
    return [copied.get(p, p) for group in optimizer.param_groups for p in group["params"]]


def copied_from(optimizer: torch.optim.Optimizer) -> dict[Tensor, Tensor]:
    """Return copy -> weight of the model, {} without copies."""
    return {copy: weight for weight, copy in _PAIRS.get(optimizer, [])}


def _connect(optimizer: torch.optim.Optimizer, pairs: _Pairs) -> None:
    together = list(_group_by_bytes(pairs))

    @torch.no_grad()
    def take_gradients(*_: Any) -> None:
        for stretch in together:
            narrow, wide = [], []
            for weight, copy in stretch:
                copy.grad = None if weight.grad is None else torch.empty_like(copy)
                if weight.grad is not None and copy.grad is not None:
                    narrow.append(weight.grad)
                    wide.append(copy.grad)
                weight.grad = None  # frees it before the next stretch is allocated
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
            local_tensor(copy).copy_(local_tensor(tensor))

    optimizer.register_step_pre_hook(take_gradients)
    optimizer.register_step_post_hook(write_back)
    optimizer.register_state_dict_post_hook(save)
    optimizer.register_load_state_dict_pre_hook(load)


def _group_by_bytes(pairs: _Pairs) -> Iterator[_Pairs]:
    """Yield the pairs in order, in groups of AT_ONCE_BYTES of copies. Larger pairs are separate."""
    stretch: _Pairs = []
    num_bytes = 0
    for weight, copy in pairs:
        size = local_tensor(copy).nbytes
        if stretch and num_bytes + size > AT_ONCE_BYTES:
            yield stretch
            stretch, num_bytes = [], 0
        stretch.append((weight, copy))
        num_bytes += size
    if stretch:
        yield stretch


def _copy_all(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy tensors into others with equal sharding, with a cast if their formats differ."""
    if into:
        torch._foreach_copy_(
            [local_tensor(tensor) for tensor in into], [local_tensor(value) for value in values]
        )


def master_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of tensors that the optimizer steps and that are not in the model."""
    weights = {id(p) for p in model.parameters()}
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    return sum(p.numel() * p.element_size() for p in stepped if id(p) not in weights)


_VARIANTS_OF_LAYERS = 32
"""Limit of versions of a layer's code. T5 has four kinds of layer, each trained and evaluated, with
static and dynamic lengths. Beyond PyTorch's default of 8 layers run eagerly without a warning."""


def compile_model(plan: Plan, model: torch.nn.Module) -> torch.nn.Module:
    """Return the model wrapped for compilation, or itself. RunError: no layers to compile.

    With `compile.regional` layers are compiled at their first call, and layers of one class share
    code. Resets earlier graphs of this process and the counters of `compile_report`.
    """
    config = plan.config.compile
    if not plan.config.compile.is_on:
        return model
    from torch._dynamo import utils

    arguments: dict[str, Any] = {"backend": config.option}
    if config.is_inductor and config.mode is not CompileMode.default:
        arguments["mode"] = config.mode.value.replace("_", "-")
    torch._dynamo.reset()
    utils.counters.clear()
    # Dynamo keeps the last 64 by default. A run with many graph breaks would lose the first ones.
    utils.set_compilation_metrics_limit(4096)  # more than any usable run has
    utils.clear_compilation_metrics()
    if not config.regional:
        return cast(torch.nn.Module, torch.compile(model, **arguments))
    layers = find_layers(model)
    if not layers:
        raise RunError(
            f"compile.regional = true: {type(model).__name__} has no layers marked as repeated "
            "by transformers\n  -> compile.regional=false"
        )
    torch._dynamo.config.recompile_limit = _VARIANTS_OF_LAYERS
    for layer in layers:
        layer.compile(**arguments)
    return model


def num_graphs(plan: Plan) -> int:
    """Return the number of captured graphs, which grows in a step with compilation."""
    if not plan.config.compile.is_on:
        return 0
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def compile_report() -> dict[str, Any]:
    """Return the compiler's counters in this process since `compile_model`.

    `graphs` include recompiled ones, `operations` are their sum. Cache counts are passes, forward
    or backward, bypasses passes that PyTorch does not cache. `compile_s` is wall time.
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
