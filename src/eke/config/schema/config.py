"""The root of the configuration tree, and its registration with Hydra."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from eke.common.masking import is_secret
from eke.config.schema import data as work
from eke.config.schema import model as models
from eke.config.schema import resources as surroundings
from eke.config.schema.data import DataLoader
from eke.config.schema.fields import Key, at_least, between
from eke.config.schema.model import AUTO_ATTENTION, Attention, Compile, Kernels
from eke.config.schema.resources import (
    DISTRIBUTEDS,
    Distributed,
    Engine,
    Resources,
    Slurm,
    Sweep,
    Trainer,
)
from eke.config.schema.techniques import (
    OFFLOADS,
    OPTIMIZERS,
    PEFTS,
    SCHEDULES,
    Memory,
    Offload,
    Optimizer,
    Peft,
    Precision,
    Schedule,
)

SCHEMA_VERSION = 1
"""Part of every run's identity: raise it when the meaning of an existing key changes."""

CLUSTER_GROUPS = ("resources", "slurm")
"""Groups that only the launcher of a cluster reads."""

LAUNCH_GROUPS = ("launcher", *CLUSTER_GROUPS)
"""Groups that say how runs are started, not what they compute."""

PRIVATE_GROUPS = ("slurm", "launcher")
"""Groups with lines of shell, which no tracker is sent."""


@dataclass
class Config:
    """What the user wants; every key that can be set."""

    model: models.Model = field(default_factory=models.Model, metadata=Key.GROUP)
    task: work.Task = field(default_factory=work.Task, metadata=Key.GROUP)
    data: work.Data = field(default_factory=work.Data, metadata=Key.GROUP)
    batch: work.Batch = field(default_factory=work.Batch, metadata=Key.ROUNDING)
    precision: Precision = field(default_factory=Precision, metadata=Key.ROUNDING)
    optimizer: Optimizer = field(default_factory=Optimizer, metadata=Key.BOTH)
    schedule: Schedule = field(default_factory=Schedule, metadata=Key.LEARNING)
    memory: Memory = field(default_factory=Memory, metadata=Key.ROUNDING)
    attention: Attention = field(default_factory=Attention, metadata=Key.ROUNDING)
    compile: Compile = field(default_factory=Compile, metadata=Key.ROUNDING)
    kernels: Kernels = field(default_factory=Kernels, metadata=Key.ROUNDING)
    distributed: Distributed = field(default_factory=Distributed, metadata=Key.ROUNDING)
    offload: Offload = field(default_factory=Offload, metadata=Key.ROUNDING)
    dataloader: DataLoader = field(default_factory=DataLoader, metadata=Key.ROUNDING)
    peft: Peft = field(default_factory=Peft, metadata=Key.BOTH)
    engine: Engine = field(default_factory=Engine, metadata=Key.ROUNDING)
    trainer: Trainer = field(default_factory=Trainer, metadata=Key.BOTH)
    tracker: surroundings.Tracker = field(default_factory=surroundings.Tracker, metadata=Key.NONE)
    hardware: surroundings.Hardware = field(
        default_factory=surroundings.Hardware, metadata=Key.NONE
    )
    train: work.Train = field(default_factory=work.Train, metadata=Key.NONE)
    paths: surroundings.Paths = field(default_factory=surroundings.Paths, metadata=Key.NONE)
    launcher: surroundings.LaunchKeys = field(
        default_factory=surroundings.LaunchKeys, metadata=Key.NONE
    )
    resources: Resources = field(default_factory=Resources, metadata=Key.NONE)
    slurm: Slurm = field(default_factory=Slurm, metadata=Key.NONE)
    sweep: Sweep = field(default_factory=Sweep, metadata=Key.NONE)
    recipe: surroundings.RecipeGoal = field(
        default_factory=surroundings.RecipeGoal, metadata=Key.NONE
    )
    seed: int = field(default=0, metadata=Key.NONE | between(0, 2**32 - 1))  # what NumPy takes
    """Seed of initial weights, sample order, masking and dropout."""
    repeat: int = field(default=0, metadata=Key.NONE | at_least(0))
    """Number of a repetition: another run of the same configuration, never a factor in reports."""
    rerun: bool = field(default=False, metadata=Key.NONE)
    """Run again alongside a finished run instead of answering from its record."""
    plan_only: bool = field(default=False, metadata=Key.NONE)
    """Print the plan and stop."""
    ignore_forecast: bool = field(default=False, metadata=Key.NONE)
    """Start even what cannot fit into memory by the lowest forecast."""


VARIANTS: dict[str, dict[str, type]] = {
    "model": models.MODELS,
    "task": {
        "causal_lm": work.Task,
        "masked_lm": work.MaskedLM,
        "sequence_classification": work.SequenceClassification,
        "seq2seq_lm": work.Seq2SeqLM,
    },
    "data": {
        "python_source": work.PythonSource,
        "synthetic": work.Synthetic,
        "text": work.Text,
        "files": work.Files,
        "hub": work.Hub,
        "chat": work.Chat,
        "chat_hub": work.ChatHub,
        "mix": work.Mix,
    },
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "distributed": DISTRIBUTEDS,
    "offload": OFFLOADS,
    "peft": PEFTS,
}
"""Groups whose options have different fields: schema name -> class, named by the option's file."""


def resolve_attention(config: Config) -> Config:
    """The configuration with an implementation in place of `attention=auto`."""
    if config.attention.option != AUTO_ATTENTION:
        return config
    lacks = isinstance(config.model, models.PretrainedModel) and config.model.supports_sdpa is False
    attention = replace(config.attention, option="eager" if lacks else "sdpa")
    return replace(config, attention=attention)


def _variable(name: str, *default: str | None) -> object:
    """`${oc.env:NAME}`, unless that is a secret, which files would then hold."""
    from omegaconf.errors import InterpolationResolutionError
    from omegaconf.resolvers.oc import env

    if is_secret(name):
        raise InterpolationResolutionError(f"{name} is a secret by its name: no file may hold it")
    return env(name, *default)


def register() -> None:
    """Put the root schema and the variants where Hydra's defaults lists find them."""
    # Here, and not above: workers, reports and preparations have a plan and need no Hydra, whose
    # import is the longest part of eke's own.
    import omegaconf
    from hydra.core.config_store import ConfigStore

    # omegaconf 2.4 deprecates the name with "new"; 2.3's other one is an older function.
    new = "new_" if omegaconf.__version__.startswith("2.3.") else ""
    getattr(omegaconf.OmegaConf, f"register_{new}resolver")("oc.env", _variable, replace=True)
    store = ConfigStore.instance()
    if "schema.yaml" in store.repo:  # Hydra 1.4 warns of the same once more
        return
    store.store(name="schema", node=Config, provider="eke")
    for group, variants in VARIANTS.items():
        for name, variant in variants.items():
            store.store(group=f"schema/{group}", name=name, node=variant, provider="eke")


def unused_cluster_overrides(overrides: Sequence[str], launcher: str = "local") -> list[str]:
    """Warnings about overrides that only the launcher of a cluster reads, and not `launcher`."""
    starts = tuple(f"{group}{end}" for group in CLUSTER_GROUPS for end in ".=")
    return [
        f"{text} has no effect with hydra/launcher={launcher}, which is not a cluster's"
        for text in overrides
        if text.lstrip("+").startswith(starts)
    ]
