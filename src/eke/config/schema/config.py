"""Root of the configuration tree and its registration with Hydra."""

from collections.abc import Sequence
from dataclasses import dataclass, field, make_dataclass, replace
from typing import Any

from eke.common.masking import is_secret
from eke.config.schema import custom
from eke.config.schema import data as work
from eke.config.schema import model as models
from eke.config.schema import resources as res
from eke.config.schema import techniques as tech
from eke.config.schema.fields import Key, at_least, between

SCHEMA_VERSION = 1
"""Version of the schema, in the identity of every run. Increase it if a key changes meaning."""

_CLUSTER_GROUPS = ("resources", "slurm")
"""Groups that only cluster launchers read."""

LAUNCH_GROUPS = ("launcher", *_CLUSTER_GROUPS)
"""Groups that determine how runs start, not their results."""

ENTRIES: dict[str, type] = {"metrics": custom.MetricEntry, "callbacks": custom.CallbackEntry}
"""Groups of entries with names of the user -> class of an entry."""

PRIVATE_GROUPS = ("slurm", "launcher")
"""Groups that may contain shell lines. They are not sent to trackers."""


@dataclass
class Config:
    """Configuration of a run: all keys that can be set."""

    model: models.Model = field(default_factory=models.Model, metadata=Key.GROUP)
    task: work.Task = field(default_factory=work.Task, metadata=Key.GROUP)
    data: work.Data = field(default_factory=work.Data, metadata=Key.GROUP)
    batch: work.Batch = field(default_factory=work.Batch, metadata=Key.ROUNDING)
    precision: tech.Precision = field(default_factory=tech.Precision, metadata=Key.ROUNDING)
    optimizer: tech.Optimizer = field(default_factory=tech.Optimizer, metadata=Key.BOTH)
    schedule: tech.Schedule = field(default_factory=tech.Schedule, metadata=Key.LEARNING)
    code: custom.CodeKeys = field(default_factory=custom.CodeKeys, metadata=Key.NONE)
    loss: custom.LossGroup = field(default_factory=custom.LossGroup, metadata=Key.LEARNING)
    metrics: dict[str, custom.MetricEntry] = field(default_factory=dict, metadata=Key.NONE)
    """Metrics of your own by name. Set each with `metrics.NAME.target=PATH`."""
    callbacks: dict[str, custom.CallbackEntry] = field(default_factory=dict, metadata=Key.NONE)
    """Callbacks of your own by name. Set each with `callbacks.NAME.target=PATH`."""
    memory: tech.Memory = field(default_factory=tech.Memory, metadata=Key.ROUNDING)
    attention: models.Attention = field(default_factory=models.Attention, metadata=Key.ROUNDING)
    compile: models.Compile = field(default_factory=models.Compile, metadata=Key.ROUNDING)
    kernels: models.Kernels = field(default_factory=models.Kernels, metadata=Key.ROUNDING)
    distributed: res.Distributed = field(default_factory=res.Distributed, metadata=Key.ROUNDING)
    offload: tech.Offload = field(default_factory=tech.Offload, metadata=Key.ROUNDING)
    dataloader: work.DataLoader = field(default_factory=work.DataLoader, metadata=Key.ROUNDING)
    peft: tech.Peft = field(default_factory=tech.Peft, metadata=Key.BOTH)
    engine: res.Engine = field(default_factory=res.Engine, metadata=Key.ROUNDING)
    trainer: res.Trainer = field(default_factory=res.Trainer, metadata=Key.BOTH)
    tracker: res.Tracker = field(default_factory=res.Tracker, metadata=Key.NONE)
    hardware: res.Hardware = field(default_factory=res.Hardware, metadata=Key.NONE)
    train: work.Train = field(default_factory=work.Train, metadata=Key.NONE)
    paths: res.Paths = field(default_factory=res.Paths, metadata=Key.NONE)
    launcher: res.LaunchKeys = field(default_factory=res.LaunchKeys, metadata=Key.NONE)
    resources: res.Resources = field(default_factory=res.Resources, metadata=Key.NONE)
    slurm: res.Slurm = field(default_factory=res.Slurm, metadata=Key.NONE)
    sweep: res.Sweep = field(default_factory=res.Sweep, metadata=Key.NONE)
    recipe: res.RecipeGoal = field(default_factory=res.RecipeGoal, metadata=Key.NONE)
    seed: int = field(default=0, metadata=Key.NONE | between(0, 2**32 - 1))  # NumPy's range
    """Seed of initial weights, sample order, masking and dropout."""
    repeat: int = field(default=0, metadata=Key.NONE | at_least(0))
    """Index of a repeat: another run of the same configuration. Reports combine all repeats."""
    rerun: bool = field(default=False, metadata=Key.NONE)
    """Run again, even if a finished run exists."""
    plan_only: bool = field(default=False, metadata=Key.NONE)
    """Print the plan and exit."""
    ignore_forecast: bool = field(default=False, metadata=Key.NONE)
    """Start runs even if the lowest memory forecast does not fit."""

    @property
    def ranks(self) -> res.Distributed:
        """Facts about the processes of the run."""
        return self.distributed

    @property
    def targets(self) -> work.Task:
        """Facts about the targets of the task."""
        return self.task

    @property
    def target_len(self) -> int:
        """Tokens of a separate target sequence, 0 without one."""
        wanted = getattr(self.task, "target_len", None) or self.data.seq_len
        return wanted if self.task.has_target else 0


# OmegaConf cannot add one key of an entry to a mapping of dataclasses.
_Composed = make_dataclass(
    "_Composed",
    [(name, dict[str, Any], field(default_factory=dict)) for name in ENTRIES],
    bases=(Config,),
)
_Composed.__module__ = __name__  # trees are pickled

VARIANTS: dict[str, dict[str, type]] = {
    "model": {
        "llama": models.LlamaModel,
        "mixtral": models.MixtralModel,
        "bert": models.BertModel,
        "gpt2": models.GPT2Model,
        "t5": models.T5Model,
        "pretrained": models.PretrainedModel,
        "custom": custom.CustomModel,
    },
    "task": {**work.TASKS, "custom": custom.CustomTask},
    "data": {
        "python_source": work.PythonSource,
        "synthetic": work.Synthetic,
        "text": work.Text,
        "files": work.Files,
        "hub": work.Hub,
        "chat": work.Chat,
        "chat_hub": work.ChatHub,
        "mix": work.Mix,
        "custom": custom.CustomData,
    },
    "optimizer": {**tech.OPTIMIZERS, "custom": custom.CustomOptimizer},
    "schedule": {
        "constant": tech.Schedule,
        "decaying": tech.DecayingSchedule,
        "wsd": tech.WSDSchedule,
        "custom": custom.CustomSchedule,
    },
    "loss": {"auto": custom.LossGroup, "custom": custom.CustomLoss},
    "distributed": {"copies": res.Distributed, "fsdp": res.FSDP},
    "offload": {"memory": tech.Offload, "nvme": tech.NvmeOffload},
    "peft": tech.PEFTS,
}
"""Groups whose fields depend on the option: schema name -> class, named by the option file."""


def resolve_attention(config: Config) -> Config:
    """Return the configuration with sdpa or eager in place of `attention=auto`."""
    if config.attention.option != models.AUTO_ATTENTION:
        return config
    lacks = isinstance(config.model, models.PretrainedModel) and config.model.supports_sdpa is False
    attention = replace(config.attention, option="eager" if lacks else "sdpa")
    return replace(config, attention=attention)


def _variable(name: str, *default: str | None) -> object:
    """Resolve `${oc.env:NAME}`. Secrets are rejected, because files would then contain them."""
    from omegaconf.errors import InterpolationResolutionError
    from omegaconf.resolvers.oc import env

    if is_secret(name):
        raise InterpolationResolutionError(
            f"{name} looks like a secret. Files must not contain secrets"
        )
    return env(name, *default)


def register() -> None:
    """Register the root schema and its variants in Hydra's ConfigStore."""
    # Workers, reports and preparations do not need Hydra, and its import is slow.
    import omegaconf
    from hydra.core.config_store import ConfigStore

    # omegaconf 2.4 deprecates register_new_resolver. In 2.3, register_resolver is another function.
    new = "new_" if omegaconf.__version__.startswith("2.3.") else ""
    getattr(omegaconf.OmegaConf, f"register_{new}resolver")("oc.env", _variable, replace=True)
    store = ConfigStore.instance()
    if "schema.yaml" in store.repo:  # Hydra 1.4 warns about a repeated store
        return
    store.store(name="schema", node=_Composed, provider="eke")
    for group, variants in VARIANTS.items():
        for name, variant in variants.items():
            store.store(group=f"schema/{group}", name=name, node=variant, provider="eke")


def unused_cluster_overrides(overrides: Sequence[str], launcher: str = "local") -> list[str]:
    """Return a warning per override that requires the launcher of a cluster, not `launcher`."""
    starts = tuple(f"{group}{end}" for group in _CLUSTER_GROUPS for end in ".=")
    return [
        f"{text} has no effect with hydra/launcher={launcher}, which does not use a cluster"
        for text in overrides
        if text.lstrip("+").startswith(starts)
    ]
