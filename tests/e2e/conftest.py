"""Runs in fresh processes."""

from collections.abc import Callable
from pathlib import Path

import pytest
from live import Live


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Live]:
    """Start `python train.py ...` and go on."""
    return lambda *arguments: Live(tmp_path, arguments)
