"""Problems of wrong commands: the id, and a printed fix that composes."""

import shlex
from itertools import product
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from eke.common.errors import ConfigError, Problem
from eke.config.compose import compose, split_arguments

TABLE = Path(__file__).with_name("wrong_commands.txt")
LINES = TABLE.read_text(encoding="utf-8").splitlines()[1:]
CASES = [
    pytest.param(
        head.partition("] ")[2],
        problem_id.strip(),
        "" if fix.strip() == "-" else fix.strip(),
        id=head.partition("] ")[0].removeprefix("["),
    )
    for head, problem_id, fix in zip(LINES[::3], LINES[1::3], LINES[2::3], strict=True)
]


def problems_of(command: str) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        compose(split_arguments(shlex.split(command)).overrides)
    return caught.value.problems


NEEDED = {
    "data.path=": "data=text",
    "data.name=": "data=hub",
    "model.name_or_path=": "model=pretrained",
    "offload.path=": "offload=nvme",
}
"""Keys that have a meaning only with an option, which composes only with a value for them."""


def mended(command: str, fixes: list[str]) -> list[str]:
    """The words of a command after its fixes were typed: they replace what has the same key."""
    whole = [fix for fix in fixes if fix.startswith("python train.py ")]
    if whole:
        return shlex.split(whole[-1])[2:]
    fixed = [word for fix in fixes for word in shlex.split(fix)]
    kept = []
    for word in shlex.split(command):
        try:
            compose([word])
        except ConfigError:
            continue
        if word.lstrip("+").partition("=")[0] not in {f.partition("=")[0] for f in fixed}:
            kept.append(word)
    needed = [option for key, option in NEEDED.items() if any(f.startswith(key) for f in fixed)]
    return list(dict.fromkeys([*needed, *kept, *fixed]))


def cells_of(overrides: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The first and last cell of a sweep, by Hydra's own expansion."""
    values = []
    for parsed in OverridesParser.create().parse_overrides(list(overrides)):
        if not parsed.is_sweep_override():
            values.append([parsed.input_line])
        elif not hasattr(parsed.value(), "filter"):
            key = parsed.get_key_element()
            values.append([f"{key}={value}" for value in parsed.sweep_string_iterator()])
    cells = list(product(*values))
    return [cells[0], cells[-1]]


@pytest.mark.parametrize(("command", "problem_id", "fix"), CASES)
def test_id_and_fix_of_a_wrong_command(command: str, problem_id: str, fix: str) -> None:
    problems = problems_of(command)
    assert (problem_id, fix) in [(p.id, str(p.fix)) for p in problems]
    assert all(p.id and p.why for p in problems)


@pytest.mark.parametrize(("command", "problem_id", "fix"), [c for c in CASES if c.values[2]])
def test_fix_composes_when_it_is_typed(command: str, problem_id: str, fix: str) -> None:
    fixes = [str(problem.fix) for problem in problems_of(command)]
    arguments = split_arguments(mended(command, fixes))
    if arguments.multirun and arguments.overrides:
        for cell in cells_of(arguments.overrides):
            assert compose(cell, in_sweep=True).config.model.option
    else:
        assert compose(arguments.overrides).config.model.option


def test_table_has_at_least_sixty_commands() -> None:
    assert len(CASES) >= 60


def test_all_mistakes_are_reported_in_one_error() -> None:
    command = "precison=bf16 seed=x fp16=true optimizer.momentum=0.1 data=text =3 model=tinny"
    paths = [problem.key for problem in problems_of(command)]
    alone = ["precison", "seed", "fp16", "=3", "model"]
    assert paths == [*alone, "optimizer.momentum", "data.path"]


def test_missing_value_is_not_reported_for_a_misspelt_key() -> None:
    assert [p.key for p in problems_of("data=text data.pth=/x")] == ["data.pth"]
