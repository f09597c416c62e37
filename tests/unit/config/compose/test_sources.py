"""Sources of a mix: their schema, their names, and one message with the fix for each mistake."""

import pytest

from eke.common.errors import ConfigError
from eke.config.compose import compose
from eke.config.compose.catalogue import make_catalogue
from eke.config.mixing import source_configs, source_names, source_shares
from eke.config.schema import MIXED, Packing
from eke.config.schema.data import BadRows, Chat, Files

TWO = "data.sources=[{option:jsonl,path:a.jsonl,weight:3},{option:chat,path:b/c.jsonl,weight:1}]"


def problems(*overrides: str) -> list[tuple[str, str, str]]:
    with pytest.raises(ConfigError) as error:
        compose(["data=mix", *overrides])
    return [(p.key, p.value, str(p.fix)) for p in error.value.problems]


def test_every_data_option_but_four_can_be_mixed() -> None:
    catalogue = make_catalogue()
    others = set(catalogue.options["data"]) - set(MIXED)
    assert others == {"mix", "synthetic", "python_source", "custom"}
    assert all(catalogue.schema_class("data", option) is kind for option, kind in MIXED.items())


def test_source_has_the_keys_of_its_option_and_of_the_mix() -> None:
    config = compose(
        ["data=mix", TWO, "data.seq_len=77", "data.packing=on", "data.tokenizer=folder",
         "data.sources.0.text=body", "data.sources.1.bad_rows=skip"]
    ).config  # fmt: skip
    one, two = (each.data for each in source_configs(config))
    assert isinstance(one, Files)
    assert isinstance(two, Chat)
    assert (one.option, one.path, one.text, one.eval_frac) == ("jsonl", "a.jsonl", "body", 0.1)
    assert (two.option, two.path, two.bad_rows) == ("chat", "b/c.jsonl", BadRows.skip)
    for data in (one, two):
        assert (data.seq_len, data.packing, data.tokenizer) == (77, Packing.on, "folder")
    assert source_names(config.data) == ["a", "c"]
    assert source_shares(config.data, [10, 10]) == [0.75, 0.25]


def test_only_a_mix_has_sources() -> None:
    assert source_configs(compose(["data=synthetic"]).config) == []


def test_sizes_are_the_default_weights() -> None:
    sources = "data.sources=[{option:text,path:a},{option:hub,name:x/y,config_name:z}]"
    mix = compose(["data=mix", sources]).config.data
    assert source_shares(mix, [30, 10]) == [0.75, 0.25]
    assert source_names(mix) == ["a", "y-z"]


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ((), [("data.sources", "[]", "{option:jsonl")]),
        ((TWO, "data.sources.1.weight=0"),
         [("data.sources[1].weight", "0", "data.sources.1.weight=1")]),
        (("data.sources=[{option:jsonl,path:a.jsonl,streaming:true}]",),
         [("data.sources[0].weight", "null", "data.sources.0.weight=1")]),
        ((TWO, "data.sources.0.weight=-2"),
         [("data.sources[0].weight", "-2", "data.sources.0.weight=1")]),
        ((TWO, "data.sources.1.weight=null"),
         [("data.sources[1].weight", "null", "data.sources.1.weight=3")]),
        ((TWO, "data.sources.1.name=a"),
         [("data.sources[1].name", "a", "data.sources.1.name=a_1")]),
        ((TWO, "data.sources.1.option=mix"),
         [("data.sources[1].option", "mix", "data.sources.1.option=jsonl")]),
        ((TWO, "data.sources.1.option=synthetic"),
         [("data.sources[1].option", "synthetic", "data.sources.1.option=jsonl")]),
        ((TWO, "data.sources.0.txt=x"),
         [("data.sources[0].txt", "x", "write text")]),
        ((TWO, "data.sources.0.seq_len=8"),
         [("data.sources[0].seq_len", "8", "data.seq_len=8, outside the sources")]),
        ((TWO, "data.sources.0.eval_frac=much"),
         [("data.sources[0].eval_frac", "much", "data.sources.0.eval_frac=0.1")]),
        ((TWO, "data.sources.0.eval_frac=3"),
         [("data.sources[0].eval_frac", "3", "data.sources.0.eval_frac=0.1")]),
        ((TWO, "data.sources.1.train_on=al"),
         [("data.sources[1].train_on", "al", "data.sources.1.train_on=all")]),
        (("data.sources=[{option:jsonl}]",),
         [("data.sources[0].path", "", "data.sources.0.path=FILE_OR_FOLDER")]),
        (("data.sources=[{path:x.csv}]",),
         [("data.sources[0].option", "null", "data.sources.0.option=csv")]),
    ],
    ids=lambda value: value[-1].split("=")[0] if value and isinstance(value[-1], str) else "",
)  # fmt: skip
def test_invalid_source_is_named_with_a_fix(typed, expected) -> None:
    found = problems(*typed)
    assert [each[:2] for each in found] == [each[:2] for each in expected]
    assert all(part[2] in each[2] for each, part in zip(found, expected, strict=True))


@pytest.mark.parametrize("key", ["weight=0", "weight=null", "name=a", "option=mix", "eval_frac=3"])
def test_proposed_fix_is_valid(key) -> None:
    typed = [TWO, f"data.sources.1.{key}"]
    [(_, _, fix)] = problems(*typed)
    compose(["data=mix", TWO, fix])


def test_all_invalid_sources_are_listed() -> None:
    found = problems(TWO, "data.sources.0.weight=0", "data.sources.1.option=no")
    assert [key for key, _, _ in found] == ["data.sources[0].weight", "data.sources[1].option"]


def test_missing_source_is_rejected() -> None:
    assert problems(TWO, "data.sources.2.weight=1")


@pytest.mark.parametrize("typed", [("data=jsonl", "data.path=a.jsonl"), ()], ids=["jsonl", "none"])
def test_source_keys_are_limited_to_a_mix(typed) -> None:
    with pytest.raises(ConfigError) as error:
        compose([*typed, "data.sources.0.weight=1"])
    assert error.value.problems[0].id == "other_options_key"
