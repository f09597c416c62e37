"""A composite is one optimizer to whoever has it."""

import copy

import torch
from torch import nn

from eke.training.optimizer.builders import Composite


def make(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    first = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    second = torch.optim.AdamW(model[1].parameters(), lr=0.01, fused=True)
    return model, Composite([first, second])


def train(model, optimizer, steps):
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(5, 4, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_composite_steps_like_its_parts() -> None:
    model, optimizer = make()
    other, composite = copy.deepcopy(model), optimizer
    train(model, composite, 3)
    alone = [
        torch.optim.SGD(other[0].parameters(), lr=0.1, momentum=0.9),
        torch.optim.AdamW(other[1].parameters(), lr=0.01, fused=True),
    ]
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        other(torch.randn(5, 4, generator=generator)).square().sum().backward()
        for part in alone:
            part.step()
            part.zero_grad()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.grad is None


def test_composite_shares_rates_and_states_with_its_parts() -> None:
    model, optimizer = make()
    train(model, optimizer, 1)
    saved = optimizer.state_dict()
    assert set(saved["state"]) == {0, 1, 2, 3}, "numbered through all parts, as torch does"
    optimizer.load_state_dict(saved)
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    assert [part.param_groups[0]["lr"] for part in optimizer.parts] == [0.5, 0.5]
    assert all(part.state is optimizer.state for part in optimizer.parts)
