"""The longest samples, beside those of real data: the same names, shapes and kinds of batches."""

import dataclasses

import pytest
import torch
from unit.plan.cases import SYNTHETIC, plan_of

from eke.training.batches.dataset import build_data

RAGGED = ("data.lengths=uniform",)

CASES = {
    "causal": ("model=tiny",),
    "causal, ragged": ("model=tiny", *RAGGED),
    "causal, packed": ("model=tiny", *RAGGED, "data.packing=on"),
    "causal, padding-free": ("model=tiny", *RAGGED, "data.packing=padding_free"),
    "masked": ("model=tiny_bert", "task=masked_lm"),
    "masked, ragged": ("model=tiny_bert", "task=masked_lm", *RAGGED),
    "classification": ("model=tiny_t5", "task=sequence_classification"),
    "translation": ("model=tiny_t5", "task=seq2seq_lm", "task.target_len=9"),
}


def batches(typed, probe: bool):
    plan = plan_of(*SYNTHETIC, *typed, "batch.per_device=4", "data.num_eval_samples=4")
    data = build_data(dataclasses.replace(plan, probe=probe))
    return data, next(data.train_steps(0))[0], next(data.eval_batches())


@pytest.mark.parametrize("typed", CASES.values(), ids=CASES.keys())
def test_longest_batch_has_real_inputs_and_is_not_shorter(typed) -> None:
    for real, trial in zip(batches(typed, False)[1:], batches(typed, True)[1:], strict=True):
        assert real.inputs.keys() == trial.inputs.keys()
        assert trial.num_samples == real.num_samples
        assert trial.num_targets > 0
        for name, tensor in trial.inputs.items():
            assert tensor.dtype == real.inputs[name].dtype
            assert tensor.numel() >= real.inputs[name].numel()


def test_longest_rows_are_padded_like_real_rows() -> None:
    mask = batches(CASES["masked, ragged"], True)[1].inputs["attention_mask"]
    assert mask[:, 0].all()
    assert mask.sum() == mask.numel() - 1, "one row is one token shorter"
    positions = batches(CASES["causal, packed"], True)[1].inputs["position_ids"]
    assert (positions == 0).sum() == 2 * len(positions)
    ids = batches(CASES["classification"], True)[1].inputs["input_ids"]  # T5 pools at its end
    assert (ids[:, -1] != ids[:, 0]).all()
    assert torch.unique(ids[:, :-1]).numel() == 1


def test_every_step_has_a_sample() -> None:
    data, _, _ = batches(CASES["causal"], True)
    assert len(data.train) == data.plan.steps.num_train_samples
    assert len(list(data.train_steps(0))) == data.plan.steps.total
