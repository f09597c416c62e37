"""`trainer.extra`: typed without `+`, checked against the installed transformers, all at once."""

import dataclasses
import subprocess
import sys

import pytest

from eke.common.errors import ConfigError
from eke.config.compose import compose
from eke.config.sweep import expand
from eke.rules.engine import OWNED, UNREAD, _is_one_of, read_arguments
from eke.workflows.planning import plan_for

BASE = ("engine=trainer", "tracker=none", "hardware=cpu", "data=synthetic")


def extra(*overrides: str) -> dict:
    return compose([*BASE, *overrides]).config.trainer.extra


def problems(*overrides: str):
    with pytest.raises(ConfigError) as caught:
        plan_for(compose([*BASE, *overrides]), planning=True)
    return caught.value.problems


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_trainer_argument_is_an_ordinary_key(prefix) -> None:
    assert extra(f"{prefix}trainer.extra.label_smoothing_factor=0.1") == {
        "label_smoothing_factor": 0.1
    }


def test_mappings_and_several_arguments_are_accepted() -> None:
    found = extra(
        "trainer.extra={neftune_noise_alpha:5,full_determinism:true}",
        "trainer.extra.accelerator_config={gradient_accumulation_kwargs:{sync_each_batch:true}}",
    )
    assert found == {
        "neftune_noise_alpha": 5,
        "full_determinism": True,
        "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
    }
    assert type(found["accelerator_config"]) is dict, "no OmegaConf behind the schema"


@pytest.mark.parametrize("problem", ["multi_label", "regression"])
def test_label_smoothing_needs_a_single_class(problem) -> None:
    typed = ("task=sequence_classification", f"task.problem={problem}")
    (problem,) = problems(*typed, "trainer.extra.label_smoothing_factor=0.1")
    assert problem.id == "trainer_argument"
    plan_for(compose([*BASE, *typed, "trainer.extra.label_smoothing_factor=0.0"]), planning=True)


def test_trainer_argument_can_be_swept() -> None:
    cells = expand(["engine=trainer", "trainer.extra.neftune_noise_alpha=5,10"]).cells
    assert [cell.overrides[1] for cell in cells] == [
        "trainer.extra.neftune_noise_alpha=5",
        "trainer.extra.neftune_noise_alpha=10",
    ]
    assert str(problems("trainer.extra.neftune_noise_alpha=5,10")[0].fix).startswith(
        "python train.py"
    )


def test_trainer_argument_changes_the_run_id() -> None:
    plans = [
        plan_for(compose([*BASE, *more]), planning=True)
        for more in ((), ("trainer.extra.full_determinism=true",))
    ]
    assert plans[0].run_id != plans[1].run_id


def test_all_invalid_trainer_arguments_are_reported_together() -> None:
    found = problems(
        "trainer.extra.label_smothing_factor=0.1",
        "trainer.extra.neftune_noise_alpha=loud",
        "trainer.extra.full_determinism=1",
        "trainer.extra.learning_rate=0.1",
        "trainer.extra.push_to_hub=true",
        "trainer.extra.ddp_bucket_cap_mb=5",
        "trainer.extra.xyzzyx=1",
    )
    assert {p.key.removeprefix("trainer.extra."): str(p.fix) for p in found} == {
        "label_smothing_factor": "trainer.extra.label_smoothing_factor=0.1",
        "neftune_noise_alpha": "trainer.extra.neftune_noise_alpha=null",
        "full_determinism": "trainer.extra.full_determinism=false",
        "learning_rate": "optimizer.lr=0.1",
        "push_to_hub": "remove it",
        "ddp_bucket_cap_mb": "distributed=ddp",
        "xyzzyx": "remove it",
    }


@pytest.mark.parametrize(
    "typed", ["~trainer.extra.debug", "trainer.extra.debug=", "trainer.extra=5"]
)
def test_invalid_trainer_value_is_rejected(typed) -> None:
    assert len(problems(typed)) == 1


def test_parsed_arguments_match_training_arguments() -> None:
    from transformers import TrainingArguments

    real = {f.name: f for f in dataclasses.fields(TrainingArguments) if f.init}
    assert set(read_arguments()) == set(real)
    for name in ("label_smoothing_factor", "neftune_noise_alpha", "full_determinism"):
        assert _is_one_of(read_arguments()[name][0], real[name].default)


def test_complex_argument_types_are_checked() -> None:
    found = read_arguments()
    assert found["debug"][0] == ("str", "list")
    assert found["accelerator_config"][0] == ("str", "dict", "None")
    assert found["save_strategy"][0] == ("str",)


def test_argument_tables_name_existing_arguments() -> None:
    """Older and newer transformers differ by a few, which have to be named here."""
    others = {"warmup_ratio", "group_by_length"}
    assert {*OWNED, *UNREAD} - set(read_arguments()) == others
    assert not set(OWNED) & set(UNREAD)


def test_keys_that_set_an_argument_exist() -> None:
    from eke.config.compose.catalogue import make_catalogue

    catalogue = make_catalogue()
    known = {*catalogue.keys, *catalogue.options}
    assert set(OWNED.values()) <= known


def test_check_does_not_import_transformers() -> None:
    code = (
        "import sys; from eke.rules.engine import read_arguments; read_arguments();"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
