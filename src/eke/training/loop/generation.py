"""Exact match and ROUGE-L of texts generated from the prompts of evaluation samples."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from eke.common.text import IGNORED
from eke.plan.record import metrics
from eke.training.batches.batches import MicroBatch

_WORDS = re.compile(r"[^\W_]+")
"""Words of ROUGE: equal to google-research's rouge_score for English, defined for other scripts."""


@torch.no_grad()
def generation_metrics(
    model: nn.Module,
    batches: Iterable[MicroBatch],
    decode: Callable[[np.ndarray], str],
    pad: int,
    max_new_tokens: int,
) -> metrics.Row:
    """Generate greedily after each prompt and return exact match and ROUGE-L of the answers.

    ROUGE-L is the F-measure of the longest common subsequence of lower-case words (torchmetrics).
    `decode` takes int64 ids `[tokens]`. If a row has several answers, the last one is used.
    """
    from torchmetrics.text import ROUGEScore

    pairs: list[tuple[str, str]] = []
    model.eval()
    for batch in batches:
        cut = [prompt_and_answer(batch, row) for row in range(batch.num_samples)]
        written = _generate(model, [prompt for prompt, _ in cut], pad, max_new_tokens)
        answers = zip(written, cut, strict=True)
        pairs += [(decode(found), decode(right)) for found, (_, right) in answers]
    rouge = ROUGEScore(rouge_keys="rougeL", normalizer=str.lower, tokenizer=_WORDS.findall)
    rouge.update([found for found, _ in pairs], [right for _, right in pairs])
    matches = [found.strip() == right.strip() for found, right in pairs]
    return {
        "eval/exact_match": float(np.mean(matches)),
        "eval/rouge_l": float(rouge.compute()["rougeL_fmeasure"]),
    }


def prompt_and_answer(batch: MicroBatch, row: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the token ids of a row's prompt and of its answer."""
    ids, labels = (x[row].cpu().numpy() for x in (batch.inputs["input_ids"], batch.labels))
    counted = np.flatnonzero(labels != IGNORED)
    if "decoder_input_ids" in batch.inputs:
        mask = batch.inputs.get("attention_mask")
        kept = slice(None) if mask is None else mask[row].cpu().numpy() == 1
        return ids[kept], labels[counted]
    # Label n is the token after n, and the last run of labels is the last answer.
    first = counted[np.flatnonzero(np.diff(counted, prepend=-2) > 1)[-1]]
    return ids[: first + 1], labels[first : counted[-1] + 1]


def _generate(
    model: Any, prompts: list[np.ndarray], pad: int, max_new_tokens: int
) -> list[np.ndarray]:
    rows = [torch.from_numpy(prompt) for prompt in prompts]
    ids = pad_sequence(rows, batch_first=True, padding_value=pad, padding_side="left")
    mask = pad_sequence([*map(torch.ones_like, rows)], batch_first=True, padding_side="left")
    # A table of positions is limited. The samples' own answers fit into it.
    longest = ids.shape[1]
    room = (getattr(model.config, "max_position_embeddings", None) or 2**31) - longest
    one_stack = not model.config.is_encoder_decoder
    device = next(model.parameters()).device
    written: Tensor = model.generate(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        do_sample=False,
        pad_token_id=pad,
        max_new_tokens=max(1, min(max_new_tokens, room)) if one_stack else max_new_tokens,
    )
    return list(written[:, longest if one_stack else 1 :].cpu().numpy())
