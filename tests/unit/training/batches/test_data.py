"""Loaders: the planned number of samples, the same whatever the loader, from any step on."""

import hashlib

import pytest
import torch
from unit.plan.cases import plan_of

from eke.common.text import BOS
from eke.plan.planner import Plan
from eke.training.batches.dataset import build_data

SMALL = (
    "data=synthetic",
    "data.seq_len=16",
    "data.num_samples=31",
    "data.num_eval_samples=5",
    "train.steps=7",
    "batch.per_device=4",
    "batch.accumulation=3",
)


def flat(steps):
    return [
        [(batch.inputs["input_ids"].tolist(), batch.labels.tolist()) for batch in step]
        for step in steps
    ]


def rows(step):
    return sorted(tuple(row) for batch in step for row in batch.inputs["input_ids"].tolist())


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Twelve files in three folders."""
    root = tmp_path_factory.mktemp("texts")
    for number in range(12):
        path = root / "abc"[number % 3] / f"{number}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"This is file {number}. " * (20 + number))
    return f"data.path={root}"


TASKS = {
    "causal": ("task=causal_lm",),
    "masked": ("task=masked_lm", "model=tiny_bert"),
    "classification": ("task=sequence_classification", "task.num_labels=3"),
    "seq2seq": ("task=seq2seq_lm", "model=tiny_t5", "task.target_len=8"),
}


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS.keys())
def test_text_has_as_many_samples_as_planned(task, text) -> None:
    plan = plan_of("data=text", text, "data.eval_frac=0.5", "data.seq_len=16", *task)
    data = build_data(plan)
    assert len(data.train) == plan.steps.num_train_samples > 20
    assert len(data.evaluation) == plan.steps.num_eval_samples
    assert data.bytes_are_tokens == (task in (TASKS["causal"], TASKS["seq2seq"]))
    assert len(data.train[0, 0]["input_ids"]) == 16
    if task == TASKS["classification"]:
        assert {int(data.train[0, n]["labels"]) for n in range(len(data.train))} == {0, 1, 2}


def test_training_text_is_never_evaluated_on(tmp_path) -> None:
    for letter in "abcdefgh":  # each file is made of its own letter
        (tmp_path / f"{letter}.txt").write_text(letter * 200)
    plan = plan_of("data=text", f"data.path={tmp_path}", "data.eval_frac=0.5", "data.seq_len=16")
    data = build_data(plan)
    letters = [
        {token for n in range(len(part)) for token in part[0, n]["input_ids"].tolist()} - {BOS}
        for part in (data.train, data.evaluation)
    ]
    assert [len(found) for found in letters] == [4, 4]
    assert not letters[0] & letters[1]


def test_steps_have_the_planned_micro_batches() -> None:
    data = build_data(plan_of(*SMALL))
    sizes = [[batch.num_samples for batch in step] for step in data.train_steps(0)]
    assert sizes == [[4, 4, 4], [4, 4, 4], [4, 3]] * 2 + [[4, 4, 4]]


def test_resume_continues_with_the_same_samples() -> None:
    data = build_data(plan_of(*SMALL, "task=masked_lm", "model=tiny_bert"))
    whole = flat(data.train_steps(0))
    for start in (1, 2, 3, 6):
        assert flat(data.train_steps(start)) == whole[start:]


def test_samples_of_a_step_are_independent_of_micro_batch_size() -> None:
    whole = [rows(step) for step in build_data(plan_of(*SMALL)).train_steps(0)]
    for each, times in ((12, 1), (1, 12)):
        cut = (f"batch.per_device={each}", f"batch.accumulation={times}")
        other = build_data(plan_of(*SMALL[:-2], *cut))
        assert [rows(step) for step in other.train_steps(0)] == whole


def test_ranks_share_a_step() -> None:
    """Two ranks of 4 x 1 see what one process of 4 x 2 sees."""
    base = (*SMALL[:-2], "batch.per_device=4")
    one = build_data(plan_of(*base, "batch.accumulation=2"))
    two = build_data(plan_of(*base, "distributed.num_processes=2"))
    ranks = [list(two.train_steps(0, rank)) for rank in (0, 1)]
    together = [rows([*a, *b]) for a, b in zip(*ranks, strict=True)]
    assert together == [rows(step) for step in one.train_steps(0)]


def test_rank_with_fewer_micro_batches_gets_placeholders() -> None:
    uneven = ("batch.accumulation=1", "batch.per_device=3", "distributed.num_processes=2")
    data = build_data(plan_of(*SMALL, *uneven))
    for even, filled in ((False, []), (True, [0])):
        second = data.train_steps(0, rank=1, even=even)
        sizes = [[batch.num_samples for batch in step] for step in second]
        assert sizes == [[3], [3], [3], [3], [3], filled, [3]]


def test_loader_processes_do_not_change_batches() -> None:
    overrides = (*SMALL, "task=masked_lm", "model=tiny_bert")
    alone, helped = (
        build_data(plan_of(*overrides, f"dataloader.workers={n}", *more))
        for n, more in ((0, ()), (2, ("dataloader.prefetch=3",)))
    )
    assert flat(helped.train_steps(1)) == flat(alone.train_steps(1))


def test_evaluation_holds_every_sample_once_in_fixed_order() -> None:
    plan = plan_of(*SMALL, "batch.eval_per_device=2")
    data = build_data(plan)
    batches = list(data.eval_batches())
    assert [batch.num_samples for batch in batches] == [2, 2, 1]
    assert flat([batches]) == flat([list(data.eval_batches())])
    ranks = build_data(plan_of(*SMALL, "batch.eval_per_device=2", "distributed.num_processes=2"))
    shared = [batch for rank in (0, 1) for batch in ranks.eval_batches(rank)]
    assert rows(shared) == rows(batches)


def test_evaluation_data_differs_from_training_data() -> None:
    data = build_data(plan_of(*SMALL))
    train = {tuple(row) for step in data.train_steps(0) for row in rows(step)}
    assert not train & set(rows(list(data.eval_batches())))


def test_loading_keeps_the_global_random_state() -> None:
    """Else dropout would differ after a resume."""
    data = build_data(plan_of(*SMALL, *TASKS["masked"]))
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    list(data.train_steps(0))
    list(data.eval_batches())
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(
    ("overrides", "masked"),
    [
        (("model=tiny_bert", "task=masked_lm", "data.lengths=uniform"), True),
        (("model=tiny_t5", "task=seq2seq_lm", "data.lengths=uniform"), True),
        (("data.lengths=uniform",), False),
        (("model=tiny_bert", "task=masked_lm"), False),
    ],
    ids=["ragged bert", "ragged t5", "ragged causal", "fixed bert"],
)
def test_mask_is_built_only_if_padding_is_attended_to(overrides, masked) -> None:
    data = build_data(plan_of(*SMALL, *overrides))
    batch = next(data.train_steps(0))[0]
    assert ("attention_mask" in batch.inputs) == masked


def test_synthetic_samples_are_independent_of_the_training_seed() -> None:
    def tokens(*overrides: str) -> list[int]:
        plan: Plan = plan_of(*SMALL, *overrides)
        return build_data(plan).train[0, 0]["input_ids"].tolist()

    assert tokens() == tokens("seed=1")
    assert tokens() != tokens("data.data_seed=1")


GOLDEN = {
    "causal": "f0c557babd90964b",
    "masked": "7e3818789c2fa1d5",
    "classification": "f7e0be22c5a7d46b",
    "seq2seq": "2df17e9237099374",
}
"""SHA-256 of the micro-batches below: the same when torch made them, before NumPy did. Of masked
since no token is chosen too many, of seq2seq since the model's class shifts the labels."""


@pytest.mark.parametrize("task", TASKS)
def test_batches_match_golden_digests(task) -> None:
    """What a run is compared with may be months old: the same command is the same data."""
    data = build_data(plan_of(*SMALL, "data.lengths=uniform", *TASKS[task]))
    digest = hashlib.sha256()
    for step in data.train_steps(0):
        for batch in step:
            for name, tensor in sorted([*batch.inputs.items(), ("labels", batch.labels)]):
                digest.update(f"{name} {tensor.dtype} {tensor.tolist()}".encode())
    assert digest.hexdigest()[:16] == GOLDEN[task]
