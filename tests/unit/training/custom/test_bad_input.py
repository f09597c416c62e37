"""Own code that cannot train is refused with the fixing override."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from own_plans import chars, on_path, own_plan
from torch import nn
from torch.utils.data import default_collate

from eke.common.errors import RunError
from eke.config import schema
from eke.config.parts import Part
from eke.training.batches.batches import MicroBatch
from eke.training.custom.build import build_own_model, build_own_schedule
from eke.training.custom.outputs import ForwardArguments, OwnLoss, build_count, logits_of
from eke.training.custom.samples import OwnCollator, OwnSamples, call_data, open_own
from eke.training.model.checkpointing import find_layers
from eke.training.optimizer.builders import custom

on_path()

CPU = torch.device("cpu")


def batch(**values: Any) -> MicroBatch:
    return MicroBatch(values, None, 2, 2, 0)


class Takes(nn.Module):
    def forward(self, x, mask=None, *, y=None):
        return x


class TakesAll(nn.Module):
    def forward(self, x, **rest):
        return x


def test_forward_receives_the_keys_of_its_signature() -> None:
    x = torch.zeros(2)
    given = ForwardArguments(Takes(), {})(batch(x=x, y=x + 1, z=x))
    assert set(given) == {"x", "y"}
    given = ForwardArguments(Takes(), {"x": "ids", "y": "z"})(batch(ids=x, z=x + 1))
    assert torch.equal(given["y"], x + 1)
    in_order = ForwardArguments(Takes(), {})(batch(**{"0": x, "1": x + 1}))
    assert torch.equal(in_order["mask"], x + 1)
    every = ForwardArguments(TakesAll(), {"x": "ids"})(batch(ids=x, z=x))
    assert set(every) == {"x", "z"}


def test_missing_keys_are_named_with_a_fix() -> None:
    with pytest.raises(RunError, match=r"-> model\.inputs\.x=ids"):
        ForwardArguments(Takes(), {})(batch(ids=torch.zeros(2)))
    with pytest.raises(RunError, match=r"model\.inputs\.y = w"):
        ForwardArguments(Takes(), {"y": "w"})(batch(x=torch.zeros(2)))
    with pytest.raises(RunError, match=r"model\.inputs\.w"):
        ForwardArguments(Takes(), {"w": "x"})


def plan_with(**groups: Any) -> Any:
    return SimpleNamespace(config=replace(schema.Config(), **groups))


def own_loss() -> OwnLoss:
    return OwnLoss(plan_with(data=schema.CustomData(target="chars.data.Rows")), Takes())


ONE = torch.ones((), requires_grad=True)


@pytest.mark.parametrize(
    "output",
    [ONE * 1, {"loss": ONE, "scores": torch.zeros(2, 2)}, SimpleNamespace(loss=ONE),
     (torch.zeros(2, 3), ONE), (ONE, None)],
)  # fmt: skip
def test_the_loss_of_an_output(output) -> None:
    assert own_loss().sum_of(output, batch()).item() == 2


@pytest.mark.parametrize(
    "output",
    [torch.zeros(2, 3), (ONE, ONE * 2), {"scores": torch.zeros(2)}, (torch.zeros(2), None),
     {"loss": torch.ones(2, requires_grad=True)}, {"loss": torch.ones(())}, {"loss": 1.0}],
)  # fmt: skip
def test_no_loss_or_two_are_refused(output) -> None:
    with pytest.raises(RunError, match="loss = auto"):
        own_loss().sum_of(output, batch())


def test_a_micro_batch_without_targets_adds_nothing() -> None:
    logits = torch.ones(2, 3, requires_grad=True)
    empty = MicroBatch({}, None, 0, 0, 0)
    own_loss().sum_of((logits, logits.sum() * float("nan")), empty).backward()
    assert torch.equal(logits.grad, torch.zeros(2, 3))


def test_logits_of_outputs() -> None:
    logits = torch.zeros(2, 3)
    for output in (logits, {"logits": logits}, SimpleNamespace(logits=logits), (logits, None)):
        assert logits_of(output) is logits
    with pytest.raises(RunError):
        logits_of({"scores": logits})


def collator(names: tuple[str, ...] = (), function: Any = default_collate) -> OwnCollator:
    return OwnCollator(Part("data", "m:Rows", {}), function, names, lambda _, rows: rows)


def samples(*values: Any) -> list[Any]:
    import numpy as np

    own = OwnSamples(list(values), np.arange(len(values)), (0, 0))
    return own.__getitems__([(0, number) for number in range(len(values))])


def test_batches_of_tuples_mappings_and_tensors() -> None:
    pair = (torch.zeros(3), 1)
    made = collator(("x", "y"))(samples(pair, pair))
    assert set(made.inputs) == {"x", "y"}
    assert made.num_samples == 2
    assert set(collator()(samples(pair, pair)).inputs) == {"0", "1"}
    assert set(collator()(samples({"a": 1, "b": "text"})).inputs) == {"a", "b"}
    assert set(collator()(samples(torch.zeros(2))).inputs) == {"0"}


@pytest.mark.parametrize(
    ("values", "names", "function"),
    [
        (((torch.zeros(3), 1), (torch.zeros(2), 1)), (), default_collate),
        (((torch.zeros(3), 1),), ("x",), default_collate),
        (((torch.zeros(3),),), (), lambda each: {"x": torch.zeros(2), "y": torch.zeros(3)}),
        (((torch.zeros(3),),), (), lambda each: {"x": torch.zeros(())}),
        ((object(),), (), default_collate),
    ],
)
def test_bad_samples_are_refused(values, names, function) -> None:
    with pytest.raises(RunError, match=r"data\."):
        collator(names, function)(samples(*values))


@pytest.mark.parametrize(
    "target", ["pairs.data.Stream", "shapes.parts.loader", "shapes.parts.nothing"]
)
def test_data_without_samples_by_index_is_refused(target, make_plan) -> None:
    groups = {**chars(), "data": schema.CustomData(target=target)}
    with pytest.raises(RunError, match=r"data\.target"):
        open_own(own_plan(make_plan, "batch.per_device=4", **groups))


def test_evaluation_has_its_own_arguments(make_plan) -> None:
    data = schema.CustomData(
        target="shapes.data.Images", args={"count": 30}, eval_args={"count": 8, "root": "test"}
    )
    plan = own_plan(make_plan, "batch.per_device=4", **{**chars(), "data": data})
    part = Part("data", "shapes.data:Images", data.args)
    train, evaluation = (call_data(plan, part, each)[0] for each in (False, True))
    assert (len(train), len(evaluation), evaluation.offset) == (30, 8, 1000)


@pytest.mark.parametrize(
    ("target", "layers"),
    [("shapes.parts.falling", None), ("torch.nn.GELU", None), ("chars.model.Decoder", ["Layer"])],
)
def test_bad_models_are_refused(target, layers, make_plan) -> None:
    groups = chars()
    plan = own_plan(make_plan, "batch.per_device=4", **groups)
    args = {
        "chars.model.Decoder": {"config": {}},
        "shapes.parts.falling": {"step": 1, "total_steps": 2},
    }
    plan.config.model = schema.CustomModel(target=target, args=args.get(target, {}), layers=layers)
    with pytest.raises(RunError, match=r"model\."):
        build_own_model(plan, CPU)


def test_models_on_meta_keep_ties_and_layers(make_plan) -> None:
    plan = own_plan(make_plan, "batch.per_device=4", **chars())
    model = build_own_model(plan, torch.device("meta"))
    assert model.head.weight is model.table.weight
    assert model.head.weight.is_meta
    assert [type(layer).__name__ for layer in find_layers(model)] == ["Block", "Block"]
    plan.config.model.layers = ["Linear"]
    assert len(find_layers(build_own_model(plan, CPU))) == 9


def test_stateful_schedules_are_refused(make_plan) -> None:
    target = "torch.optim.lr_scheduler.CosineAnnealingLR"
    plan = own_plan(make_plan, **chars(), schedule=schema.CustomSchedule(target=target))
    with pytest.raises(RunError, match=r"schedule\.target"):
        build_own_schedule(plan)
    plan = own_plan(make_plan, **chars(), optimizer=schema.CustomOptimizer(target="builtins.dict"))
    with pytest.raises(RunError, match=r"optimizer\.target"):
        custom(plan, [])


def test_the_divisor_of_a_mean() -> None:
    def count(per: str | None) -> Any:
        return build_count(plan_with(loss=schema.LossGroup(per=per)))

    values = {"y": torch.tensor([[0, 3, -1], [-1, -100, 2]])}
    assert count(None)(values, 2) == count("samples")(values, 2) == 2
    assert count("y")(values, 2) == 3
    assert count("shapes.parts.count_all")(values, 2) == 6
    with pytest.raises(RunError, match=r"loss\.per = z"):
        count("z")(values, 2)
