"""Parameters that no output of the model depends on.

They never get a gradient. Data parallelism waits for one from every trainable parameter, and an
optimizer would decay them, so they are frozen.
"""

from collections.abc import Mapping
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


def freeze_unreached(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Stop training what one forward pass does not reach; returns the names.

    For architectures that the table does not know. Follows the graph of the logits back to the
    parameters without computing a gradient: the cost is one forward pass over `inputs`.
    """
    with torch.random.fork_rng(devices=_devices(model)):
        logits = model(**inputs).logits
    reached = _leaves(logits)
    frozen = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in reached:
            parameter.requires_grad_(False)
            frozen.append(name)
    return tuple(frozen)


def small_inputs(model: nn.Module) -> dict[str, Tensor]:
    """Two rows of eight tokens, with the model's own end of text last."""
    config: Any = model.config
    device = next(model.parameters()).device
    vocabulary = int(config.vocab_size)
    low = min(NUM_SPECIAL_TOKENS, vocabulary - 1)
    ids = torch.full((2, 8), low, device=device)
    if isinstance(getattr(config, "eos_token_id", None), int):
        ids[:, -1] = config.eos_token_id
    inputs = {"input_ids": ids}
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids
    return inputs


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
