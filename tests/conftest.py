"""What all tests share: plans for small models, and trainings in this process or in a fresh one."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]

TINY = (
    "model.hidden_size=32",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=2",
    "model.intermediate_size=64",
    "model.dropout=0.0",
    "tracker=none",
)
"""A model that trains a step in milliseconds, whatever its family."""


@pytest.fixture(autouse=True)
def isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the developer's folders, or reaches a tracker's server."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def make_plan() -> Callable[..., object]:
    """Overrides -> Plan, checked, for this machine's CPU."""
    from eke.app import plan_for
    from eke.compose import compose

    def make(*overrides: str, planning: bool = False) -> object:
        return plan_for(compose([*overrides, "hardware=cpu"]), planning)

    return make


@dataclass(frozen=True)
class Finished:
    """A command that ran to its end."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """Everything it printed."""
        return self.out + self.err


def environment(tmp: Path) -> dict[str, str]:
    """Environment of a fresh user: no configuration, no credentials."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "EKE", "COV_"))}
    return {**kept, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPO / "src"), "COLUMNS": "120"}


@pytest.fixture
def train_py(tmp_path: Path) -> Callable[..., Finished]:
    """`python train.py ...` in a folder of its own."""

    def run(*arguments: str, timeout: float = 300, extra: Sequence[str] = ()) -> Finished:
        done = subprocess.run(
            [sys.executable, str(REPO / "train.py"), *arguments],
            cwd=tmp_path,
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )
        return Finished(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def tiny() -> tuple[str, ...]:
    """Overrides that make any model small."""
    return TINY
