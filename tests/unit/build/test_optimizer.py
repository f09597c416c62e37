"""Optimizers: what is decayed, which implementation, and which numbers reach it."""

import pytest
import torch
from torch import nn
from unit.build.plans import hand_plan, options_of
from unit.plan.cases import SYNTHETIC, plan_of
from unit.sizes.configs import TINY_CASES

from eke.build.model import build_model
from eke.build.optimizer import BUILDERS, build_optimizer, parameter_groups


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.norm = nn.LayerNorm(3)
        self.frozen = nn.Linear(3, 2)
        self.frozen.requires_grad_(False)


def built(*overrides):
    return build_optimizer(plan_of(*SYNTHETIC, *overrides), Small())


def test_options_are_builders() -> None:
    assert set(BUILDERS) == options_of("optimizer")


def test_vectors_are_not_decayed_and_frozen_weights_are_left_out() -> None:
    model = Small()
    decayed, rest = parameter_groups(model, 0.1)
    assert decayed["weight_decay"] == 0.1
    assert rest["weight_decay"] == 0.0
    assert [id(p) for p in decayed["params"]] == [id(model.linear.weight)]
    wanted = {id(model.linear.bias), id(model.norm.weight), id(model.norm.bias)}
    assert {id(p) for p in rest["params"]} == wanted


def test_an_empty_group_is_no_group() -> None:
    (group,) = parameter_groups(nn.Linear(2, 2, bias=False), 0.1)
    assert group["weight_decay"] == 0.1


@pytest.mark.parametrize(("model", "task"), TINY_CASES, ids=lambda value: value)
def test_every_parameter_of_a_model_is_in_one_group(model, task) -> None:
    network = build_model(hand_plan(f"model={model}", f"task={task}"), torch.device("meta"))
    groups = parameter_groups(network, 0.1)
    ids = [id(p) for group in groups for p in group["params"]]
    assert sorted(ids) == sorted({id(p) for p in network.parameters()})
    norms = [
        p for name, p in network.named_parameters() if "norm" in name.lower() or ".ln_" in name
    ]
    assert norms
    assert not {id(p) for p in norms} & {id(p) for p in groups[0]["params"]}


@pytest.mark.parametrize(
    ("option", "fused", "foreach"),
    [
        ("adamw", True, False),
        ("adamw_fused", True, False),
        ("adamw_foreach", False, True),
        ("adamw_forloop", False, False),
    ],
)
def test_implementations_of_adamw(option, fused, foreach) -> None:
    optimizer = built(f"optimizer={option}")
    assert isinstance(optimizer, torch.optim.AdamW)
    for group in optimizer.param_groups:
        assert (bool(group["fused"]), bool(group["foreach"])) == (fused, foreach)


def test_the_numbers_of_adamw_reach_it() -> None:
    numbers = {"lr": 0.5, "beta1": 0.7, "beta2": 0.8, "eps": 1e-3, "weight_decay": 0.25}
    optimizer = built("optimizer=adamw", *(f"optimizer.{k}={v}" for k, v in numbers.items()))
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (0.5, (0.7, 0.8), 1e-3)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.25, 0.0]


def test_the_numbers_of_adafactor_reach_it() -> None:
    optimizer = built(
        "optimizer=adafactor",
        "optimizer.lr=0.5",
        "optimizer.clip_threshold=2.0",
        "optimizer.decay_rate=-0.5",
        "optimizer.eps1=1e-20",
    )
    group = optimizer.param_groups[0]
    assert (group["lr"], group["clip_threshold"], group["decay_rate"]) == (0.5, 2.0, -0.5)
    assert group["eps"][0] == 1e-20
    assert not group["relative_step"]
    assert not group["scale_parameter"]


def test_the_numbers_of_sgd_reach_it() -> None:
    optimizer = built(
        "optimizer=sgd", "optimizer.lr=0.5", "optimizer.momentum=0.3", "optimizer.nesterov=true"
    )
    group = optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], group["nesterov"]) == (0.5, 0.3, True)


@pytest.mark.parametrize("option", sorted(BUILDERS))
def test_a_step_changes_every_trainable_parameter_and_no_other(option) -> None:
    torch.manual_seed(0)
    model = Small()
    optimizer = build_optimizer(plan_of(*SYNTHETIC, f"optimizer={option}"), model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.norm(model.linear(torch.randn(5, 4))).pow(3).sum().backward()
    optimizer.step()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if not name.startswith("frozen")}


@pytest.mark.parametrize(
    ("option", "per_parameter"),
    [("adamw", 8), ("adamw_forloop", 8), ("sgd", 4)],
)
def test_state_is_as_large_as_the_option_says(option, per_parameter) -> None:
    model = nn.Linear(64, 64, bias=False)
    optimizer = build_optimizer(plan_of(*SYNTHETIC, f"optimizer={option}"), model)
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    states = [t for s in optimizer.state.values() for t in s.values() if t is not None and t.dim()]
    assert sum(t.numel() * t.element_size() for t in states) == per_parameter * 64 * 64


def test_adafactor_keeps_rows_and_columns_only() -> None:
    model = nn.Linear(64, 32, bias=False)
    optimizer = build_optimizer(plan_of(*SYNTHETIC, "optimizer=adafactor"), model)
    model(torch.randn(2, 64)).pow(2).sum().backward()
    optimizer.step()
    (state,) = optimizer.state.values()
    numbers = sum(t.numel() for t in state.values() if isinstance(t, torch.Tensor) and t.dim())
    assert numbers == 64 + 32
