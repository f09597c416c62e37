"""LoRA's forward and backward passes with fewer passes over memory, in place of PEFT's.

PEFT's modules, names and files stay: forwards are replaced. Layers that read the same tensor share
one product with their matrices A, the products with B and with the
weight are added up in one place, and what is kept for
the backward pass is the input and the thin product. SiLU(gate) x up and what norms compute are made
again. Unsloth's fast_lora.py (Apache 2.0) has the same idea. Not used: several adapters at once,
dropout, DoRA, trained biases, 4-bit weights.

Which layers belong together is seen in a forward pass of a few tokens without the weights.
"""

import copy
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from eke.config.schema import Checkpointing
from eke.models.sizes import why_not_fused
from eke.plan.planner import Plan
from eke.training.model.adapters import is_linear
from eke.training.model.unused import own_random_numbers, probe_inputs

log = logging.getLogger(__name__)

PARTS = 4
"""Tensors of an adapted layer: weight (out, in), bias or None, A (r, in), B (out, r)."""


class _Products(torch.autograd.Function):
    """Outputs of adapted layers with one input, as `F.linear(x, weight, bias) + scale x B A`."""

    @staticmethod
    def forward(
        ctx: Any, scales: Sequence[float], in_place: bool, x: Tensor, up: Tensor | None, *parts: Any
    ) -> tuple[Tensor, ...]:
        rows = _input(x, up)
        thin = rows @ torch.cat(parts[2::PARTS]).to(x.dtype).T
        each = torch.split(thin, [len(a) for a in parts[2::PARTS]], 1)
        results = []
        for scale, inner, weight, bias, b in zip(
            scales, each, parts[::PARTS], parts[1::PARTS], parts[3::PARTS], strict=True
        ):
            update = rows.new_empty(len(rows), len(b))
            if bias is not None:
                update.copy_(bias)
            update.addmm_(inner, b.to(x.dtype).T, beta=float(bias is not None), alpha=scale)
            add = update.addmm_ if in_place else update.addmm
            results.append(add(rows, weight.to(x.dtype).T).view(*x.shape[:-1], len(b)))
        ctx.save_for_backward(x, up, thin, *parts)
        ctx.scales = scales
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, up, thin, *parts = ctx.saved_tensors
        rows, first = _input(x, up), parts[2::PARTS]
        each = torch.split(thin, [len(a) for a in first], 1)
        wanted = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
        of_thin, of_b = [], []
        of_results = [gradient.flatten(0, -2) for gradient in gradients]
        for scale, inner, of_result, b in zip(
            ctx.scales, each, of_results, parts[3::PARTS], strict=True
        ):
            of_thin.append((of_result @ b.to(x.dtype)).mul_(scale))
            of_b.append((of_result.T @ inner).to(b.dtype).mul_(scale))
        joined = torch.cat(of_thin, 1)
        of_a = torch.split((joined.T @ rows).to(first[0].dtype), [len(a) for a in first])
        of_x, of_up = None, None
        if wanted:
            of_x = joined @ torch.cat(first).to(x.dtype)
            for of_result, weight in zip(of_results, parts[::PARTS], strict=True):
                of_x.addmm_(of_result, weight.to(x.dtype))
            of_x = of_x.view(x.shape)
        if up is not None and of_x is not None:
            of_x, of_up = torch.ops.aten.silu_backward(of_x * up, x), of_x * F.silu(x)
        of_parts = [g for pair in zip(of_a, of_b, strict=True) for g in (None, None, *pair)]
        return None, None, of_x, of_up, *of_parts


def _input(x: Tensor, up: Tensor | None) -> Tensor:
    """What the matrices are multiplied with, (rows, in): `x`, or the gated product of both."""
    return (x if up is None else F.silu(x) * up).flatten(0, -2)


class _Norm(torch.autograd.Function):
    """Root mean square norm with a frozen weight, which keeps its input as it comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.float32)
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, scale, weight)
        return weight * (wide * scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        x, scale, weight = ctx.saved_tensors
        of_normed = (gradient * weight).to(torch.float32)
        normed = x.to(torch.float32) * scale
        along = (of_normed * normed).mean(-1, keepdim=True)
        return of_normed.sub_(normed.mul_(along)).mul_(scale).to(x.dtype), None, None


class SharedInput:
    """Adapted layers of one parent that read the same tensor; the first one called computes all.

    Args:
        layers: PEFT's modules.
        in_place: add updates to the products; selective checkpointing keeps these as they are.
    """

    def __init__(self, layers: Sequence[Any], in_place: bool) -> None:
        self.layers = layers
        self.in_place = in_place
        self.input: Tensor | None = None
        self.results: list[Tensor | None] = []
        for number, layer in enumerate(layers):
            layer.forward = partial(self.one, number)

    @property
    def applies(self) -> bool:
        """Whether the layers add their adapter now: not merged, nor switched off."""
        return not any(layer.disable_adapters or layer.merged for layer in self.layers)

    def one(self, number: int, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The forward pass of one of the layers."""
        layer = self.layers[number]
        if args or kwargs or not self.applies:
            return cast(Tensor, type(layer).forward(layer, x, *args, **kwargs))
        if len(self.layers) == 1:
            return self.all(x)[0]
        if self.input is not x or self.results[number] is None:
            self.input, self.results = x, list(self.all(x))
        result, self.results[number] = self.results[number], None
        if not any(waiting is not None for waiting in self.results):
            self.forget()
        return cast(Tensor, result)

    def all(self, x: Tensor, up: Tensor | None = None) -> tuple[Tensor, ...]:
        """The outputs of all layers for `x`, or for SiLU(x) x up."""
        kind, dtype = x.device.type, x.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        scales = tuple(layer.scaling[layer.active_adapters[0]] for layer in self.layers)
        parts = [part for layer in self.layers for part in _parts(layer)]
        up = None if up is None else up.to(dtype)
        found: tuple[Tensor, ...] = cast(Any, _Products).apply(
            scales, self.in_place, x.to(dtype), up, *parts
        )
        return found

    def forget(self, *_: Any) -> None:
        """Drop results nobody asked for: a forward pass that failed must not hold memory."""
        self.input, self.results = None, []


def _parts(layer: Any) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    name, base = layer.active_adapters[0], layer.base_layer
    weight = base.weight if isinstance(base, nn.Linear) else base.weight.T  # GPT-2's Conv1D
    return weight, base.bias, layer.lora_A[name].weight, layer.lora_B[name].weight


def _feed_forward(
    module: nn.Module, wide: SharedInput, gate: int, down: SharedInput, x: Tensor
) -> Tensor:
    if not (wide.applies and down.applies):
        return cast(Tensor, type(module).forward(module, x))
    both = wide.all(x)
    return down.all(both[gate], both[1 - gate])[0]


class _Calls:
    """What modules read and answered in one forward pass, without data."""

    def __init__(self) -> None:
        self.read: dict[nn.Module, Tensor] = {}
        self.gave: dict[nn.Module, Tensor] = {}

    def note(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """A forward hook: keeps calls with nothing but one tensor."""
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            self.read[module] = args[0]
            self.gave[module] = output

    def gated(
        self, module: nn.Module, group_of: Mapping[nn.Module, SharedInput]
    ) -> tuple[SharedInput, int, SharedInput] | None:
        """Of a module that computes down(SiLU(gate(x)) x up(x)) alone: both groups, gate's number.

        Seen in the graph that autograd made.
        """
        mine = [m for m in module.children() if m in group_of]
        ends = [m for m in mine if self.gave.get(m) is self.gave.get(module, self)]
        if len(mine) != 3 or len(ends) != 1:
            return None
        down, wide = ends[0], next(group_of[m] for m in mine if m is not ends[0])
        shared = len(wide.layers) == 2 and self.read[wide.layers[0]] is self.read[module]
        product: Any = self.read[down].grad_fn
        if not shared or down in wide.layers or product.name() != "MulBackward0":
            return None
        factors = [node for node, _ in product.next_functions]
        for number in (0, 1):
            gate, up = (self.gave[wide.layers[n]].grad_fn for n in (number, 1 - number))
            for one, other in (factors, factors[::-1]):
                silu = one is not None and one.name() == "SiluBackward0"
                if silu and one.next_functions[0][0] is gate and other is up:
                    return wide, number, group_of[down]
        return None


def _watch(model: Any) -> _Calls:
    """The calls in a forward pass of a few tokens on the host; none where it fails.

    Without the weights: they are one zero, and matrices and experts are stood in for, so that it
    takes as long for a large model, for one in 4 bits and for one without data.
    """
    calls = _Calls()
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    with ExitStack() as stack:
        stack.enter_context(torch.device("cpu"))
        stack.enter_context(own_random_numbers(torch.device("cpu")))
        for config in configs.values():  # packages' kernels want a GPU
            stack.enter_context(patch.object(config, "_attn_implementation_internal", "eager"))
        for name, module in model.named_modules():
            size = getattr(module, "out_features", getattr(module, "nf", None))
            if size is not None:
                stack.enter_context(patch.object(module, "forward", partial(_product, size)))
            elif name.rpartition(".")[2] == "experts":
                stack.enter_context(patch.object(module, "forward", lambda x, *_, **__: x))
            stack.callback(module.register_forward_hook(calls.note, with_kwargs=True).remove)
        zeros = {
            name: torch.zeros((), dtype=torch.float32 if t.is_floating_point() else t.dtype)
            .expand(t.shape)
            for name, t in (*model.named_parameters(), *model.named_buffers())
        }  # fmt: skip
        try:
            functional_call(model, zeros, (), probe_inputs(model, 0, torch.device("cpu")))
        except RuntimeError as error:
            log.warning("peft.fused: layers share nothing, since %s", error)
            return _Calls()
    return calls


def _product(size: int, x: Tensor) -> Tensor:
    """Of the shape of a linear layer's output, and a step of autograd's graph."""
    return x.mean(-1, keepdim=True) * torch.ones(size, requires_grad=True)


def _matches(module: nn.Module, autocast: bool) -> bool:
    """Whether PEFT's module computes what `_Products` does."""
    from peft.tuners.lora.layer import Linear

    if type(module) is not Linear or len(module.active_adapters) != 1:
        return False
    layer: Any = module
    name, base = layer.active_adapters[0], layer.base_layer
    # Exactly: float8's and 4-bit layers are linear, too.
    plain = type(base) is nn.Linear or (is_linear(base) and not isinstance(base, nn.Linear))
    if not plain or name in layer.lora_variant or layer.lora_bias[name]:
        return False
    dropout = not isinstance(layer.lora_dropout[name], nn.Identity)
    trained = any(p.requires_grad for p in base.parameters())
    formats = {p.dtype for p in layer.parameters()}
    return not (dropout or trained or (len(formats) > 1 and not autocast))


def _root_mean_square(module: nn.Module) -> float | None:
    """What is added under the root by a norm that computes as `_Norm`; None: it does not."""
    names = [name for name, _ in module.named_parameters()]
    eps = next((value for value in vars(module).values() if type(value) is float), None)
    weight = getattr(module, "weight", None)
    if eps is None or names != ["weight"] or weight is None or weight.requires_grad:
        return None
    generator = torch.Generator("cpu").manual_seed(0)
    twin: Any = copy.deepcopy(module).to_empty(device="cpu")
    twin.weight.normal_(generator=generator)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(4, len(weight), generator=generator, device="cpu").to(dtype)
        if not torch.equal(twin(x), _norm(twin, eps, x)):
            return None
    return eps


def _norm(module: nn.Module, eps: float, x: Tensor) -> Tensor:
    return cast(Tensor, cast(Any, _Norm).apply(x, module.weight, eps))


def fuse_adapters(plan: Plan, model: nn.Module) -> None:
    """Replace the forward passes of PEFT's modules wherever `peft.fused` asks for it and can."""
    if why_not_fused(plan.config):
        return
    layers = [m for m in model.modules() if _matches(m, plan.compute.autocast is not None)]
    calls = _watch(model)
    in_place = plan.config.memory.checkpointing is not Checkpointing.selective
    parent_of = {child: module for module in model.modules() for child in module.children()}
    groups: dict[object, list[nn.Module]] = {}
    for layer in layers:
        read = calls.read.get(layer)
        place = layer if read is None else (parent_of[layer], id(read))
        groups.setdefault(place, []).append(layer)
    made = [SharedInput(group, in_place) for group in groups.values()]
    group_of = {layer: group for group in made for layer in group.layers}
    fed = {id(calls.read[layer]) for layer in layers if layer in calls.read}
    for module in model.modules():
        if found := calls.gated(module, group_of):
            module.forward = partial(_feed_forward, module, *found)
        elif id(calls.gave.get(module)) in fed and (eps := _root_mean_square(module)):
            module.forward = partial(_norm, module, eps)
    for group in made:
        model.register_forward_hook(group.forget, always_call=True)
