"""Whether Trainer took the steps, and the arguments it had."""

import dataclasses
from enum import Enum
from typing import Any

from eke.training.loop.state import Job

KEY = "trainer"


def note_trainer(job: Job, trainer: Any) -> None:
    """Read from the running Trainer: its class in transformers, and what differs from its defaults.

    Warns about an argument of `trainer.extra` that is what Trainer does anyway.
    """
    base = next(cls for cls in type(trainer).__mro__ if cls.__module__.startswith("transformers."))
    defaults = {f.name: f.default for f in dataclasses.fields(trainer.args)}
    in_force = {name: getattr(trainer.args, name) for name in defaults}
    job.effective[KEY] = {
        "class": f"{base.__module__}.{base.__qualname__}",
        "arguments": {
            name: _plain(value)
            for name, value in in_force.items()
            if name != "output_dir" and value != defaults[name]
        },
    }
    for name, asked in job.plan.config.trainer.extra.items():
        if asked == defaults.get(name):
            job.warn(f"trainer.extra.{name}={asked} had no effect: it is Trainer's default")


def note_engine(job: Job) -> None:
    """Warn when another loop than the one asked for took the first steps."""
    if job.plan.config.engine.option == "trainer" and KEY not in job.effective:
        job.warn("engine=trainer had no effect: Hugging Face Trainer did not take these steps")


def _plain(value: Any) -> Any:
    """As JSON has it; what is no plain value is told as text."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)
