"""The pages of --help."""

import pytest

from eke.cli import main
from eke.common.errors import ConfigError
from eke.config.compose import compose, help_text, split_arguments
from eke.config.compose.catalogue import GROUPS, make_catalogue
from eke.config.compose.help import COMMON_KEYS, PARTS

CATALOGUE = make_catalogue()
TOPICS = sorted({*CATALOGUE.options, *CATALOGUE.sections})


def test_first_help_page_fits_one_screen() -> None:
    assert len(help_text().splitlines()) <= 55


@pytest.mark.parametrize("topic", ["", *TOPICS])
def test_help_lines_fit_a_terminal(topic) -> None:
    lines = help_text(topic=topic).splitlines()
    assert max(len(line) for line in lines) <= 100
    assert all(line == line.rstrip() for line in lines)


def test_first_help_page_lists_groups_and_counts_options() -> None:
    listed = {group for groups in PARTS.values() for group in groups}
    assert set(CATALOGUE.options) - listed == {"slurm"}
    rows = {line.split()[0]: line[44:].split() for line in help_text().splitlines() if line.strip()}
    for group, options in CATALOGUE.options.items():
        shown = [word for word in rows[group] if not word.startswith("(")]
        assert shown[0] == CATALOGUE.defaults[group]
        assert set(shown) == set(GROUPS[group][1].split() or options) <= set(options)
        more = f"(+{len(options) - len(shown)})"
        assert (more in rows[group]) == (len(shown) < len(options))


def test_rarely_used_options_are_only_on_the_page_of_their_group() -> None:
    first = help_text().split()
    for group, option in (("optimizer", "adamw_apex_fused"), ("distributed", "dp"),
                          ("memory", "empty_cache"), ("sweep", "nvlink")):  # fmt: skip
        assert option not in first
        assert option in help_text(topic=group).split()


def test_keys_of_the_first_help_page_exist() -> None:
    assert set(COMMON_KEYS) <= set(CATALOGUE.keys)
    assert set(COMMON_KEYS) <= set(help_text().split())


@pytest.mark.parametrize("topic", TOPICS)
def test_group_page_lists_all_options_and_keys(topic) -> None:
    words = help_text(topic=topic).split()
    assert set(CATALOGUE.options.get(topic, {})) <= set(words)
    missing = {name for name in CATALOGUE.names(topic) if f"{topic}.{name}" not in words}
    assert missing == FILLED_IN.get(topic, set())


FILLED_IN = {
    "model": {
        "content", "model_type", "num_parameters", "num_frozen_parameters", "label_names",
        "supports_sdpa",
        "supports_flash_attn", "supports_flex_attn", "router_loss",
    },
}  # fmt: skip
"""Keys that the plan sets, not the user."""


def test_shared_key_is_described_once() -> None:
    page = help_text(topic="optimizer")
    assert page.split().count("optimizer.momentum") == 1
    heading = page[: page.index("optimizer.momentum")].rstrip().splitlines()[-1]
    assert heading == "keys of muon, sgd"


def test_key_is_linked_to_its_group_page() -> None:
    assert help_text(topic="optimizer.lr") == help_text(topic="optimizer")


@pytest.mark.parametrize(
    ("topic", "meant"),
    [("optimizers", " optimizer"), ("lr", " optimizer.lr"), ("seed", ""), ("sed", "")],
)
def test_unknown_group_is_a_problem_with_a_fix(topic, meant) -> None:
    with pytest.raises(ConfigError, match=f"-> --help{meant}$"):
        help_text(topic=topic)


@pytest.mark.parametrize(
    ("words", "start"),
    [
        (["--help"], "eke finds, runs and compares"),
        (["--help=memory"], "memory: "),
        (["--help", "seed=1"], "eke finds, runs and compares"),
    ],
)
def test_help_is_printed_from_the_command_line(words, start, capsys) -> None:
    assert main(["train", *words]) == 0
    assert capsys.readouterr().out.startswith(start)


def test_commands_of_the_help_page_compose() -> None:
    commands = [
        x.split()[2:] for x in help_text().splitlines() if x.startswith("  python train.py")
    ]
    assert len(commands) == 4
    for words in commands:
        arguments = split_arguments(words)
        # The first cell of a sweep is as good as any: values are checked one by one.
        first = [word.partition(",")[0] for word in arguments.overrides]
        assert compose(first).config.model.option
