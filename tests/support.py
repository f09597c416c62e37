"""What tests share that is no fixture."""

import os
from dataclasses import dataclass
from pathlib import Path

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


PATIENCE_S = 300.0
"""How long a test waits for what another process does; on a busy machine a start takes minutes, and
only what hangs waits so long."""


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
    # One thread: these models are too small for two, and tests run beside each other.
    return {
        **kept,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPO / "src"), kept.get("PYTHONPATH")])),
        "COLUMNS": "120",
        "EKE_CALIBRATION": str(tmp / "calibration"),  # no run says something of another test's
        "EKE_LEASES": str(tmp / "leases"),  # sweeps of other tests have devices of their own
    }


#: Weights grow by a factor of 10,000 in each step: the loss is not finite after a few.
DIVERGES = ("optimizer=sgd", "optimizer.lr=100", "optimizer.weight_decay=100",
            "train.max_grad_norm=null", "schedule=constant")  # fmt: skip


def started_by_torchrun(rank: int, world: int) -> dict[str, str]:
    """The variables that torchrun sets for one of several processes."""
    here = {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1"}
    values = {"RANK": rank, "WORLD_SIZE": world, **here, "MASTER_PORT": 29500}
    return {name: str(value) for name, value in values.items()}


def last_wins(*overrides: str) -> tuple[str, ...]:
    """Only the last value of each key: tests build on bases, and compare overrides."""
    return tuple({o.split("=", 1)[0]: o for o in overrides}.values())
