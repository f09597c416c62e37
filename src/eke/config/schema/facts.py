"""Facts that options decide, so that other modules do not ask for options by name."""

from dataclasses import dataclass

from eke.config.schema.data import Data, ProblemType, Task
from eke.config.schema.resources import FSDP, Distributed, PeerToPeer

STAGE = {"zero1": 1, "zero2": 2, "zero3": 3}
"""Option of the group `distributed` -> ZeRO stage."""


@dataclass(frozen=True)
class Ranks:
    """Processes that train one model, and the parts of the training state that they share."""

    option: str
    num_processes: int
    num_nodes: int
    timeout_s: float
    p2p: PeerToPeer
    zero_stage: int
    """ZeRO stage of DeepSpeed, 0 without DeepSpeed."""
    fsdp: FSDP | None
    """Keys of FSDP, None without FSDP."""
    shards: int
    """Shards of the optimizer state, 1 if each process has all of it."""
    deepspeed_config: str | None
    is_ddp: bool
    """Whether DDP synchronizes the gradients of model copies."""
    is_dp: bool
    """Whether one process trains with several devices (DataParallel)."""

    @property
    def shards_states(self) -> bool:
        """Whether the optimizer state is sharded among the processes."""
        return self.fsdp is not None or self.zero_stage >= 1

    @property
    def shards_weights(self) -> bool:
        """Whether the weights are sharded among the processes, from initialization on."""
        return self.fsdp is not None or self.zero_stage == 3


@dataclass(frozen=True)
class Targets:
    """Targets of the task."""

    option: str
    per_token: bool
    """Whether labels are tokens. False: one label per sample."""
    is_causal: bool
    """Whether each token of the input predicts the next one."""
    length: int
    """Tokens of a separate target sequence, 0 without one."""
    mask_frac: float
    """Share of tokens that are masked and predicted, 0 without masks."""
    num_labels: int
    """Number of classes, 0 if labels are tokens."""
    problem: ProblemType

    @property
    def is_generated(self) -> bool:
        """Whether a trained model can generate targets, token by token."""
        return self.is_causal or self.length > 0


def ranks_of(keys: Distributed) -> Ranks:
    """Return the facts about processes."""
    option, stage = keys.option, STAGE.get(keys.option, 0)
    size = keys.num_processes, keys.num_nodes, keys.timeout_s, keys.p2p
    fsdp = keys if isinstance(keys, FSDP) else None
    shards = fsdp.shards if fsdp else keys.num_processes if stage else 1
    wraps = option == "ddp", option == "dp"
    return Ranks(option, *size, stage, fsdp, shards, keys.deepspeed_config, *wraps)


def targets_of(task: Task, data: Data) -> Targets:
    """Return the facts about targets."""
    length = (getattr(task, "target_len", None) or data.seq_len) if task.has_target else 0
    counts = getattr(task, "mask_frac", 0.0), getattr(task, "num_labels", 0)
    return Targets(task.option, task.per_token, task.is_causal, length, *counts, task.problem)
