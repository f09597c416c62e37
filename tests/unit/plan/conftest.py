"""Quick plans: the fingerprint reads all of eke's source, and every test here makes a plan."""

import functools

import pytest

import eke.plan.planner.planner as making
from eke.hardware import machine_fingerprint

fingerprint_once = functools.cache(machine_fingerprint)


@pytest.fixture(autouse=True)
def quick_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    """One fingerprint per device."""
    monkeypatch.setattr(making, "machine_fingerprint", fingerprint_once)
