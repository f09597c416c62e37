"""Loggers that `hydra.verbose` names, in this process and its children."""

import logging

import pytest

from eke.common.process_env import VERBOSE, be_verbose, child_environment
from eke.config.compose import split_arguments
from eke.workflows import warn_and_set_loggers


@pytest.fixture(autouse=True)
def levels(monkeypatch):
    monkeypatch.delenv(VERBOSE, raising=False)
    names = ("", "eke.some", "eke.other")
    before = {name: logging.getLogger(name).level for name in names}
    yield
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)


def test_named_loggers_are_at_debug_here_and_in_runs() -> None:
    warn_and_set_loggers(split_arguments(["hydra.verbose=[eke.some]"]))
    assert logging.getLogger("eke.some").level == logging.DEBUG
    assert logging.getLogger("eke.other").level != logging.DEBUG
    assert child_environment()[VERBOSE] == "eke.some"


def test_verbose_true_selects_all_loggers(monkeypatch) -> None:
    monkeypatch.setenv(VERBOSE, "root")
    be_verbose()
    assert logging.getLogger().level == logging.DEBUG


def test_verbose_false_keeps_log_level() -> None:
    before = logging.getLogger().level
    warn_and_set_loggers(split_arguments(["seed=1", "hydra.verbose=false"]))
    assert (logging.getLogger().level, VERBOSE in child_environment()) == (before, False)
