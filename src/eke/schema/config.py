"""The root of the configuration tree, and its registration with Hydra."""

from dataclasses import dataclass, field

from hydra.core.config_store import ConfigStore

from eke.schema import model as models
from eke.schema import surroundings, technique, work
from eke.schema.limits import at_least, between

SCHEMA_VERSION = 1
"""Part of every run's identity: raise it when the meaning of an existing key changes."""


@dataclass
class Config:
    """What the user wants; every key that can be typed."""

    model: models.Model = field(default_factory=models.Model)
    task: work.Task = field(default_factory=work.Task)
    data: work.Data = field(default_factory=work.Data)
    batch: work.Batch = field(default_factory=work.Batch)
    precision: technique.Precision = field(default_factory=technique.Precision)
    optimizer: technique.Optimizer = field(default_factory=technique.Optimizer)
    schedule: technique.Schedule = field(default_factory=technique.Schedule)
    memory: technique.Memory = field(default_factory=technique.Memory)
    attention: technique.Attention = field(default_factory=technique.Attention)
    compile: technique.Compile = field(default_factory=technique.Compile)
    distributed: technique.Distributed = field(default_factory=technique.Distributed)
    dataloader: technique.DataLoader = field(default_factory=technique.DataLoader)
    engine: technique.Engine = field(default_factory=technique.Engine)
    tracker: surroundings.Tracker = field(default_factory=surroundings.Tracker)
    hardware: surroundings.Hardware = field(default_factory=surroundings.Hardware)
    train: work.Train = field(default_factory=work.Train)
    paths: surroundings.Paths = field(default_factory=surroundings.Paths)
    seed: int = field(default=0, metadata=between(0, 2**32 - 1))  # what NumPy takes
    """Seed of initial weights, sample order, masking and dropout."""
    repeat: int = field(default=0, metadata=at_least(0))
    """Number of a repetition: another run of the same configuration, never a factor in reports."""
    rerun: bool = False
    """Run again beside a finished run instead of answering from its record."""
    plan_only: bool = False
    """Print the plan and stop."""


VARIANTS: dict[str, dict[str, type]] = {
    "model": {
        "llama": models.LlamaModel,
        "bert": models.BertModel,
        "gpt2": models.GPT2Model,
        "t5": models.T5Model,
    },
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
    },
    "optimizer": {
        "adamw": technique.AdamW,
        "adafactor": technique.Adafactor,
        "sgd": technique.SGD,
    },
    "schedule": {
        "constant": technique.Schedule,
        "decaying": technique.DecayingSchedule,
        "wsd": technique.WSDSchedule,
    },
}
"""Groups whose options have different fields: schema name -> class, named by the option's file."""


def register() -> None:
    """Put the root schema and the variants where Hydra's defaults lists find them."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config, provider="eke")
    for group, variants in VARIANTS.items():
        for name, variant in variants.items():
            store.store(group=f"schema/{group}", name=name, node=variant, provider="eke")
