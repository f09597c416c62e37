"""Why rules refuse techniques for models of transformers on code of the user's own."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate
from transformers import PreTrainedModel, Trainer, TrainingArguments
from unit.rules.devices import BY_NAME

from eke.config.compose import compose
from eke.config.schema import Config, CustomModel
from eke.models.families import family_of
from eke.models.sizes import adapted_layers
from eke.rules import RuleInputs, check
from eke.workflows.planning import with_own_task

MODEL = ("model=custom", "model.target=net.Net")
DATA = ("data=custom", "data.target=net.Rows")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.out(image)


def filled(*overrides: str) -> Config:
    """The configuration as it is once the model was measured."""
    config = with_own_task(compose(list(overrides)))[0].config
    assert isinstance(config.model, CustomModel)
    model = replace(config.model, shapes=[[3, 4], [3]], num_parameters=15, num_hidden_layers=1)
    return replace(config, model=model)


def test_own_model_has_no_layers_to_adapt() -> None:
    assert not adapted_layers(filled(*MODEL, "peft=lora"))


def test_no_kernels_replace_modules_of_own_models() -> None:
    assert not family_of(filled(*MODEL)).has_liger


def test_only_models_of_transformers_choose_attention() -> None:
    assert hasattr(PreTrainedModel, "set_attn_implementation")
    assert not hasattr(Net(), "set_attn_implementation")


def test_trainer_needs_a_loss_in_the_output(tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    net = Net()
    loss = Trainer(net, arguments).compute_loss(net, {"image": torch.ones(2, 4)})
    assert loss.shape == (3,), "it takes the first row of the output for the loss"


def test_collated_samples_of_own_data_have_no_length() -> None:
    batch = default_collate([{"image": torch.ones(4)}, {"image": torch.zeros(4)}])
    assert set(batch) == {"image"}


SILENT = [
    (), ("precision=bf16",), ("precision=fp8", "compile=inductor"), ("optimizer=muon",),
    ("optimizer=galore",), ("memory=checkpointing",), ("compile=inductor", "compile.regional=true"),
    ("data=synthetic",), DATA, (*DATA, "task=custom"), ("loss=custom", "loss.target=net.f"),
    ("optimizer=custom", "optimizer.target=net.Opt", "schedule=custom", "schedule.target=net.f"),
    ("train.keep_best=acc/top1", "train.eval_every=5", "metrics.acc.target=net.Acc"),
]  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "h200"])
@pytest.mark.parametrize("overrides", SILENT, ids=" ".join)
def test_rules_about_sizes_are_silent_for_own_models(overrides, device: str) -> None:
    config = filled(*MODEL, *overrides, "tracker=none")
    refused, warned = check(RuleInputs(config, BY_NAME[device], planning=True))
    usual = {"float8_is_emulated"}
    assert [p.id for p in refused] == []
    assert [p.id for p in warned if p.id not in usual] == []


def test_own_data_choose_the_own_task_unless_one_is_set() -> None:
    composed, (decision,) = with_own_task(compose([*MODEL, *DATA]))
    assert composed.config.task.option == composed.choices["task"] == "custom"
    assert (decision.key, decision.value) == ("task", "custom")
    typed = compose([*MODEL, *DATA, "task=causal_lm"])
    assert with_own_task(typed) == (typed, ())
    eke = compose([*MODEL, "data=synthetic"])
    assert with_own_task(eke) == (eke, ())
    explicit = compose([*MODEL, *DATA, "task=custom"])
    assert with_own_task(explicit)[0].config == composed.config


def test_metric_of_your_own_is_a_metric_for_keep_best() -> None:
    config = filled(*MODEL, *DATA, "train.keep_best=f1", "train.eval_every=5")
    refused, _ = check(RuleInputs(config, BY_NAME["cpu"], planning=True))
    assert [p.id for p in refused] == ["keep_best_is_a_metric"]
    assert [p.fix.words for p in refused] == [("train.keep_best=loss",)]
