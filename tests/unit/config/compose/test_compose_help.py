"""The pages of --help."""

import re

import pytest

from eke.cli import main
from eke.common.errors import ConfigError
from eke.common.screen import plain, take_flags
from eke.config.compose import compose, help_text, split_arguments
from eke.config.compose.catalogue import GROUPS, KeyRow, key_rows, make_catalogue
from eke.config.compose.help import COMMON_KEYS
from eke.config.schema import ENTRIES

CATALOGUE = make_catalogue()
TOPICS = sorted({*CATALOGUE.options, *CATALOGUE.sections})
WIDTHS = (60, 80, 120, 200)


def test_first_help_page_fits_one_screen() -> None:
    assert len(help_text(columns=80).splitlines()) <= 50


def find_broken_lines(text: str, columns: int) -> list[str]:
    """Return lines over the width that are not a single long word or an indented command."""
    lines = plain(text).splitlines()
    return [
        line
        for line in lines
        if len(line) > columns and len(line.split()) > 1 and "train.py" not in line
    ]


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("topic", ["", "all", "optimizer=all", *TOPICS])
def test_help_lines_fit_a_terminal(topic, columns) -> None:
    page = help_text(topic=topic, columns=columns)
    assert not find_broken_lines(page, columns)
    assert all(line == line.rstrip() for line in page.splitlines())


@pytest.mark.parametrize("topic", ["", "optimizer", "all", "model=pretrained"])
def test_help_has_the_same_words_at_every_width(topic) -> None:
    pages = [help_text(topic=topic, columns=columns).split() for columns in WIDTHS]
    assert all(sorted(page) == sorted(pages[0]) for page in pages)


def test_colours_change_no_text() -> None:
    without = help_text(topic="optimizer", columns=80)
    take_flags(["--color=always"])
    try:
        colored = help_text(topic="optimizer", columns=80)
    finally:
        take_flags([])
    assert colored != plain(colored) == without


def test_first_help_page_lists_groups_and_counts_options() -> None:
    page = help_text(columns=100)
    assert set(CATALOGUE.options) <= set(re.findall(r"\w+", page))
    rows = dict(re.findall(r"^  (\w+) +(\w[\w, +]*)$", page, flags=re.MULTILINE))
    shown = {group: rows[group] for group in CATALOGUE.options if group in rows}
    assert len(shown) >= 10
    for group, text in shown.items():
        options = re.findall(r"\b[a-z]\w*", text)
        assert options[0] == CATALOGUE.defaults[group]
        known = CATALOGUE.options[group]
        assert set(options) == set(GROUPS[group][1].split() or known) <= set(known)
        assert text.endswith(f"+{len(known) - len(options)}") == (len(options) < len(known))


def rows_of_all_options() -> dict[tuple[str, str], list[KeyRow]]:
    return {
        (section, option): key_rows(section, option, CATALOGUE)
        for section in ["", *CATALOGUE.sections]
        for option in CATALOGUE.options.get(section, {"": None})
    }


def test_every_key_has_type_default_and_description() -> None:
    rows = [row for rows in rows_of_all_options().values() for row in rows]
    assert not [row.key for row in rows if not (row.type and row.default and row.about)]
    assert not [row.key for row in rows if row.default == "null" and not row.null]
    keys = {row.key for row in rows}
    missing = set(CATALOGUE.keys) - keys - set(ENTRIES)
    assert {key for key in missing if not key.endswith((".option", ".family"))} == {
        f"{group}.{name}" for group, names in FILLED_IN.items() for name in names
    }


def test_every_key_of_the_help_shows_its_default() -> None:
    page = help_text(topic="all", columns=100)
    for key in {row.key for rows in rows_of_all_options().values() for row in rows}:
        shown = re.search(rf"^  {key}(?= |$).*(\n    .*)*", page, flags=re.MULTILINE)
        assert shown, key
        assert re.search(r"\bdefault\s+\S|\brequired\b", shown[0]), key


@pytest.mark.parametrize(
    "choice",
    ["", "optimizer=lion", "optimizer=sgd", "dataloader=workers", "precision=bf16", "model=gpt2"],
)
def test_default_of_the_help_is_the_default_of_a_run(choice) -> None:
    config = compose([choice] if choice else []).config
    groups = {**CATALOGUE.defaults, **dict([choice.split("=")] if choice else [])}
    for section in CATALOGUE.sections:
        if section == "sweep":  # composed without its settings
            continue
        for row in key_rows(section, groups.get(section, ""), CATALOGUE):
            value = getattr(getattr(config, section), row.key.rpartition(".")[2])
            value = getattr(value, "name", value)
            shown = {"true": True, "false": False, "null": None, "''": ""}.get(
                row.default, row.default
            )
            if isinstance(value, int | float) and not isinstance(value, bool):
                assert float(row.default) == pytest.approx(value), row.key
            elif not isinstance(value, list | dict):
                assert shown == value, row.key


def test_rarely_used_options_are_only_on_the_page_of_their_group() -> None:
    first = help_text().split()
    for group, option in (("optimizer", "adamw_apex_fused"), ("distributed", "dp"),
                          ("memory", "empty_cache"), ("sweep", "nvlink")):  # fmt: skip
        assert option not in first
        assert option in help_text(topic=group).split()


def test_keys_of_the_first_help_page_exist() -> None:
    assert set(COMMON_KEYS) <= set(CATALOGUE.keys)
    assert "default 0.001" in help_text()
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
        "supports_flash_attn", "supports_flex_attn", "router_loss", "shapes", "flops_per_sample",
    },
    "data": {"content", "train_length", "eval_length"},
}  # fmt: skip
"""Keys that the plan sets, not the user."""


def test_shared_key_is_described_once() -> None:
    page = help_text(topic="optimizer")
    assert page.split().count("optimizer.momentum") == 1
    heading = page[: page.index("optimizer.momentum")].rstrip().splitlines()[-1]
    assert heading == "keys of muon, sgd"
    assert "0.95 (muon), 0.9 (sgd)" in " ".join(page.split())


def test_option_page_has_its_keys_only() -> None:
    words = help_text(topic="optimizer=muon").split()
    assert {"optimizer.lr", "optimizer.ns_steps"} <= set(words)
    assert "optimizer.block_size" not in words


def test_key_is_linked_to_its_group_page() -> None:
    assert help_text(topic="optimizer.lr") == help_text(topic="optimizer")


@pytest.mark.parametrize(
    ("topic", "meant"),
    [
        ("optimizers", " optimizer"),
        ("lr", " optimizer.lr"),
        ("seed", " all"),
        ("optimizer=moun", " optimizer=muon"),
    ],
)
def test_unknown_group_is_a_problem_with_a_fix(topic, meant) -> None:
    with pytest.raises(ConfigError, match=f"-> --help{meant}$"):
        help_text(topic=topic)


@pytest.mark.parametrize(
    ("words", "start"),
    [
        (["--help"], "Train Transformers"),
        (["--help=memory"], "memory: "),
        (["--help", "seed=1"], "Train Transformers"),
        (["--help", "optimizer=muon"], "optimizer=muon"),
    ],
)
def test_help_is_printed_from_the_command_line(words, start, capsys) -> None:
    assert main(["train", *words]) == 0
    assert capsys.readouterr().out.startswith(start)


def test_commands_of_the_help_page_compose() -> None:
    commands = [
        x.split()[2:] for x in help_text().splitlines() if x.startswith("  python train.py")
    ]
    assert len(commands) == 3
    for words in commands:
        arguments = split_arguments(words)
        # The first cell of a sweep is as good as any: values are checked one by one.
        first = [word.partition(",")[0] for word in arguments.overrides]
        assert compose(first).config.model.option
