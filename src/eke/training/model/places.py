"""Whether padding and later tokens change what a model computes for a row, asked by tiny batches.

No list of families says it: XLNet classifies by the last place, padding or not; FNet mixes padding
into every token; BERT's class for causal_lm sees the tokens that it predicts.
"""

from typing import Any

import torch
from torch import Tensor, nn

from eke.common.errors import RunError
from eke.training.model.freeze_unused_params import probe

NUM_SHORT = 5
"""Tokens of a row that is padded to the length of a probe."""


@torch.no_grad()
def padding_side(model: nn.Module, task: str, pad: int) -> str:
    """`right` or `left`: where padding changes no output; empty where it does on both sides.

    Args:
        model: in evaluation mode.
        task: option of the group `task`.
        pad: token that fills rows up.

    Raises:
        RunError: it takes no padded rows at all.
    """
    whole = probe(model, 0)["input_ids"][:2]
    ids = whole[:, -NUM_SHORT:]  # with the end of text that some classifiers pool at
    alone = _logits(model, task, ids, ids)
    if not _alike(alone, _logits(model, task, ids, ids)):
        return "right"  # hashing at random: nothing can be said
    filler = torch.full_like(whole[:, NUM_SHORT:], pad)
    sides = {"right": [ids, filler], "left": [filler, ids]}
    if task == "seq2seq_lm":
        del sides["left"]  # a decoder's inputs are shifted labels
    for side, parts in sides.items():
        padded = torch.cat(parts, 1)
        mask = torch.cat([torch.full_like(part, part is ids) for part in parts], 1)
        try:
            found = _logits(model, task, padded, ids, attention_mask=mask)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # XLNet with attn_type=uni adds masks of different shapes
            why = f"{type(model).__name__} takes no padded rows"
            raise RunError(f"{why} -> batch.per_device=1 batch.eval_per_device=1") from error
        if found.dim() == 3 and found.shape[1] == whole.shape[1]:
            found = found[mask.bool()].view(*ids.shape, -1)
        if found.shape == alone.shape and _alike(alone, found):
            return side
    return ""


@torch.no_grad()
def check_places(model: nn.Module, task: str) -> None:
    """The output has a place for each token, which in causal_lm does not know the next one.

    Raises:
        RunError: it has not, or it does.
    """
    if task not in ("causal_lm", "masked_lm"):
        return
    ids = probe(model, 0)["input_ids"][:1]
    found = _logits(model, task, ids, ids)
    name = type(model).__name__
    if found.shape[1] != ids.shape[1]:
        why = f"{name} answers {ids.shape[1]} tokens with {found.shape[1]} places"
        raise RunError(f"task = {task}: {why} -> another checkpoint")
    other = ids.clone()
    other[:, -1] = ids[0, (ids[0] != ids[0, -1]).int().argmax()]
    if task == "causal_lm" and not _alike(found[:, :-1], _logits(model, task, other, ids)[:, :-1]):
        why = f"{name} sees the tokens that it has to predict"
        fix = "is_decoder = true in its config.json, or task=masked_lm"
        raise RunError(f"task = causal_lm: {why} -> {fix}")


def _logits(model: Any, task: str, ids: Tensor, target: Tensor, **more: Tensor) -> Tensor:
    if task == "seq2seq_lm":
        more["decoder_input_ids"] = target
    with torch.random.fork_rng(devices=[ids.device] if ids.device.type == "cuda" else []):
        logits: Tensor = model(input_ids=ids, **more).logits
    return logits.float()


def _alike(one: Tensor, other: Tensor) -> bool:
    """But for rounding: of float32 on a CPU, else of the coarsest that a GPU multiplies in."""
    tolerance = 1e-4 if one.device.type == "cpu" else 2e-2
    return bool((one - other).abs().max() <= tolerance * one.abs().max().clamp(min=1e-3))
