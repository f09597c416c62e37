"""One forward and backward pass of a model, for the tests of this folder."""

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Counted(TorchDispatchMode):
    """Counts the operations of its context by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def make_inputs(model, length=16, seed=0):
    """Two samples of byte tokens that end as the byte tokenizer ends them (T5 classifies there)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(8, 264, (2, length), generator=generator)
    ids[:, -1] = 2
    inputs = {"input_ids": ids}
    config = getattr(model, "_orig_mod", model).config
    if config.is_encoder_decoder and "Conditional" in type(model).__name__:
        inputs["decoder_input_ids"] = ids.roll(1, 1)
    return inputs


def same_weights(one, other):
    """Whether all names and numbers are the same."""
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


def step(model, **inputs):
    """Loss and gradients of one training step; gradients by parameter name."""
    model.zero_grad()
    loss = model(**(inputs or make_inputs(model))).logits.square().mean()
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
