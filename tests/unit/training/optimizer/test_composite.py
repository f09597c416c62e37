"""A composite is one optimizer to whoever has it."""

import copy
import io

import pytest
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


def test_it_steps_as_its_parts_alone_would() -> None:
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


def test_a_checkpoint_continues_bit_for_bit() -> None:
    model, optimizer = make()
    train(model, optimizer, 2)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    train(model, optimizer, 2)
    file.seek(0)
    weights, states = torch.load(file, weights_only=True)
    assert set(states["state"]) == {0, 1, 2, 3}, "numbered through all parts, as torch does"
    other, continued = make(seed=1)
    other.load_state_dict(weights)
    continued.load_state_dict(states)
    train(other, continued, 2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))  # noqa: B905  # same model


def test_rates_and_states_are_the_parts_own_after_loading_too() -> None:
    model, optimizer = make()
    train(model, optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    assert [part.param_groups[0]["lr"] for part in optimizer.parts] == [0.5, 0.5]
    assert all(part.state is optimizer.state for part in optimizer.parts)


@pytest.mark.parametrize("scale", [2.0, float("inf")], ids=["finite", "overflow"])
def test_a_loss_scaler_steps_or_skips_all_parts(scale) -> None:
    model, optimizer = make()
    before = [p.detach().clone() for p in model.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(model(torch.ones(1, 4)).sum() * (scale / 2)).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert all(changed) if scale == 2.0 else not any(changed)


def test_a_closure_is_evaluated_once() -> None:
    model, optimizer = make()
    calls = []

    def closure():
        calls.append(1)
        loss = model(torch.ones(1, 4)).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) is not None
    assert calls == [1]
