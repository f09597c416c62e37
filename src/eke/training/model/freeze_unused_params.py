"""Parameters that no output of the model depends on.

They never get a gradient. Data parallelism waits for one from every trainable parameter, and an
optimizer would decay them, so they are frozen.
"""

from typing import Any

import torch
from torch import Tensor, nn

from eke.training.model.experts import routed_siblings

UNUSED: dict[str, tuple[str, ...]] = {
    # A second output bias, beside the decoder's own, where the embeddings are not tied.
    "BertForMaskedLM": ("cls.predictions.bias",),
}
"""Class of transformers 5 -> parameters that nothing reads, unless they are shared with one that
is read. Complete for the families of `eke.models.sizes` (tested)."""


NUM_PROBES = 3
"""Forward passes over different tokens that a parameter has to be missing in."""


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


def freeze_unreached(model: nn.Module) -> tuple[str, ...]:
    """Stop training what no forward pass reaches; returns the names.

    For architectures that the table does not know. Follows the graph of the logits back to the
    parameters without computing a gradient: the cost is some forward passes over a few tokens.
    An expert is reached where one of its siblings is: other tokens are sent to it.
    """
    reached: set[int] = set()
    with torch.random.fork_rng(devices=_devices(model)):
        for seed in range(NUM_PROBES):
            reached |= _leaves(model(**probe(model, seed)).logits)
    for siblings in routed_siblings(model):
        for alike in zip(*(module.parameters() for module in siblings), strict=True):
            if any(id(p) in reached for p in alike):
                reached |= set(map(id, alike))
    frozen = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in reached:
            parameter.requires_grad_(False)
            frozen.append(name)
    return tuple(frozen)


def probe(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """Four rows of eight varied tokens, with the model's own end of text last and only there."""
    config: Any = model.config
    device = next(model.parameters()).device
    table = getattr(model, "get_input_embeddings", lambda: None)()
    vocabulary = int(getattr(table, "num_embeddings", config.vocab_size))
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    special = {*ends, config.pad_token_id}
    plain = [token for token in range(vocabulary) if token not in special] or [0]
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(plain), (4, 8), generator=generator)
    ids = torch.tensor(plain)[chosen].to(device)
    if isinstance(ends[0], int) and 0 <= ends[0] < vocabulary:
        ids[:, -1] = ends[0]
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
