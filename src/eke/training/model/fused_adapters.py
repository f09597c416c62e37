"""LoRA's forward and backward passes with fewer passes over memory than PEFT's.

Layers that read the same tensor share one product with their matrices A, and updates are added
inside the products. Backward recomputes SiLU(gate) x up and norms, as in Unsloth's fast_lora.py.
"""

import copy
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from eke.config.schema import Checkpointing
from eke.models.sizes import fuses_adapters
from eke.plan.planner import Plan
from eke.training.model.adapted_layers import is_linear, is_product
from eke.training.model.model_checks import preserve_rng_state, probe_inputs

_log = logging.getLogger(__name__)


class _Products(torch.autograd.Function):
    """`F.linear(x, weight, bias) + scale x B A` for each layer of one input, x or SiLU(x) up.

    `parts` are weight [out, in], bias or None, A [r, in] and B [out, r] of each layer.
    """

    @staticmethod
    def forward(
        ctx: Any, scales: Sequence[float], in_place: bool, x: Tensor, up: Tensor | None, *parts: Any
    ) -> tuple[Tensor, ...]:
        rows, (weights, biases, first, second) = _input(x, up), (parts[n::4] for n in range(4))
        thin = rows @ torch.cat(first).to(x.dtype).T
        ctx.scales, ctx.ranks, results = scales, [len(a) for a in first], []
        each = zip(scales, torch.split(thin, ctx.ranks, 1), weights, biases, second, strict=True)
        for scale, inner, weight, bias, b in each:
            result = rows.new_empty(len(rows), len(b))
            if bias is not None:
                result.copy_(bias)
            result.addmm_(inner, b.to(x.dtype).T, beta=float(bias is not None), alpha=scale)
            add = result.addmm_ if in_place else result.addmm
            result = add(rows, weight.to(x.dtype).T)
            # Not a view: Llama 4 adds to a result in place, which autograd rejects for views.
            results.append(torch.ops.aten._unsafe_view(result, [*x.shape[:-1], len(b)]))
        ctx.save_for_backward(x, up, thin, *parts)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, up, thin, *parts = ctx.saved_tensors
        weights, _, first, second = (parts[n::4] for n in range(4))
        of_results = [gradient.flatten(0, -2) for gradient in gradients]
        of_thin, of_b = [], []
        each = zip(ctx.scales, torch.split(thin, ctx.ranks, 1), of_results, second, strict=True)
        for scale, inner, of_result, b in each:
            of_thin.append((of_result @ b.to(x.dtype)).mul_(scale))
            of_b.append((of_result.T @ inner).to(b.dtype).mul_(scale))
        joined = torch.cat(of_thin, 1)
        of_a = torch.split((joined.T @ _input(x, up)).to(first[0].dtype), ctx.ranks)
        of_x = of_up = None
        if ctx.needs_input_grad[2] or ctx.needs_input_grad[3]:
            of_x = joined @ torch.cat(first).to(x.dtype)
            for of_result, weight in zip(of_results, weights, strict=True):
                of_x.addmm_(of_result, weight.to(x.dtype))
            of_x = of_x.view(x.shape)
            if up is not None:
                of_x, of_up = torch.ops.aten.silu_backward(of_x * up, x), of_x * F.silu(x)
        of_parts = [g for pair in zip(of_a, of_b, strict=True) for g in (None, None, *pair)]
        return None, None, of_x, of_up, *of_parts


def _input(x: Tensor, up: Tensor | None) -> Tensor:
    return (x if up is None else F.silu(x) * up).flatten(0, -2)


class _Norm(torch.autograd.Function):
    """Root mean square norm with a frozen weight that keeps its input in the given format."""

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
    """Adapted layers of one parent with the same input: the first call computes all outputs."""

    def __init__(self, layers: Sequence[Any], in_place: bool) -> None:
        self.layers = layers
        self.in_place = in_place
        self.forget()
        for number, layer in enumerate(layers):
            layer.forward = partial(self.one, number)

    def forget(self, *_: Any) -> None:
        """Drop unread results, so that a failed forward pass does not hold memory."""
        self.input: Tensor | None = None
        self.results: dict[int, Tensor] = {}

    @property
    def applies(self) -> bool:
        """True if the layers add their adapter now, not merged and not disabled."""
        return not any(layer.disable_adapters or layer.merged for layer in self.layers)

    def one(self, number: int, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the output of one layer."""
        layer = self.layers[number]
        if args or kwargs or not self.applies:
            return cast(Tensor, type(layer).forward(layer, x, *args, **kwargs))
        if self.input is not x or number not in self.results:
            self.input, self.results = x, dict(enumerate(self.all(x)))
        result = self.results.pop(number)
        if not self.results:
            self.forget()
        return result

    def all(self, x: Tensor, up: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the outputs of all layers for `x`, or for SiLU(x) up."""
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        scales, parts = [], []
        for layer in self.layers:
            name, base = layer.active_adapters[0], layer.base_layer
            weight = base.weight if isinstance(base, nn.Linear) else base.weight.T  # GPT-2's Conv1D
            parts += [weight, base.bias, layer.lora_A[name].weight, layer.lora_B[name].weight]
            scales.append(layer.scaling[name])
        up = None if up is None else up.to(dtype)
        found = cast(Any, _Products).apply(tuple(scales), self.in_place, x.to(dtype), up, *parts)
        return cast(tuple[Tensor, ...], found)


def _feed_forward(
    module: nn.Module, wide: SharedInput, gate: int, down: SharedInput, x: Tensor
) -> Tensor:
    if not (wide.applies and down.applies):
        return cast(Tensor, type(module).forward(module, x))
    both = wide.all(x)
    return down.all(both[gate], both[1 - gate])[0]


def _watch(model: Any) -> tuple[dict[nn.Module, Tensor], dict[nn.Module, Tensor]]:
    """Return input and output, with autograd's graph, of modules with one argument."""
    # Weights are an expanded zero, and matrices and experts are replaced: fast, and without data.
    read, gave = {}, {}

    def product(size: int, x: Tensor) -> Tensor:
        return x.mean(-1, keepdim=True) * torch.ones(size, requires_grad=True)

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            read[module], gave[module] = args[0], output

    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    with ExitStack() as stack:
        stack.enter_context(torch.device("cpu"))
        stack.enter_context(preserve_rng_state(torch.device("cpu")))
        for config in configs.values():  # kernels of packages require a GPU
            stack.enter_context(patch.object(config, "_attn_implementation_internal", "eager"))
        for name, module in model.named_modules():
            size = getattr(module, "out_features", getattr(module, "nf", 0))
            # Routers return more than a product, and PEFT's wrapper of experts is not a product.
            if is_product(getattr(module, "base_layer", module)):
                stack.enter_context(patch.object(module, "forward", partial(product, size)))
            elif name.rpartition(".")[2] == "experts":
                stack.enter_context(patch.object(module, "forward", lambda x, *_, **__: x))
            stack.callback(module.register_forward_hook(note, with_kwargs=True).remove)
        zeros = {}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
            zeros[name] = torch.zeros((), dtype=dtype).expand(tensor.shape)
        try:
            functional_call(model, zeros, (), probe_inputs(model, 0, torch.device("cpu")))
        except Exception as error:  # any class: the model may read the replaced tensors
            _log.warning("peft.fused: no layers are fused: %s", error)
            return {}, {}
    return read, gave


def _matches(layer: Any, autocast: bool) -> bool:
    """Return whether PEFT's module computes the same as `_Products`."""
    from peft.tuners.lora.layer import Linear

    if type(layer) is not Linear or len(layer.active_adapters) != 1:
        return False
    name, base = layer.active_adapters[0], layer.base_layer
    # Compare exact types: float8 and 4-bit layers are subclasses of nn.Linear.
    plain = type(base) is nn.Linear or (is_linear(base) and not isinstance(base, nn.Linear))
    dropout = not isinstance(layer.lora_dropout[name], nn.Identity)
    other = dropout or name in layer.lora_variant or layer.lora_bias[name]
    trained = any(p.requires_grad for p in base.parameters())
    alike = autocast or len({p.dtype for p in layer.parameters()}) == 1
    return plain and not other and not trained and alike


def _shorten_norm(module: Any) -> None:
    """Replace the forward pass of a norm that computes the same as `_Norm`."""
    eps = next((value for value in vars(module).values() if type(value) is float), None)
    weight = getattr(module, "weight", None)
    if eps is None or weight is None or weight.requires_grad or isinstance(module, nn.LayerNorm):
        return
    generator = torch.Generator("cpu").manual_seed(0)
    twin = copy.deepcopy(module).to_empty(device="cpu")
    twin.weight.normal_(generator=generator)
    wide = torch.randn(4, len(weight), generator=generator, device="cpu")
    if all(torch.equal(twin(x), _norm(twin, eps, x)) for x in (wide, wide.bfloat16())):
        module.forward = partial(_norm, module, eps)


def _norm(module: nn.Module, eps: float, x: Tensor) -> Tensor:
    return cast(Tensor, cast(Any, _Norm).apply(x, module.weight, eps))


def fuse_adapters(plan: Plan, model: nn.Module) -> None:
    """Replace the forward passes of PEFT's modules if `peft.fused` is set, where possible."""
    if not fuses_adapters(plan.config):
        return
    layers = [m for m in model.modules() if _matches(m, plan.compute.autocast is not None)]
    read, gave = _watch(model)
    groups: dict[object, list[nn.Module]] = {}
    parent_of = {child: module for module in model.modules() for child in module.children()}
    for layer in layers:
        place: object = (parent_of[layer], id(read[layer])) if layer in read else layer
        groups.setdefault(place, []).append(layer)
    # Selective checkpointing keeps intermediate results, which must not change.
    in_place = plan.config.memory.checkpointing is not Checkpointing.selective
    made = [SharedInput(group, in_place) for group in groups.values()]
    group_of = {layer: group for group in made for layer in group.layers}
    by_node = {gave[layer].grad_fn: layer for layer in layers if layer in gave}
    for down in by_node.values():
        parent, pair = parent_of[down], _gate_and_up(read[down].grad_fn, by_node)
        wide = group_of[pair[0] if pair else down]
        alone = set(wide.layers) == set(pair) and gave.get(parent) is gave[down]
        if alone and parent_of[pair[0]] is parent and read[parent] is read[pair[0]]:
            first = wide.layers.index(pair[0])
            parent.forward = partial(_feed_forward, parent, wide, first, group_of[down])
    fed = {id(read[layer]) for layer in by_node.values()}
    for module, output in gave.items():
        if id(output) in fed and not any(True for _ in module.children()):
            _shorten_norm(module)
    for group in made:
        model.register_forward_hook(group.forget, always_call=True)


def _gate_and_up(node: Any, by_node: dict[Any, nn.Module]) -> tuple[nn.Module, ...]:
    """Return the layers multiplied as SiLU(gate) x up in autograd's graph, () if there are none."""
    if node is None or node.name() != "MulBackward0":
        return ()
    factors = [factor for factor, _ in node.next_functions]
    for silu, up in (factors, factors[::-1]):
        gate = silu.next_functions[0][0] if silu and silu.name() == "SiluBackward0" else None
        if gate in by_node and up in by_node:
            return by_node[gate], by_node[up]
    return ()
