"""Weight decay is decoupled (Loshchilov and Hutter 2017, arXiv:1711.05101).

A weight shrinks by rate x decay in each step, and what moves it besides is the same without decay.
GaLore and APOLLO decay what has moved already. (Schedule-Free trains an average of what it decays.)
"""

from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from unit.plan.cases import SYNTHETIC, plan_of
from unit.training.model.test_optimizer import HERE

from eke.training.optimizer.build_optimizer import build_optimizer
from eke.training.optimizer.builders import projected_parameters
from eke.training.optimizer.update import InBackwardUpdate

PROJECTED = {"galore", "apollo"}
RATE, DECAY, STEPS = 0.01, 0.5, 4
SHRUNK = 1 - RATE * DECAY


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


def sgd(weight: Tensor, grads: list[Tensor]) -> Tensor:
    momentum = torch.zeros_like(weight)
    for grad in grads:
        momentum = 0.9 * momentum + grad
        weight = SHRUNK * weight - RATE * momentum
    return weight


DECOUPLED = [
    *((f"optimizer={option}",) for option in sorted(set(HERE) - PROJECTED - {"schedule_free"})),
    ("optimizer=sgd", "optimizer.momentum=0"),
    ("optimizer=sgd", "optimizer.nesterov=true"),
    *((f"optimizer={option}", "optimizer.rank=4") for option in sorted(PROJECTED)),
]


@pytest.mark.parametrize("typed", DECOUPLED, ids=" ".join)
def test_weight_decay_is_decoupled(typed) -> None:
    late = "optimizer.rank=4" in typed
    plain = walked(*typed, decay=0.0)
    weight = plain[0]
    for before, after in pairwise(plain):
        move = after - before
        weight = SHRUNK * (weight + move) if late else SHRUNK * weight + move
    found = walked(*typed)[-1]
    torch.testing.assert_close(found, weight, rtol=0, atol=2e-4)
    assert (found - plain[-1]).abs().max() > 1e-3


def test_sgd_in_backward_decays_each_weight_once() -> None:
    """There the optimizer's groups are narrowed to one weight before each step."""
    model, optimizer = make("optimizer=sgd")
    start = model.weight.detach().clone()
    InBackwardUpdate(optimizer, [model.weight], knows_norm=False)
    for gradient in gradients():
        (model.weight * gradient).sum().backward()
    expected = sgd(start, gradients())
    torch.testing.assert_close(model.weight.detach(), expected, rtol=0, atol=1e-6)


def test_sgd_decays_the_current_weights_of_its_groups() -> None:
    """DeepSpeed replaces the weights of each group by flat pieces after the optimizer was made."""
    model, optimizer = make("optimizer=sgd")
    start = model.weight.detach().clone()
    piece = nn.Parameter(start.flatten().clone())
    optimizer.param_groups[0]["params"] = [piece]
    for gradient in gradients():
        piece.grad = gradient.flatten()
        optimizer.step()
    expected = sgd(start, gradients()).flatten()
    torch.testing.assert_close(piece.detach(), expected, rtol=0, atol=1e-6)
    assert torch.equal(model.weight.detach(), start)


def test_sgd_state_dict_holds_weight_decay() -> None:
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
