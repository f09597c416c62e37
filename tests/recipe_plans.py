"""What tests of recipes share: plans for declared devices, and what a plan says a recipe chose."""

import pytest

from eke.config.compose import compose
from eke.plan.planner import Decision, Plan, RecipeDecision
from eke.rules import requirements
from eke.workflows.planning import plan_for

BERT = ("model=bert_large", "task=sequence_classification", "data=synthetic", "data.seq_len=512")
LLAMA = ("model=llama_1b", "data=synthetic", "data.seq_len=2048")
SEVEN = ("model=llama2_7b", "data=synthetic", "data.seq_len=1024")
LONG = "train.steps=100000"


def planned(*overrides: str) -> Plan:
    """`eke plan`."""
    return plan_for(compose([*overrides, "tracker=none"], in_sweep=True), planning=True)


def said(plan: Plan, key: str) -> Decision:
    """The one decision about a key."""
    (found,) = [decision for decision in plan.decisions if decision.key == key]
    return found


def chosen(plan: Plan) -> dict[str, str]:
    """What a recipe has a word about: key -> value."""
    return {d.key: d.value for d in plan.decisions if isinstance(d, RecipeDecision)}


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch):
    """`packages("torchao")`: an environment that has these alone."""

    def has(*names: str) -> None:
        monkeypatch.setattr(requirements, "_is_importable", lambda name: name in names)

    return has


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch):
    """`units("amx_bf16")`: a CPU that has these units alone."""

    def has(*names: str) -> None:
        monkeypatch.setattr("eke.workflows.auto_batch.bfloat16_units", lambda: names)

    return has
