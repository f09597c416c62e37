"""The help page."""

from eke.config.compose import help_text
from eke.config.compose.catalogue import make_catalogue


def test_help_fits_one_screen() -> None:
    lines = help_text().splitlines()
    assert len(lines) <= 48
    assert max(len(line) for line in lines) <= 100
    assert all(line == line.rstrip() for line in lines)


def test_help_names_every_group_and_every_option() -> None:
    words = help_text().split()
    for group, options in make_catalogue().options.items():
        assert group in words
        assert set(options) <= set(words)


def test_commands_of_the_help_page_compose() -> None:
    from eke.config.compose import compose, split_arguments

    commands = [
        x.split()[2:] for x in help_text().splitlines() if x.startswith("  python train.py")
    ]
    assert len(commands) == 4
    for words in commands:
        arguments = split_arguments(words)
        # The first cell of a sweep is as good as any: values are checked one by one.
        first = [word.partition(",")[0] for word in arguments.overrides]
        assert compose(first).config.model.option
