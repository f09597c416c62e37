"""Schemas of the training loop."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Engine:
    """Which training loop runs the plan."""

    option: str = "loop"
    """The option chosen; set by the option's file."""


@dataclass
class Trainer:
    """What only Hugging Face Trainer has; read with engine=trainer."""

    extra: dict[str, Any] = field(default_factory=dict)
    """Further arguments of TrainingArguments, each typed as `trainer.extra.ARGUMENT=VALUE`."""
