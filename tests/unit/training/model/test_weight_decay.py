"""Weight decay is decoupled (Loshchilov and Hutter 2017, arXiv:1711.05101), by steps done by hand.

Each formula keeps the weight and its states apart from the decay, as the key's text says; GaLore
and APOLLO decay after the update, Schedule-Free decays at the weights that gradients are taken at.
"""

from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from unit.plan.cases import SYNTHETIC, plan_of

from eke.training.optimizer.build_optimizer import build_optimizer
from eke.training.optimizer.builders import projected_parameters
from eke.training.optimizer.update import InBackwardUpdate

RATE, DECAY, STEPS = 0.01, 0.5, 4
SHRUNK = 1 - RATE * DECAY
Update = Callable[[Tensor, list[Tensor]], Tensor]


class Layer(GradientCheckpointingLayer):
    """A Transformer layer of one matrix, which Muon, GaLore and APOLLO treat as theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 32) / 10)


def make(*typed: str, decay: float = DECAY) -> tuple[Layer, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Layer()
    own = (f"optimizer.lr={RATE}", f"optimizer.weight_decay={decay}", *typed)
    return model, build_optimizer(plan_of(*SYNTHETIC, *own), model)


def gradients() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 32, generator=generator) for _ in range(STEPS)]


def walked(*typed: str, decay: float = DECAY) -> list[Tensor]:
    """The matrix before and after each step; gradients do not depend on it."""
    model, optimizer = make(*typed, decay=decay)
    found = [model.weight.detach().clone()]
    for gradient in gradients():
        model.weight.grad = gradient.clone()
        optimizer.step()
        found.append(model.weight.detach().clone())
    assert bool(projected_parameters(optimizer)) is any("optimizer.rank" in each for each in typed)
    return found


def adamw(weight: Tensor, grads: list[Tensor]) -> Tensor:
    first = second = torch.zeros_like(weight)
    for n, grad in enumerate(grads, 1):
        first = 0.9 * first + 0.1 * grad
        second = 0.999 * second + 0.001 * grad**2
        step = first / (1 - 0.9**n) / ((second / (1 - 0.999**n)).sqrt() + 1e-8)
        weight = SHRUNK * weight - RATE * step
    return weight


def adafactor(weight: Tensor, grads: list[Tensor]) -> Tensor:
    rows, columns = torch.zeros(16, 1), torch.zeros(1, 32)
    for n, grad in enumerate(grads, 1):
        kept = 1 - n**-0.8
        rows = kept * rows + (1 - kept) * grad.square().mean(1, keepdim=True)
        columns = kept * columns + (1 - kept) * grad.square().mean(0, keepdim=True)
        step = grad / (rows * columns / rows.mean()).sqrt()
        step = step / step.square().mean().sqrt().clamp(min=1)
        weight = SHRUNK * weight - RATE * step
    return weight


def lion(weight: Tensor, grads: list[Tensor]) -> Tensor:
    momentum = torch.zeros_like(weight)
    for grad in grads:
        weight = SHRUNK * weight - RATE * (0.9 * momentum + 0.1 * grad).sign()
        momentum = 0.99 * momentum + 0.01 * grad
    return weight


def sgd(momentum: float, nesterov: bool = False) -> Update:
    def walk(weight: Tensor, grads: list[Tensor]) -> Tensor:
        sums = torch.zeros_like(weight)
        for grad in grads:
            sums = momentum * sums + grad
            step = grad + momentum * sums if nesterov else sums
            weight = SHRUNK * weight - RATE * step
        return weight

    return walk


def schedule_free(weight: Tensor, grads: list[Tensor]) -> Tensor:
    trained = average = weight
    second, sums = torch.zeros_like(weight), 0.0
    for n, grad in enumerate(grads, 1):
        second = 0.999 * second + 0.001 * grad**2
        step = grad / ((second / (1 - 0.999**n)).sqrt() + 1e-8) + DECAY * weight
        trained = trained - RATE * step
        sums += RATE**2
        average = average + RATE**2 / sums * (trained - average)
        weight = 0.1 * trained + 0.9 * average
    return weight


BY_HAND: dict[tuple[str, ...], Update] = {
    ("optimizer=adamw",): adamw,
    ("optimizer=adamw_fused",): adamw,
    ("optimizer=adamw_foreach",): adamw,
    ("optimizer=adamw_forloop",): adamw,
    ("optimizer=adafactor",): adafactor,
    ("optimizer=lion", "optimizer.beta2=0.99"): lion,
    ("optimizer=sgd", "optimizer.momentum=0"): sgd(0.0),
    ("optimizer=sgd",): sgd(0.9),
    ("optimizer=sgd", "optimizer.nesterov=true"): sgd(0.9, nesterov=True),
    ("optimizer=schedule_free", "schedule=constant"): schedule_free,
}


@pytest.mark.parametrize(("typed", "update"), BY_HAND.items(), ids=map(" ".join, BY_HAND))
def test_steps_are_those_done_by_hand(typed, update) -> None:
    found = walked(*typed)
    torch.testing.assert_close(found[-1], update(found[0], gradients()), rtol=0, atol=1e-6)


@pytest.mark.parametrize("option", ["muon", "galore", "apollo"])
def test_what_is_projected_is_not_what_is_decayed(option) -> None:
    """The moves are those without decay; GaLore and APOLLO decay what has moved already."""
    more = () if option == "muon" else ("optimizer.rank=4",)
    plain = walked(f"optimizer={option}", *more, decay=0.0)
    weight = plain[0]
    for before, after in pairwise(plain):
        move = after - before
        weight = SHRUNK * weight + move if option == "muon" else SHRUNK * (weight + move)
    found = walked(f"optimizer={option}", *more)[-1]
    torch.testing.assert_close(found, weight, rtol=0, atol=1e-6)
    assert (found - plain[-1]).abs().max() > 1e-3


def test_sgd_within_the_backward_pass_decays_each_weight_once() -> None:
    """There the optimizer's groups are narrowed to one weight before each step."""
    model, optimizer = make("optimizer=sgd")
    start = model.weight.detach().clone()
    InBackwardUpdate(optimizer, [model.weight], knows_norm=False)
    for gradient in gradients():
        (model.weight * gradient).sum().backward()
    expected = sgd(0.9)(start, gradients())
    torch.testing.assert_close(model.weight.detach(), expected, rtol=0, atol=1e-6)


def test_sgd_decays_what_stands_in_its_groups_at_the_step() -> None:
    """DeepSpeed replaces the weights of each group by flat pieces after the optimizer was made."""
    model, optimizer = make("optimizer=sgd")
    start = model.weight.detach().clone()
    piece = nn.Parameter(start.flatten().clone())
    optimizer.param_groups[0]["params"] = [piece]
    for gradient in gradients():
        piece.grad = gradient.flatten()
        optimizer.step()
    expected = sgd(0.9)(start, gradients()).flatten()
    torch.testing.assert_close(piece.detach(), expected, rtol=0, atol=1e-6)
    assert torch.equal(model.weight.detach(), start)


def test_the_decay_of_sgd_is_in_its_saved_state() -> None:
    """A restored optimizer that was made without decay takes the step of the saved one."""
    model, optimizer = make("optimizer=sgd")
    other, restored = make("optimizer=sgd", decay=0.0)
    first, *others = gradients()
    model.weight.grad = first
    optimizer.step()
    other.load_state_dict(model.state_dict())
    restored.load_state_dict(deepcopy(optimizer.state_dict()))
    for each, its in ((model, optimizer), (other, restored)):
        each.weight.grad = others[0]
        its.step()
    assert torch.equal(model.weight, other.weight)
