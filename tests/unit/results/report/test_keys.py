"""Classes of keys: what another value may change."""

import dataclasses

import pytest
from unit.results.report.made import Run, make_sweep

from eke.config.schema import VARIANTS, Config
from eke.config.schema.fields import Affects
from eke.plan.identity import PRESENTATION
from eke.results.report.compare.load_records import affects, gather
from eke.results.report.compare.variants import group, training_key
from eke.rules.techniques import TECHNIQUES, Numerics


def schema_fields():
    """Group or key -> field; presentation changes no result, so its groups stand for their keys."""
    for each in dataclasses.fields(Config):
        yield each.name, each
        if each.name in PRESENTATION:
            continue
        for cls in {each.default_factory, *VARIANTS.get(each.name, {}).values()}:
            for key in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
                if key.name != "option":  # its group has the class
                    yield f"{each.name}.{key.name}", key


def test_each_key_has_exactly_one_class():
    found = {}
    for path, key in schema_fields():
        assert isinstance(key.metadata.get("affects"), Affects), path
        same = key.metadata["affects"], "is_off_at_zero" in key.metadata
        found.setdefault(path, set()).add(same)
    assert not {path: classes for path, classes in found.items() if len(classes) > 1}


def test_presentation_keys_have_no_effect():
    roots = {each.name: each.metadata["affects"] for each in dataclasses.fields(Config)}
    assert {roots[name] for name in PRESENTATION} == {Affects.none}


@pytest.mark.parametrize("name", [name for name in TECHNIQUES if len(name.split()) == 1])
def test_class_of_an_option_follows_its_numerics(name):
    key, _, value = name.partition("=")
    is_reduced = TECHNIQUES[name].numerics is Numerics.reduced
    assert affects(key, [value]) is (Affects.both if is_reduced else Affects.rounding)


@pytest.mark.parametrize(
    ("key", "values", "expected"),
    [
        ("optimizer.lr", ("0.001", "0.0001"), "learning"),
        ("schedule", ("cosine", "constant"), "learning"),
        ("data.data_seed", ("0", "1"), "learning"),
        ("model.dropout", ("0.1", "0.2"), "learning"),
        ("model.dropout", ("0", "0.2"), "both"),
        ("model.dropout", ("null", "0.2"), "both"),
        ("optimizer.momentum", ("0", "0.9"), "both"),
        ("precision", ("fp32", "bf16"), "rounding"),
        ("precision", ("fp32", "fp8"), "both"),
        ("precision", ("bf16_pure", "bf16"), "both"),
        ("batch.per_device", ("4", "8"), "rounding"),
        ("data.packing", ("off", "on"), "both"),
        ("model.num_frozen_parameters", ("0", "100"), "both"),
        ("train.steps", ("100", "200"), "budget"),
        ("task.mask_frac", ("0.15", "0.3"), "group"),
        ("data.seq_len", ("16", "32"), "group"),
        ("seed", ("0", "1"), "none"),
        ("tracker.project", ("a", "b"), "none"),
        ("trainer.extra.label_smoothing_factor", ("0.1", "0"), "both"),
        ("attention.former_key", ("a", "b"), "rounding"),
        ("former_group.key", ("a", "b"), "both"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_class_of_a_difference_is_found(key, values, expected):
    assert affects(key, values) is Affects[expected]


@pytest.mark.parametrize(
    ("choices", "keys", "is_same"),
    [
        ({"memory": "checkpointing"}, {}, True),
        ({"precision": "bf16"}, {"precision.compute": "bfloat16"}, True),
        ({"precision": "fp8"}, {"precision.float8": "tensorwise"}, False),
        ({}, {"optimizer.lr": 0.01}, False),
        ({}, {"train.steps": 200}, False),
        ({}, {"train.log_every": 3, "train.eval_every": 5}, True),
    ],
    ids=["checkpointing", "bf16", "fp8", "lr", "steps", "logging"],
)
def test_rows_of_one_training_are_grouped(choices, keys, is_same, tmp_path):
    runs = [Run({"precision": "fp32", **c}, keys=k) for c, k in (({}, {}), (choices, keys))]
    variants, _, _ = group(gather([make_sweep(tmp_path, runs)]).entries)
    assert len(variants) == 2
    assert (len(set(map(training_key, variants))) == 1) is is_same


@pytest.mark.parametrize(("accumulation", "is_same"), [(2, True), (1, False)], ids=["same", "half"])
def test_equal_batch_sizes_are_one_training(accumulation, is_same, tmp_path):
    runs = [Run(keys={"batch.per_device": size}, per_device=size, accumulation=times)
            for size, times in ((8, 1), (4, accumulation))]  # fmt: skip
    variants, _, _ = group(gather([make_sweep(tmp_path, runs)]).entries)
    assert (len(set(map(training_key, variants))) == 1) is is_same
