"""Rows as they are prepared: micro-batches, FLOPs and forecasts against the batches of the run."""

import random
from dataclasses import replace

import numpy as np
import pytest
from prepared import store_of, write_jsonl
from unit.plan.cases import SYNTHETIC, plan_of

from eke.estimate.memory import forecast
from eke.estimate.time.flops import Work
from eke.models.sizes import structure
from eke.plan.planner import evaluated, simulated_micro_batches
from eke.training.batches.dataset import build_data

LONGEST = 40
COUNT = 120


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """Overrides of a file whose rows have 6 to 40 bytes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rng = random.Random(0)
    sizes = [6, LONGEST, *(rng.randint(6, LONGEST) for _ in range(COUNT - 2))]
    texts = ["".join(rng.choices("abcdefgh ", k=size - 1)) + "." for size in sizes]
    made = [{"text": t, "prompt": t[: len(t) // 2], "response": t[::-1]} for t in texts]
    path = write_jsonl(tmp_path / "rows.jsonl", made)
    return ("data=jsonl", f"data.path={path}", "batch.per_device=4", "data.seq_len=64")


def planned(*overrides: str):
    store_of(*overrides)
    return plan_of(*overrides)


CASES = {
    "padded": (),
    "padded to a multiple": ("data.pad_to_multiple_of=16",),
    "grouped": ("data.length_grouping=true", "batch.accumulation=2"),
    "packed": ("data.packing=on",),
    "padding-free": ("data.packing=padding_free",),
    "padding-free, grouped": ("data.packing=padding_free", "data.length_grouping=true"),
    "seq2seq": ("model=tiny_t5", "task=seq2seq_lm", "data.prompt=prompt",
                "data.response=response"),
}  # fmt: skip


@pytest.mark.parametrize("typed", CASES.values(), ids=CASES.keys())
def test_forecast_micro_batches_match_the_run(typed, rows) -> None:
    plan = planned(*rows, *typed, "train.epochs=3", "train.steps=null")
    data, found = build_data(plan), simulated_micro_batches(plan)
    every = [batch for cut in data.train_steps(0) for batch in cut]
    whole = [batch.size for batch in every if batch.num_samples == 4]
    for name in ("source", "target"):
        each = [getattr(size, name) for size in whole]
        low, high = getattr(found.shortest, name), getattr(found.longest, name)
        assert low <= min(each) <= max(each) <= high
        assert getattr(found.expected, name) == pytest.approx(max(each), rel=0.1)
        assert getattr(found.mean, name) == pytest.approx(np.mean(each), rel=0.1)
    largest = max((batch.size for batch in data.eval_batches()), key=lambda size: size.tokens)
    assert evaluated(plan) == largest


@pytest.mark.parametrize("typed", CASES.values(), ids=CASES.keys())
def test_flops_follow_real_lengths(typed, rows) -> None:
    """By hand: 6 per parameter and token, 12 L h per product of attention, half where causal."""
    plan = planned(*rows, *typed)
    data, parts = build_data(plan), structure(plan.config)
    whole = 0.0
    for number in range(len(data.train)):
        sample = data.train[0, number]
        ends = np.flatnonzero(sample.get("position_ids", np.zeros(1)) == 0)
        tokens = len(sample["input_ids"])
        is_pair = plan.config.task.option == "seq2seq_lm"
        target = len(sample["labels"]) if is_pair else tokens
        known = {"none": 0, "source": tokens, "target": target, "predicted": target, "sample": 1}
        whole += sum(6 * w.num_active * known[w.tokens.value] for w in parts.weights)
        for layer in parts.attention:
            pairs = known[layer.queries.value] * known[layer.keys.value]
            if len(ends) > 1:  # of packed rows each sequence sees itself alone
                pairs = sum(n * n for n in np.diff([*ends, tokens]))
            half = 2 if layer.causal else 1
            whole += 12 * layer.num_layers * layer.width * pairs / half
    assert plan.size.flops_per_sample == pytest.approx(whole / len(data.train), rel=1e-9)


@pytest.mark.parametrize("typed", [(), ("data.packing=padding_free",)], ids=["padded", "free"])
def test_seq_len_beyond_the_longest_row_keeps_the_forecast(typed, rows) -> None:
    seen = set()
    for length in (LONGEST + 8, 40 * LONGEST):
        plan = planned(*rows, *typed, "train.steps=30", f"data.seq_len={length}")
        work = Work(plan)
        peak = forecast(plan).peak
        flops = sum(product.flops for product in work.products)
        seen.add((peak, flops, work.tokens, plan.size.flops_per_sample))
    assert len(seen) == 1


def test_evaluation_forecast_uses_existing_rows() -> None:
    typed = (*SYNTHETIC, "data.num_eval_samples=4", "data.seq_len=512")
    few = plan_of(*typed, "batch.eval_per_device=4")
    many = plan_of(*typed, "batch.eval_per_device=1024")
    assert evaluated(many) == evaluated(few)
    assert forecast(many).peak == forecast(few).peak


def test_synthetic_lengths_are_drawn_as_in_the_run() -> None:
    plan = plan_of(*SYNTHETIC, "data.lengths=lognormal", "data.seq_len=128", "batch.per_device=4")
    lengths = build_data(plan).train.lengths()
    assert plan.size.tokens_per_sample == pytest.approx(lengths.mean())
    assert simulated_micro_batches(plan).longest.source == lengths.max()
    assert simulated_micro_batches(plan).shortest.source == np.sort(lengths)[3]


def test_fewer_steps_have_shorter_micro_batches(rows) -> None:
    plan = planned(*rows, "data.packing=padding_free", "train.steps=24")
    short = replace(plan, steps=replace(plan.steps, total=1))
    assert (
        simulated_micro_batches(short).expected.source
        < simulated_micro_batches(plan).expected.source
    )
    assert simulated_micro_batches(short).longest == simulated_micro_batches(plan).longest
