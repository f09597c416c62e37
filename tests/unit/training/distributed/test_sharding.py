"""Parts of tensors: how many bytes they are, what is saved of them, and which optimizers fail."""

from types import SimpleNamespace

import pytest
import torch
from saved import load_checkpoint, save_checkpoint
from support import TINY
from unit.models.sizes.configs import FAMILY_CASES
from unit.training.model.sharded import CPU, among, sharded_model, sharded_plan

from eke.config.schema import Exchange
from eke.models.sizes import state_bytes
from eke.training.distributed.deepspeed_engine import ShardedUpdate
from eke.training.distributed.fsdp import is_cut, part, part_bytes
from eke.training.distributed.ranks import ALONE, Ranks
from eke.training.model.build_model import build_model
from eke.training.observe.libraries import note_sharding
from eke.training.optimizer.build_optimizer import build_optimizer
from eke.training.optimizer.update import PlainUpdate
from eke.training.state_parts import hold

SMALL = tuple(o for o in TINY if o != "model.dropout=0.0")


RANK = 1
"""Of two, in all tests: torch 2.13 remembers which part a rank has, by the size of the mesh."""


def step(model, optimizer):
    """One step with gradients of ones."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pytest.mark.parametrize(("option", "task"), FAMILY_CASES, ids=lambda value: value)
def test_the_first_of_three_holds_what_was_computed(option, task) -> None:
    """Three processes, so that most dimensions do not divide evenly."""
    plan = sharded_plan(3, f"model={option}", f"task={task}")
    with among(3, 0):
        model = sharded_model(plan)
        optimizer = build_optimizer(plan, model)
        step(model, optimizer)
        states = [v for s in optimizer.state.values() for v in s.values() if v.dim()]
        expected = state_bytes(plan.config)
        assert part_bytes(model.parameters()) == expected.weights
        trained = [p.grad for p in model.parameters() if p.grad is not None]
        assert part_bytes(trained) == expected.gradients
        assert part_bytes(states) == expected.optimizer
        assert expected.start == 4 * plan.size.num_parameters
        assert expected.peak == max(expected.start, expected.total)


def test_gradients_that_add_up_are_whole() -> None:
    several = ("batch.accumulation=2",)
    plain, every = (
        sharded_plan(2, *several),
        sharded_plan(2, *several, "distributed.exchange=every"),
    )
    whole = state_bytes(plain.config).gradients
    assert whole == 4 * plain.size.num_parameters
    assert state_bytes(every.config).gradients == whole / 2


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("adafactor", r"mixed torch\.Tensor and DTensor"),
        ("apollo", r"mixed torch\.Tensor and DTensor"),
        ("lion", "does not have a sharding strategy registered"),
        ("adamw_8bit", "does not have a sharding strategy registered"),
    ],
)
def test_what_the_rule_refuses_really_fails(option, words) -> None:
    plan = sharded_plan(2, *SMALL, f"optimizer={option}")
    with among(2, RANK):
        model = sharded_model(plan)
        with pytest.raises((RuntimeError, NotImplementedError), match=words):
            step(model, build_optimizer(plan, model))


@pytest.mark.parametrize("option", ["adamw_foreach", "sgd", "muon"])
def test_a_checkpoint_of_one_process_is_cut(option, tmp_path) -> None:
    plan = sharded_plan(2, *SMALL, f"optimizer={option}")
    alone = build_model(plan, CPU)
    theirs = build_optimizer(plan, alone)
    step(alone, theirs)
    path = save_checkpoint(tmp_path, 3, alone, theirs, None, keep=1)
    with among(2, RANK):
        model = sharded_model(plan)
        mine = build_optimizer(plan, model)
        assert load_checkpoint(path, model, mine, None, Ranks(RANK, 1)) == 3
        pairs = list(zip(alone.parameters(), model.parameters(), strict=True))
        assert all(is_cut(p) for _, p in pairs)
        for complete, cut in pairs:
            assert torch.equal(part(cut), complete.chunk(2)[RANK])
            for name, value in theirs.state[complete].items():
                held = part(mine.state[cut][name])
                assert torch.equal(held, value.chunk(2)[RANK] if value.dim() else value)


def held(plan):
    """What this rank would write, after a step."""
    model = sharded_model(plan)
    optimizer = build_optimizer(plan, model)
    step(model, optimizer)
    return hold(model, optimizer)


def test_a_tied_weight_is_written_once() -> None:
    with among(2, RANK):
        found = held(sharded_plan(2, *SMALL, "model=tiny_gpt2"))
    assert found.notes["tied"] == {"lm_head.weight": "transformer.wte.weight"}
    assert "lm_head.weight" not in found.pieces
    assert found.pieces["transformer.wte.weight@exp_avg"].tensor.dim() == 2


def test_no_rank_holds_more_than_its_part() -> None:
    plan = sharded_plan(2, *SMALL)
    with among(2, RANK):
        pieces = held(plan).pieces
    numbers = sum(piece.tensor.numel() for piece in pieces.values())
    assert numbers == pytest.approx(1.5 * plan.size.num_parameters, rel=0.01)


def noted(plan, model):
    """What the record would say of a model, and the warnings."""
    optimizer = build_optimizer(plan, model)
    plain = PlainUpdate(plan, model, optimizer, None, list(model.parameters()))
    warnings: list[str] = []
    job = SimpleNamespace(
        plan=plan, bare_model=model, optimizer=optimizer, ranks=ALONE, effective={},
        update=ShardedUpdate(plain, model, Exchange.last), warn=warnings.append,
    )  # fmt: skip
    note_sharding(job)
    return job.effective["sharding"], warnings


def test_what_was_cut_is_noted() -> None:
    plan = sharded_plan(4, *SMALL)
    with among(4, 0):
        sharding, warnings = noted(plan, sharded_model(plan))
    assert sharding["mesh"] == [4]
    assert sharding["sharded_parameters"] == sharding["parameters"] == plan.size.num_parameters
    assert sharding["state_bytes_per_rank"][0]["weights"] == plan.size.num_parameters
    assert not warnings


def test_a_model_that_nobody_cut_is_warned_about() -> None:
    plan = sharded_plan(2, *SMALL)
    sharding, warnings = noted(plan, build_model(plan, CPU))
    assert (sharding["mesh"], sharding["sharded_parameters"]) == ([], 0)
    assert warnings == ["distributed=fsdp had no effect: every process holds all of every tensor"]
