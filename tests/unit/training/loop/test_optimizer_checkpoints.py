"""Every optimizer: its checkpoint continues bit for bit, and a loss scaler can drive it."""

import pytest
import torch
from saved import load_checkpoint, save_checkpoint
from unit.plan.cases import SYNTHETIC, plan_of
from unit.training.model.test_optimizer import COMPILED, HERE

from eke.training.checkpoint import EXPORT
from eke.training.model.build_model import build_model
from eke.training.optimizer.build_optimizer import build_optimizer, evaluation_weights
from eke.training.optimizer.builders import restore_paged_state, seed_stochastic_rounding

SMALL = (
    *SYNTHETIC,
    "model.hidden_size=64",
    "model.num_hidden_layers=1",
    "model.intermediate_size=128",
    "model.num_attention_heads=2",
    "model.dropout=0.0",
)
"""Matrices of 4096 numbers and more, so that they are quantised; 1 layer."""

MORE = {"galore": ("optimizer.update_proj_gap=2",), "apollo": ("optimizer.update_proj_gap=2",)}
"""The projection changes before and after the checkpoint."""

ALL = [*HERE, *(pytest.param(option, marks=pytest.mark.slow) for option in sorted(COMPILED))]


def make(option, seed=0):
    plan = plan_of(*SMALL, f"optimizer={option}", *MORE.get(option, ()), f"seed={seed}")
    torch.manual_seed(seed)
    model = build_model(plan, torch.device("cpu"))
    if option == "adamw_bf16_sr":
        model.bfloat16()
    return model, build_optimizer(plan, model)


def train(model, optimizer, steps):
    """Losses of these steps; the batch is a function of the step's number."""
    losses = []
    for step in steps:
        ids = torch.randint(8, 264, (2, 8), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("option", ALL)
def test_saving_keeps_training_bit_exact(option, tmp_path) -> None:
    """From a file that is loaded with `weights_only`, whatever the state is made of."""
    whole = make(option)
    expected = train(*whole, range(5))
    model, optimizer = make(option)
    assert train(model, optimizer, range(3)) == expected[:3]
    path = save_checkpoint(tmp_path, 3, model, optimizer, None, keep=1)
    with evaluation_weights(optimizer):
        pass
    assert train(model, optimizer, range(3, 5)) == expected[3:]
    other, continued = make(option)  # the same run: its seed also rounds at random
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    assert load_checkpoint(path, other, continued, None) == 3
    assert train(other, continued, range(3, 5)) == expected[3:]
    for (name, a), b in zip(whole[0].named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("option", ALL)
def test_loss_scaler_skips_only_overflow_steps(option) -> None:
    model, optimizer = make(option)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for factor, moves in [(float("inf"), False), (1.0, True)]:
        before = [p.detach().clone() for p in model.parameters()]
        ids = torch.arange(8, 24).reshape(2, 8)
        scaler.scale(model(input_ids=ids, labels=ids).loss * factor).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        pairs = zip(before, model.parameters(), strict=True)
        assert any(not torch.equal(a, b) for a, b in pairs) is moves
    assert scaler.get_scale() == 4.0


def test_schedule_free_exports_averaged_weights(tmp_path) -> None:
    from eke.training.model.save_model import load_weights

    model, optimizer = make("schedule_free")
    train(model, optimizer, range(3))
    trained = [p.detach().clone() for p in model.parameters()]
    with evaluation_weights(optimizer) as kept:
        average = [p.detach().clone() for p in model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(kept, group_order(optimizer, trained, model)))  # noqa: B905  # same model
    assert not any(torch.equal(a, b) for a, b in zip(trained, average, strict=True) if a.dim() > 1)
    assert all(torch.equal(a, b) for a, b in zip(trained, model.parameters(), strict=True))
    path = save_checkpoint(tmp_path, 3, model, optimizer, None, keep=1)
    exported, _ = make("schedule_free", seed=1)
    load_weights(exported, path / EXPORT)
    assert all(torch.equal(a, b) for a, b in zip(average, exported.parameters(), strict=True))


def group_order(optimizer, values, model):
    """Values of the model's parameters, in the order of the optimizer's groups."""
    by_id = {id(p): value for p, value in zip(model.parameters(), values, strict=True)}
    return [by_id[id(p)] for group in optimizer.param_groups for p in group["params"]]


class Paging(torch.optim.SGD):
    """Has bitsandbytes' paged buffers, but for the GPU that they are moved to."""

    def get_state_buffer(self, parameter, dtype):
        buffer = torch.zeros_like(parameter, dtype=dtype)
        buffer.is_paged = True
        return buffer


def test_loaded_states_are_paged() -> None:
    large, small = (torch.nn.Parameter(torch.zeros(n)) for n in (100_000, 99_999))
    optimizer = Paging([large, small], lr=0.1)
    codes = torch.arange(100_000).to(torch.uint8)
    optimizer.state[large] = {"state1": codes, "step": 3}
    optimizer.state[small] = {"state1": codes[:-1]}
    restore_paged_state(optimizer)
    paged = optimizer.state[large]["state1"]
    assert paged.is_paged
    assert torch.equal(paged, codes)
    assert optimizer.state[small]["state1"] is not paged
    restore_paged_state(optimizer)
    assert optimizer.state[large]["state1"] is paged, "once is enough"


class Drawing(torch.optim.SGD):
    """Draws a random number in each step."""

    def step(self, closure=None):
        super().step(closure)
        for state in self.state.values():
            state["step"] = state.get("step", 0) + 1
        self.drawn = torch.rand(()).item()


def test_random_rounding_is_equal_on_ranks_and_differs_between_steps() -> None:
    """Ranks have different generators, for dropout; their weights have to stay the same."""
    draws, after = [], []
    for rank in range(2):
        p = nn_parameter()
        optimizer = Drawing([p], lr=0.1, momentum=0.9)
        seed_stochastic_rounding(optimizer, seed=3)
        torch.manual_seed(rank)
        mine = []
        for _ in range(3):
            p.grad = torch.ones_like(p)
            optimizer.step()
            mine.append(optimizer.drawn)
        draws.append(mine)
        after.append(torch.rand(()).item())
        torch.manual_seed(rank)
        assert torch.rand(()).item() == after[-1], "dropout draws as if nothing had been"
    assert draws[0] == draws[1]
    assert len(set(draws[0])) == 3


def nn_parameter():
    return torch.nn.Parameter(torch.ones(2, 2))
