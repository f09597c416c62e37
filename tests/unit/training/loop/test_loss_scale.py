"""The loss scale against torch's own GradScaler."""

import pytest
import torch

from eke.training.loop.meter import GROWTH_INTERVAL, LossScale


@pytest.mark.parametrize("overflows", [[], [0], [1, 2], [5]], ids=str)
def test_loss_scale_changes_like_gradscaler(overflows) -> None:
    mine, parameter = LossScale(), torch.nn.Parameter(torch.ones(1))
    theirs = torch.amp.GradScaler("cpu", growth_interval=GROWTH_INTERVAL)
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for step in range(8):
        factor = torch.inf if step in overflows else 1.0
        theirs.scale((parameter * factor).sum()).backward()
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        mine.update(overflowed=step in overflows)
        assert mine.value == theirs.get_scale()


def test_loss_scale_grows_after_an_interval() -> None:
    scale = LossScale(value=4.0, good_steps=GROWTH_INTERVAL - 1)
    scale.update(overflowed=False)
    assert (scale.value, scale.good_steps) == (8.0, 0)


def test_loss_scale_is_saved() -> None:
    scale, other = LossScale(value=2.0, good_steps=7), LossScale()
    other.load_state_dict(scale.state_dict())
    assert other == scale
