"""Schemas of the user's own code, which is named by import path: `target=package.module.Name`."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from eke.config.schema.data import Data, Task
from eke.config.schema.fields import Key, OptionGroup, at_least, below
from eke.config.schema.model import Model
from eke.config.schema.techniques import Optimizer, Schedule


@dataclass
class CustomModel(Model):
    """Model class or function of your own.

    Users set the first four keys, `freeze` and `layers`. eke measures the rest before it plans.
    """

    option: str = "custom"
    family: str = field(default="custom", metadata=Key.GROUP)
    """Model class, set by the option file."""
    target: str = field(default="???", metadata=Key.GROUP)
    """Import path of a class or function that returns an `nn.Module`: `package.module.Name`."""
    args: dict[str, Any] = field(default_factory=dict, metadata=Key.GROUP)
    """Arguments of `target` by name. Set each with `model.args.NAME=VALUE`."""
    inputs: dict[str, str] = field(default_factory=dict, metadata=Key.GROUP)
    """Parameter of `forward` -> key of the batch, if the names differ. Set each with
    `model.inputs.PARAMETER=KEY`."""
    layers: list[str] | None = field(default=None, metadata=Key.ROUNDING)
    """Class names of repeated layers. Example: [Block]. null: members of lists of modules that have
    one class."""
    dropout: float | None = field(default=None, metadata=Key.SWITCHED | below(0, 1))
    """Filled in: always null, as `args` have the probability."""
    tie_word_embeddings: bool = field(default=False, metadata=Key.GROUP)
    """Filled in."""
    num_parameters: int | None = field(default=None, metadata=Key.GROUP | at_least(0))
    """Filled in: number of elements of all parameters."""
    hidden_size: int = field(default=0, metadata=Key.GROUP | at_least(0))
    """Filled in."""
    shapes: list[list[int]] = field(default_factory=list, metadata=Key.GROUP)
    """Filled in: shape of each parameter."""
    flops_per_sample: int | None = field(default=None, metadata=Key.GROUP | at_least(0))
    """Filled in: FLOPs of a training step per sample. null: not counted."""
    num_hidden_layers: int = field(default=0, metadata=Key.GROUP | at_least(0))
    """Filled in: number of repeated layers."""
    num_attention_heads: int = field(default=0, metadata=Key.GROUP | at_least(0))
    """Filled in."""
    intermediate_size: int = field(default=0, metadata=Key.GROUP | at_least(0))
    """Filled in."""
    vocab_size: int = field(default=0, metadata=Key.GROUP | at_least(0))
    """Filled in."""


@dataclass
class CustomData(Data):
    """Data set of your own."""

    option: str = "custom"
    target: str = field(default="???", metadata=Key.GROUP)
    """Import path of a class or function that returns a data set of torch. It may have a parameter
    `split` (train or eval)."""
    args: dict[str, Any] = field(default_factory=dict, metadata=Key.GROUP)
    """Arguments of `target` by name. Set each with `data.args.NAME=VALUE`."""
    eval_args: dict[str, Any] = field(default_factory=dict, metadata=Key.GROUP)
    """Arguments that replace `args` for evaluation, if `target` has no parameter `split`."""
    collate: str | None = field(default=None, metadata=Key.GROUP)
    """Import path of a function of a list of samples that returns a batch. null: torch's
    function."""
    keys: list[str] = field(default_factory=list, metadata=Key.GROUP)
    """Names of the items of a sample that is a tuple. Example: [image,label]."""
    files: list[str] = field(default_factory=list, metadata=Key.GROUP)
    """Files and folders with content that the data set reads, besides those in `args`."""
    train_length: int | None = field(default=None, metadata=Key.GROUP | at_least(0))
    """Filled in: number of training samples. null: a stream."""
    eval_length: int | None = field(default=None, metadata=Key.GROUP | at_least(0))
    """Filled in: number of evaluation samples. null: a stream."""
    content: str = field(default="", metadata=Key.GROUP)
    """Filled in: hash of the files, and of 64 samples of each split."""
    repeatable: bool = field(default=True, metadata=Key.GROUP)
    """Each sample depends only on seed, epoch and index. false: reading it twice may differ."""


@dataclass
class CustomTask(Task):
    """Objective of your own code: the loss that `loss` or the model computes."""

    option: str = "custom"
    per_token, is_causal = False, False


@dataclass
class CustomOptimizer(Optimizer):
    """Optimizer of your own."""

    option: str = "custom"
    target: str = field(default="???", metadata=Key.BOTH)
    """Import path of a class or function of parameter groups and `lr` that returns an optimizer of
    torch."""
    args: dict[str, Any] = field(default_factory=dict, metadata=Key.BOTH)
    """Further arguments of `target` by name. Set each with `optimizer.args.NAME=VALUE`."""


@dataclass
class CustomSchedule(Schedule):
    """Learning rate by a function of your own."""

    option: str = "custom"
    target: str = field(default="???", metadata=Key.LEARNING)
    """Import path of a function of step and number of steps that returns a share of the peak."""
    args: dict[str, Any] = field(default_factory=dict, metadata=Key.LEARNING)
    """Further arguments of `target` by name. Set each with `schedule.args.NAME=VALUE`."""


@dataclass
class LossGroup(OptionGroup):
    """Training loss, and the number that divides it."""

    option: str = "auto"
    per: str | None = field(default=None, metadata=Key.LEARNING)
    """Divisor of a mean loss. samples: the number of samples. A key of the batch: its values of at
    least 0. Or the import path of a function of the batch. null: samples."""
    couples_batch: bool = field(default=False, metadata=Key.LEARNING)
    """The samples of a micro-batch change each other's loss. Example: other samples as negatives.
    Each micro-batch then has negatives of its own."""


@dataclass
class CustomLoss(LossGroup):
    """Loss function of your own."""

    option: str = "custom"
    target: str = field(default="???", metadata=Key.LEARNING)
    """Import path of a function of model output and batch. It returns a mean, or sum and number."""
    args: dict[str, Any] = field(default_factory=dict, metadata=Key.LEARNING)
    """Further arguments of `target` by name. Set each with `loss.args.NAME=VALUE`."""


@dataclass
class MetricEntry:
    """Metric of your own, computed in each evaluation."""

    target: str = "???"
    """Import path of a class with `update`, `compute` and `reset`, or of a function of output and
    batch."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments of `target` by name."""
    inputs: dict[str, str] = field(default_factory=dict)
    """Parameter of `update` -> key of the batch or output."""


class OnError(Enum):
    """Reaction to an exception in a callback."""

    warn = "warn"
    """Switch the callback off and continue."""
    fail = "fail"
    """End the run."""


@dataclass
class CallbackEntry:
    """Callback of your own, called at events of the run."""

    target: str = "???"
    """Import path of a class with methods such as `on_step_end`."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments of `target` by name."""
    on_error: OnError = OnError.warn
    """Reaction to an exception. warn: switch the callback off. fail: end the run."""


@dataclass
class CodeKeys:
    """Place of your own code."""

    path: str | None = field(default=None, metadata=Key.NONE)
    """Folder with the modules that targets name. null: the current folder, its `src`, or the parent
    of --config-dir."""
