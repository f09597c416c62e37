"""Parameters that no output of the model depends on.

They never get a gradient. Data parallelism waits for one from every trainable parameter, and an
optimizer would decay them, so they are frozen.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from eke.tokens import NUM_SPECIAL_TOKENS

UNUSED: dict[str, tuple[str, ...]] = {
    # A second output bias, beside the decoder's own, where the embeddings are not tied.
    "BertForMaskedLM": ("cls.predictions.bias",),
}
"""Class of transformers 5 -> parameters that nothing reads, unless they are shared with one that
is read. Complete for the families of `eke.sizes` (tested)."""


def freeze_unused(model: nn.Module) -> tuple[str, ...]:
    """Stop training what the table names; returns the names."""
    frozen = []
    for name in UNUSED.get(type(model).__name__, ()):
        parameter = model.get_parameter(name)
        every_name = [
            n for n, p in model.named_parameters(remove_duplicate=False) if p is parameter
        ]
        if every_name == [name]:
            parameter.requires_grad_(False)
            frozen.append(name)
    return tuple(frozen)


@dataclass(frozen=True)
class Unreached:
    """What some forward passes did not reach."""

    frozen: tuple[str, ...]
    """Parameters that none reached: no longer trained."""
    routed: tuple[str, ...]
    """Lists of modules of which a pass reached a part: a router chooses among them."""


def freeze_unreached(model: nn.Module, batches: Iterable[Mapping[str, Tensor]]) -> Unreached:
    """Stop training what no forward pass reaches.

    For architectures that the table does not know. Follows the graph of the logits back to the
    parameters without computing a gradient: the cost is a forward pass for each batch. What a
    router chooses among is trained where any of it is reached.
    """
    passes = []
    with torch.random.fork_rng(devices=_devices(model)):
        for inputs in batches:
            passes.append(_leaves(model(**inputs).logits))
    kept = set().union(*passes)
    routed = []
    for name, groups in _alike(model):
        # A sample passes all layers of a stack, but a few experts only.
        if any(0 < len(group & reached) < len(group) for group in groups for reached in passes):
            routed.append(name)
            kept |= set().union(*(group for group in groups if group & kept))
    frozen = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in kept:
            parameter.requires_grad_(False)
            frozen.append(name)
    return Unreached(tuple(frozen), tuple(routed))


def _alike(model: nn.Module) -> Iterator[tuple[str, list[set[int]]]]:
    """Lists of modules with the same parameters, and the ids of those that have the same place."""
    for name, module in model.named_modules():
        children = list(module.children()) if isinstance(module, LISTS) else []
        shapes = [[(n, p.shape) for n, p in child.named_parameters()] for child in children]
        if len(children) > 1 and shapes[0] and all(each == shapes[0] for each in shapes):
            columns = zip(*(child.parameters() for child in children), strict=True)
            yield name, [{id(parameter) for parameter in column} for column in columns]


LISTS = (nn.ModuleList, nn.ModuleDict)


def give_all_gradients(model: nn.Module, routed: Iterable[str]) -> None:
    """Have experts that a batch does not reach get a gradient of zero, and not none.

    Ranks that share gradients wait for one of every parameter, and their batches reach different
    experts. The output is unchanged.

    Args:
        model: changed in place.
        routed: names of lists of experts.
    """
    for name in routed:
        experts = model.get_submodule(name)
        is_called = type(experts).forward not in {kind.forward for kind in LISTS}
        owner = experts if is_called else model.get_submodule(name.rpartition(".")[0])
        owner.register_forward_hook(partial(_add_nothing, experts))


def _add_nothing(experts: nn.Module, _: nn.Module, __: Any, output: Any) -> Any:
    first, *rest = output if isinstance(output, tuple) else (output,)
    for parameter in experts.parameters():
        if parameter.requires_grad:
            first = first + 0 * parameter.view(-1)[0].to(first.dtype)
    return (first, *rest) if isinstance(output, tuple) else first


NUM_PROBES = 4
"""Batches that are tried: one may pass by what another reaches."""


def small_inputs(model: nn.Module) -> list[dict[str, Tensor]]:
    """Some batches of two rows of eight tokens, with the model's own end of text last.

    The first one repeats a token, which shows what is routed; the others vary.
    """
    config: Any = model.config
    device = next(model.parameters()).device
    vocabulary = int(config.vocab_size)
    low = min(NUM_SPECIAL_TOKENS, vocabulary - 1)
    end = getattr(config, "eos_token_id", None)
    generator = torch.Generator().manual_seed(0)
    batches = []
    for number in range(NUM_PROBES):
        high = vocabulary if number else low + 1
        ids = torch.randint(low, high, (2, 8), generator=generator).to(device)
        if isinstance(end, int) and 0 <= end < vocabulary:
            ids[ids == end] = low
            ids[:, -1] = end
        inputs = {"input_ids": ids}
        if getattr(config, "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = ids
        batches.append(inputs)
    return batches


def _devices(model: nn.Module) -> list[torch.device]:
    device = next(model.parameters()).device
    return [device] if device.type == "cuda" else []


def _leaves(output: Tensor) -> set[int]:
    """Identities of the tensors that gradients of `output` would be accumulated into."""
    seen: set[object] = set()
    found: set[int] = set()
    waiting = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.add(id(variable))
        waiting += [following for following, _ in node.next_functions]
    return found
