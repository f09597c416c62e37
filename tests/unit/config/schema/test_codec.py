"""Configurations as plain values and back."""

import dataclasses
import json

import cattrs
import pytest
from unit.plan.cases import config_of

from eke.config.schema import VARIANTS, Compute, Config
from eke.config.schema.codec import make_converter


@pytest.mark.parametrize(
    ("group", "name", "cls"),
    [(g, n, c) for g, variants in VARIANTS.items() for n, c in variants.items()],
    ids=[f"{g}-{n}" for g, variants in VARIANTS.items() for n in variants],
)
def test_every_option_class_round_trips(group, name, cls) -> None:
    converter = make_converter()
    config = dataclasses.replace(config_of(), **{group: cls(option=name)})
    plain = json.loads(json.dumps(converter.unstructure(config)))
    assert set(plain[group]) == {field.name for field in dataclasses.fields(cls)}
    back = converter.structure(plain, Config)
    assert getattr(back, group) == getattr(config, group)


def test_enums_are_written_by_value() -> None:
    plain = make_converter().unstructure(config_of("precision=bf16"))
    assert plain["precision"]["compute"] == "bfloat16"
    assert make_converter().structure(plain, Config).precision.compute is Compute.bfloat16


CHANGES = {
    "unknown key": ("train", {"speed": 1}),
    "unknown variant": ("optimizer", {"option": "adamw"}),
    "another variant's key": ("optimizer", {"momentum": 0.9}),
    "wrong type": ("train", {"steps": "many"}),
    "unknown member": ("precision", {"compute": "float8"}),
    "no group": ("train", 3),
}


@pytest.mark.parametrize(("group", "change"), CHANGES.values(), ids=CHANGES.keys())
def test_invalid_plain_values_are_rejected(group, change) -> None:
    plain = make_converter().unstructure(config_of())
    exact = group == "optimizer" and set(change) == {"option"}
    plain[group] = change if exact or not isinstance(change, dict) else plain[group] | change
    with pytest.raises(cattrs.BaseValidationError):
        make_converter().structure(plain, Config)
