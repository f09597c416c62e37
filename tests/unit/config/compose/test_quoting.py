"""A text of the user in a fix is the same text once the fix is typed in a shell."""

import shlex
from pathlib import Path

import pytest

from eke.common.errors import ConfigError, Fix
from eke.common.text import override
from eke.config.compose import compose
from eke.config.sweep import expand

PLAIN = (
    "rows.jsonl", "my-rows_2.csv", "/data/a.b/rows", "./1_000", "../x", ".hidden", "a@b", "a%20b",
)  # fmt: skip
NUMBERS = (
    "1_000", "1e5", "007", "0x10", ".5", "-3", "+4", "12", "1.0", "inf", "NaN", "-inf", "1:30",
)  # fmt: skip
WORDS = ("null", "true", "False", "on", "NULL")
SIGNS = (
    "a,b", "a b", " a ", "a=b", "a:b", "it's", 'say "x"', "it's \"x\"", "~", "~/x", "$HOME",
    "${seed}", "a$(ls)", "`ls`", "a;b", "a|b", "a&b", "a>b", "!x", "a!b", "#x", "*?", "[x]", "[",
    "{a:1}", "(y)", "glob(*)", "range(3)", "\\", "a\\", "a\\b", "a\\'b", 'a\\"b', "-m", "--help",
    "", "é", "日本", "👍", "tab\tx", "===", "@", "+x", "a@b:c", "x\\,y",
)  # fmt: skip


def typed(*words: str) -> list[str]:
    """What a program receives once the printed fix was typed in a shell."""
    return shlex.split(str(Fix(*words)))


@pytest.mark.parametrize("text", [*PLAIN, *NUMBERS, *WORDS, *SIGNS])
def test_quoted_text_is_parsed_back(text) -> None:
    assert compose(typed(override("tracker.project", text))).config.tracker.project == text


@pytest.mark.parametrize("text", PLAIN)
def test_plain_text_is_not_quoted(text) -> None:
    assert str(Fix(override("tracker.project", text))) == f"tracker.project={text}"


def test_lists_and_other_values_are_quoted() -> None:
    words = typed(override("model.freeze", ["1_0", "a,b", "x"]))
    assert compose([*words, "model=tiny"]).config.model.freeze == ["1_0", "a,b", "x"]
    assert override("seed", 3) == "seed=3"
    assert override("tracker.group", None) == "tracker.group=null"
    assert override("data.path", "FILE_OR_FOLDER") == "data.path=FILE_OR_FOLDER"


@pytest.mark.parametrize("text", ["1_000", "1e5", "true", "1.50", "1E5", "1_0.5", "NaN"])
def test_text_parsed_differently_is_rejected_with_a_fix(text) -> None:
    """Hydra makes 1000 of `1_000` and True of `true`; a record would have another name."""
    with pytest.raises(ConfigError) as refused:
        compose([f"tracker.project={text}"])
    (problem,) = refused.value.problems
    assert compose(typed(*problem.fix.words)).config.tracker.project == text


def test_sweep_text_parsed_differently_is_rejected() -> None:
    """A short commit hash may be a number."""
    with pytest.raises(ConfigError) as refused:
        expand(["data=hub", "data.name=x", "data.revision=12e4567,main"])
    assert refused.value.problems[0].fix.words == ("data.revision='12e4567'",)
    cells = expand(["data=hub", "data.name=x", "data.revision='12e4567',main"]).cells
    assert [each.composed.config.data.revision for each in cells] == ["12e4567", "main"]


def test_list_text_parsed_differently_is_rejected() -> None:
    with pytest.raises(ConfigError) as refused:
        compose(["model=tiny", "model.freeze=[1e5,layers,true]"])
    words = typed(*refused.value.problems[0].fix.words)
    assert compose(["model=tiny", *words]).config.model.freeze == ["1e5", "layers", "true"]


@pytest.mark.parametrize("text", ["12", "1.5", "-3", "'1_000'", "null"])
def test_numbers_with_equal_text_are_accepted(text) -> None:
    found = compose([f"tracker.group={text}"]).config.tracker.group
    assert found == (None if text == "null" else text.strip("'"))


@pytest.mark.parametrize(
    "name", ["1_000", "a b.jsonl", "it's.jsonl", "a,b.jsonl", "null", "x$y", "日本"]
)
def test_fix_for_a_misspelt_file_is_valid(name, tmp_path, make_plan) -> None:
    (tmp_path / name).write_text('{"text": "words and words"}\n' * 20)
    wrong = f"{name[:-1]}{'_' if name[-1] != '_' else '-'}"
    command = ("data=jsonl", "data.tokenizer=bytes", "model=tiny", "data.seq_len=32")
    with pytest.raises(ConfigError) as refused:
        make_plan(*command, override("data.path", str(tmp_path / wrong)), planning=True)
    words = typed(*refused.value.problems[0].fix.words)
    assert words, refused.value.problems
    path = compose([*command, *words]).config.data.path
    assert Path(path) == tmp_path / name
