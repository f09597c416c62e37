"""The schemas against files that are right, files that are wrong, and what eke itself takes."""

from enum import Enum

import pytest
from omegaconf import OmegaConf
from support import REPO

from eke.config.compose.catalogue import class_fields, is_valid_value, make_catalogue
from eke.config.editor import DEFINITIONS, field_schema, make_schemas

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema, of the extra `test`, is missing")

CATALOGUE = make_catalogue()
SCHEMAS = make_schemas(CATALOGUE)
VALIDATORS = {name: jsonschema.Draft7Validator(schema) for name, schema in SCHEMAS.items()}
FILES = [*sorted(REPO.glob("conf/*/*.yaml")), REPO / "conf" / "config.yaml"]

ADAMW = "defaults: [/schema/optimizer/adamw@_here_, _self_]\noption: mine\n"
CHOSEN = "defaults: [override /optimizer: sgd, _self_]\n"


def read(text: str):
    """A file's content, as Hydra reads it."""
    return OmegaConf.to_container(OmegaConf.create(text))


def mistakes(name: str, text: str) -> list[str]:
    return [f"{e.json_path}: {e.message}" for e in VALIDATORS[name].iter_errors(read(text))]


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_schema_is_valid_json_schema(name) -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMAS[name])


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(REPO)))
def test_every_shipped_file_is_valid(file) -> None:
    name = "config" if file.name == "config.yaml" else file.parent.name
    assert mistakes(name, file.read_text()) == []


RIGHT = [
    pytest.param("optimizer", ADAMW + "lr: 1e-3\nbeta1: 0\n", id="numbers as Hydra reads them"),
    pytest.param("optimizer", "defaults: [adamw_fused, _self_]\nbeta2: 0.9\n", id="from an option"),
    pytest.param(
        "optimizer", "defaults: [/optimizer/sgd@_here_, _self_]\nmomentum: 1\n", id="by its path"
    ),
    pytest.param("optimizer", "option: adamw\nlr: 1\n", id="no variant: what all have"),
    pytest.param("optimizer", ADAMW + "lr: ${seed}\n", id="interpolated number"),
    pytest.param("precision", "compute: ${x.y}\ntf32: ${z}\n", id="interpolated words"),
    pytest.param("experiment", "defaults: [smoke, /recipe/low_memory]\n", id="from others"),
    pytest.param("experiment", "defaults: [override /recipe: low_memory]\n", id="a recipe"),
    pytest.param("experiment", CHOSEN + "optimizer: {momentum: 0.5}\n", id="of the option chosen"),
    pytest.param("experiment", "optimizer: {beta1: 0.5, momentum: 0.5}\n", id="of any option"),
    pytest.param("sweep", "hydra: {sweeper: {params: {precision: 'fp32, bf16'}}}\n", id="list"),
    pytest.param("sweep", "sweep: {rows: {plain: null, b: {model: tiny, seed: 1}}}\n", id="rows"),
    pytest.param("sweep", "sweep: {zip: {optimizer: [sgd], optimizer.lr: [1]}}\n", id="zip"),
    pytest.param("sweep", "sweep: {product: {optimizer: glob(adamw*), seed: '1,2'}}\n", id="texts"),
    pytest.param("experiment", "sweep: {product: {seed: [1, 2]}, repeats: 2}\n", id="loose sweep"),
    pytest.param("sweep", "sweep: {product: {optimizer: [sgd]}, repeats: auto}\n", id="auto"),
]


@pytest.mark.parametrize(("name", "text"), RIGHT)
def test_valid_file_passes_schema(name, text) -> None:
    assert mistakes(name, text) == []


WRONG = [
    pytest.param("optimizer", ADAMW + "momentum: 1\n", "momentum", id="key of another variant"),
    pytest.param("optimizer", "momentum: 1\n", "momentum", id="key without its variant"),
    pytest.param("optimizer", "defaults: [adam, _self_]\n", "$.defaults[0]", id="base"),
    pytest.param("optimizer", "defaults: adamw\n", "$.defaults", id="defaults are a list"),
    pytest.param("model", "defaults: [/schema/model/bort@_here_]\n", "bort", id="schema"),
    pytest.param("task", "num_labels: 2\n", "num_labels", id="key of another task"),
    pytest.param("precision", "tf32: on\n", "$.tf32", id="bare on"),
    pytest.param("batch", "batch: {per_device: 1}\n", "batch", id="the group's own name"),
    pytest.param("hardware", "memory_gib: 80\n", "memory_gib", id="not a key"),
    pytest.param("experiment", "optimiser: {lr: 1}\n", "optimiser", id="section"),
    pytest.param("experiment", "train: {stepz: 1}\n", "stepz", id="key of a section"),
    pytest.param("experiment", "train: null\n", "$.train", id="section without keys"),
    pytest.param("experiment", "steps: 20\n", "steps", id="key without its section"),
    pytest.param("experiment", "model: {option: gpt2}\n", "option", id="an option's own key"),
    pytest.param("experiment", CHOSEN + "optimizer: {beta1: 0.5}\n", "beta1", id="other option"),
    pytest.param("experiment", "defaults: [optimizer: sgd]\n", "optimizer", id="no override"),
    pytest.param("experiment", "defaults: [override /optimizer: sdg]\n", "sdg", id="option"),
    pytest.param("experiment", "defaults: [override /precison: fp16]\n", "precison", id="group"),
    pytest.param("experiment", "defaults: [override optimizer: sgd]\n", "override", id="no slash"),
    pytest.param("experiment", "defaults: [/sweep/precision_ladder]\n", "/sweep", id="a sweep"),
    pytest.param("experiment", "defaults: [smok]\n", "smok", id="base of an experiment"),
    pytest.param("recipe", "defaults: [/experiment/smoke]\n", "/experiment", id="what comes later"),
    pytest.param("recipe", "defaults: [{}]\n", "$.defaults[0]", id="empty entry"),
    pytest.param("sweep", "sweep: {product: {optimizer.lrr: 1}}\n", "lrr", id="swept key"),
    pytest.param("sweep", "sweep: {product: {sweep: none}}\n", "sweep", id="a sweep of sweeps"),
    pytest.param("config", "defaults: [model: tinny]\n", "tinny", id="default option"),
    pytest.param("config", "defaults: [modell_: tiny]\n", "modell_", id="default group"),
]


@pytest.mark.parametrize(("name", "text", "said"), WRONG)
def test_invalid_file_fails_schema(name, text, said) -> None:
    found = mistakes(name, text)
    assert any(said in mistake for mistake in found), found


# --- every key, against eke's own judgement ------------------------------------------------------

VALUES = [
    None, True, False, -1, 0, 1, 2, 3, 100, 10**9, 10**10, 2**53, 2**53 + 2, -1.5, -0.5, 0.0005,
    0.5, 0.95, 1.5, 1e-30, 1e300, float("inf"), "text", "on", "float32", "full", "fixed", "online",
    {}, ["precision=fp16"], [{"option": "jsonl", "path": "a.jsonl"}], [[2, 3]],
]  # fmt: skip
"""Not in it: not-a-number, which JSON Schema cannot tell from a number."""
KEYS = [
    (f"{cls.__name__}.{name}", field)
    for classes in CATALOGUE.sections.values()
    for cls in classes
    for name, field in class_fields(cls)
]
ENUMS = [f.kind for _, f in KEYS if isinstance(f.kind, type) and issubclass(f.kind, Enum)]
VALUES += sorted({next(iter(enum.__members__)) for enum in ENUMS} - set(map(str, VALUES)))


def eke_takes(field, value) -> bool:
    if not is_valid_value(field, value):
        return False
    return value is None or field.limit is None or field.limit.admits(value)


def natural(field, value) -> bool:
    """Of the very type: OmegaConf converts others, a schema calls them wrong."""
    if value is None or issubclass(field.kind, Enum):
        return isinstance(value, str | None)
    kinds = (int, float) if field.kind is float else (field.kind,)
    return type(value) in kinds


def test_schema_agrees_with_eke() -> None:
    for key, field in KEYS:
        schema = {**field_schema(field, ""), "definitions": DEFINITIONS}
        validator = jsonschema.Draft7Validator(schema)
        verdicts = [(v, validator.is_valid(v), eke_takes(field, v)) for v in VALUES]
        assert {taken for _, _, taken in verdicts} == {True, False}, f"{key}: values of one kind"
        assert not [v for v, valid, taken in verdicts if valid and not taken], key
        wrongly_wrong = [v for v, valid, taken in verdicts if taken and not valid]
        assert not [v for v in wrongly_wrong if natural(field, v)], key
