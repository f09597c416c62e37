"""The schemas that `eke schema` writes, and the committed settings that refer to them."""

import json
import os
from functools import reduce

import pytest
from support import REPO

from eke.cli import main as command
from eke.cli.schema import DEFAULT_FOLDER
from eke.config.compose.catalogue import GROUPS, make_catalogue
from eke.config.editor import editor_settings, make_schemas
from eke.config.schema import ENTRIES, Config, SequenceClassification, WSDSchedule
from eke.config.schema.fields import field_docs, summary

SETTINGS = REPO / ".vscode" / "settings.json"
CATALOGUE = make_catalogue()
SCHEMAS = make_schemas(CATALOGUE)


def test_committed_settings_are_up_to_date() -> None:
    settings = editor_settings(SCHEMAS, f"./{DEFAULT_FOLDER}", ["conf"])
    text = json.dumps(settings, indent=2) + "\n"
    if os.environ.get("EKE_UPDATE"):
        SETTINGS.write_text(text)
    stale = "run EKE_UPDATE=1 pytest tests/conf/test_editor_schemas.py"
    assert SETTINGS.read_text() == text, stale


def test_every_file_of_options_has_one_schema() -> None:
    patterns = json.loads(SETTINGS.read_text())["yaml.schemas"]
    matched = [file for globs in patterns.values() for glob in globs for file in REPO.glob(glob)]
    files = {*REPO.glob("conf/*/*.yaml"), *REPO.glob("sweeps/*.yaml"), REPO / "conf/config.yaml"}
    assert sorted(matched) == sorted(files)
    assert {schema.rpartition("/")[2] for schema in patterns} == {f"{n}.json" for n in SCHEMAS}


def properties_in(schema):
    """Every key with its schema, wherever it stands."""
    if isinstance(schema, dict):
        for name, value in schema.get("properties", {}).items():
            yield name, value
        for value in schema.values():
            yield from properties_in(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from properties_in(value)


def resolved(schema, whole):
    """What a schema refers to, else the schema itself."""
    while isinstance(schema, dict) and "$ref" in schema:
        place = schema["$ref"].removeprefix("#/").split("/")
        schema = reduce(lambda node, step: node[step], place, whole)
    return schema


def test_every_key_is_explained() -> None:
    classes = [cls for classes in CATALOGUE.sections.values() for cls in classes]
    classes += ENTRIES.values()
    said = {doc for cls in [*classes, Config] for doc in field_docs(cls).values()}
    for name, schema in SCHEMAS.items():
        keys = [each for each in properties_in(schema["definitions"]) if each[0] != "defaults"]
        assert len(keys) > 0
        for key, shown in keys:
            if shown is True:  # explained where it is referred to
                continue
            about = resolved(shown, schema)["description"].partition("\n\n")[0]
            # What a sweep varies may be a group, whose options follow or are described.
            group = GROUPS.get(key, ("",))[0]
            assert about in said or about.startswith(f"{group}: ") or about == f"{key}: {group}", (
                f"{name}: {key}"
            )


def test_inherited_field_description_is_found() -> None:
    docs = field_docs(WSDSchedule)
    assert docs["decay_frac"] == "Share of the run spent on the final linear decay."
    assert docs["final_frac"].startswith("Final learning rate")
    assert docs["warmup_frac"] == "Linear warm-up as a share of the run."
    assert summary(SequenceClassification) == "Predict one label per sequence."


# --- eke schema -----------------------------------------------------------------------------------

OWN = """\
# optimizer=mine -- another beta2.
defaults:
  - {base}
  - _self_
beta2: 0.95
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_schemas_of_an_installed_eke(here, capsys) -> None:
    assert command(["schema", "my schemas/eke"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == editor_settings(SCHEMAS, "./my schemas/eke", ["conf"])
    assert f"{len(SCHEMAS)} schemas" in said.err
    written = {p.stem: json.loads(p.read_text()) for p in (here / "my schemas" / "eke").iterdir()}
    assert written == SCHEMAS


def test_schemas_are_written_to_the_configured_place(here, capsys) -> None:
    assert command(["schema"]) == 0
    assert capsys.readouterr().out == SETTINGS.read_text()
    assert len(list((here / ".schemas").iterdir())) == len(SCHEMAS)


def test_schemas_include_user_options(here, capsys) -> None:
    folder = here / "my_conf" / "optimizer"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(OWN.format(base="adamw"))
    (folder / "yours.yaml").write_text(OWN.format(base="/optimizer/mine@_here_"))
    assert command(["schema", "schemas", "--config-dir", "my_conf"]) == 0
    settings = json.loads(capsys.readouterr().out)
    globs = settings["yaml.schemas"]["./schemas/optimizer.json"]
    assert globs == ["conf/optimizer/*.yaml", "my_conf/optimizer/*.yaml"]
    assert settings["yaml.schemas"]["./schemas/config.json"] == ["conf/config.yaml"]
    experiment = json.loads((here / "schemas" / "experiment.json").read_text())
    entries = experiment["properties"]["defaults"]["items"]["else"]["properties"]
    options = resolved(entries["override /optimizer"], experiment)
    assert {"mine", "yours"} <= set(options["enum"])
    catalogue = make_catalogue(here / "my_conf")
    assert catalogue.schema_class("optimizer", "yours").__name__ == "TorchAdamW"


def test_external_folders_have_absolute_paths(here, capsys) -> None:
    work = here / "work"
    work.mkdir()
    (here / "conf_of_mine" / "experiment").mkdir(parents=True)
    os.chdir(work)
    assert command(["schema", "../s", "--config-dir=../conf_of_mine"]) == 0
    schemas = json.loads(capsys.readouterr().out)["yaml.schemas"]
    globs = schemas[(here / "s" / "task.json").as_uri()]
    assert globs == ["conf/task/*.yaml", "**/conf_of_mine/task/*.yaml"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(["a", "--config-dir", "nowhere"], "no such folder", id="no folder"),
        pytest.param(["file"], "is a file", id="file"),
        pytest.param(["file/below"], "Not a directory", id="below a file"),
    ],
)
def test_invalid_command_prints_one_line(here, capsys, words, said) -> None:
    (here / "file").write_text("mine")
    assert command(["schema", *words]) == (1 if words == ["file/below"] else 2)
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.out == ""
    assert [p.name for p in here.iterdir()] == ["file"], "nothing is half-written"
