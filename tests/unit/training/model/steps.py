"""One forward and backward pass of a model, for the tests of this folder."""

import torch


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


def step(model, **inputs):
    """Loss and gradients of one training step; gradients by parameter name."""
    model.zero_grad()
    loss = model(**(inputs or make_inputs(model))).logits.square().mean()
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
