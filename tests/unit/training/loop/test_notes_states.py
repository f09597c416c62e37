"""What a run says of its optimizer is read from it: another one in its place shows."""

from functools import cache
from types import SimpleNamespace

import pytest
import torch
from unit.plan.cases import SYNTHETIC, plan_of
from unit.training.model.test_optimizer import HERE

from eke.models.sizes import OPTIMIZER_REGISTRY, state_bytes
from eke.training.model.build_model import build_model
from eke.training.observe.observe_run import note_states
from eke.training.optimizer import builders
from eke.training.optimizer.build_optimizer import build_optimizer


def replace_builder(monkeypatch, option: str, build) -> None:
    monkeypatch.setattr(builders, OPTIMIZER_REGISTRY[option].builder.partition(":")[2], build)


@cache
def shared_model():
    """One for all optimizers: it does not matter which steps have changed its weights."""
    return build_model(plan_of(*SYNTHETIC), torch.device("cpu"))


def noted(*overrides):
    """What the note says after a step, and its warnings."""
    plan, model = plan_of(*SYNTHETIC, *overrides), shared_model()
    optimizer = build_optimizer(plan, model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    warnings: list[str] = []
    job = SimpleNamespace(
        plan=plan, optimizer=optimizer, parameters=list(model.parameters()), effective={},
        warn=warnings.append,
    )  # fmt: skip
    note_states(job)
    return job.effective, warnings, plan


EXPECTED = {
    "adamw": ("AdamW", "torch"),
    "adamw_foreach": ("AdamW", "torch"),
    "adamw_8bit": ("AdamW8bit", "bitsandbytes"),
    "lion": ("Lion", "bitsandbytes"),
    "lion_8bit": ("Lion8bit", "bitsandbytes"),
    "muon": ("Muon+AdamW", "torch"),
    "schedule_free": ("AdamWScheduleFree", "schedulefree"),
    "galore": ("AdamW", "galore_torch"),
    "apollo": ("AdamW", "apollo_torch"),
    "adafactor": ("Adafactor", "transformers"),
    "sgd": ("SGD", "torch"),
}


@pytest.mark.parametrize("option", EXPECTED)
def test_optimizer_name_and_bytes_match_the_prediction(option) -> None:
    found, warnings, plan = noted(f"optimizer={option}")
    assert (found["optimizer"], found["optimizer_library"]) == EXPECTED[option]
    assert found["optimizer_state_bytes"] == state_bytes(plan.config).optimizer
    assert sum(found["optimizer_parameters"]) == plan.size.num_parameters
    assert warnings == []


@pytest.mark.parametrize("option", sorted({*HERE, "adamw_bf16_sr"} - set(EXPECTED)))
def test_optimizer_without_effect_is_reported(option, monkeypatch) -> None:
    replace_builder(monkeypatch, "adamw_bf16_sr", builders.adamw)
    _, warnings, _ = noted(f"optimizer={option}")
    without_effect = {"paged_adamw_8bit", "adamw_bf16_sr"}
    assert len(warnings) == (option in without_effect)


@pytest.mark.parametrize("option", sorted(set(OPTIMIZER_REGISTRY) - {"paged_adamw_8bit", "custom"}))
def test_different_optimizer_is_warned_about(option, monkeypatch) -> None:
    def other(plan, groups):
        kind = torch.optim.AdamW if option == "sgd" else torch.optim.SGD
        return kind(groups, lr=0.1)

    replace_builder(monkeypatch, option, other)
    _, warnings, _ = noted(f"optimizer={option}")
    assert len(warnings) == 1, warnings
    assert warnings[0].startswith(f"optimizer={option} ")


@pytest.mark.parametrize("option", ["adamw_forloop", "adamw_foreach", "adamw_fused"])
def test_different_optimizer_implementation_is_warned_about(option, monkeypatch) -> None:
    other = {"foreach": True} if option == "adamw_fused" else {"fused": True}
    replace_builder(monkeypatch, option, lambda _, groups: torch.optim.AdamW(groups, **other))
    found, warnings, _ = noted(f"optimizer={option}")
    (built,) = other
    assert found["optimizer_implementation"] == built
    (warning,) = warnings
    assert warning.startswith(f"optimizer={option} ")
    assert warning.endswith(f" {built}")


def test_optimizer_fractions_match_real_tensors() -> None:
    found, _, plan = noted("optimizer=adamw_8bit")
    embedding = plan.config.model.vocab_size * plan.config.model.hidden_size
    vectors = 128 * (2 * 4 + 1)
    quantised = plan.size.num_parameters - embedding - vectors
    assert found["optimizer_quantised_frac"] == pytest.approx(quantised / plan.size.num_parameters)
    projected, _, _ = noted("optimizer=galore")
    assert projected["optimizer_projected_frac"] == found["optimizer_quantised_frac"]
