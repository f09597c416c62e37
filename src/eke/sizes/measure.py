"""From a configuration to the size of its model."""

from math import prod

from eke.errors import ConfigError, Problem
from eke.schema import Config
from eke.sizes.families import FAMILIES, VALID_TASKS
from eke.sizes.flops import training_flops
from eke.sizes.size import ModelSize
from eke.sizes.structure import Structure, Tokens


def structure(config: Config) -> Structure:
    """The tensors and the attention of the model with its task head.

    Raises:
        ConfigError: if the family has no head for the task.
    """
    family, task = config.model.family, config.task.option
    tasks = VALID_TASKS[family]
    if task not in tasks:
        why = f"{family} models have a head for {' and '.join(tasks)} only"
        raise ConfigError(Problem(path="task", value=task, why=why, fix=f"task={tasks[0]}"))
    return FAMILIES[family](config)


def parameter_shapes(config: Config) -> tuple[tuple[int, ...], ...]:
    """Shape of every trainable tensor, shared ones once; the order is not the model's.

    Raises:
        ConfigError: if the family has no head for the task.
    """
    return tuple(weight.shape for weight in structure(config).weights)


def model_size(config: Config) -> ModelSize:
    """Parameters and training FLOPs, equal to what the real transformers class has.

    Raises:
        ConfigError: if the family has no head for the task.
    """
    parts = structure(config)
    flops = training_flops(config, parts)
    per_token = (Tokens.source, Tokens.target)
    return ModelSize(
        num_parameters=sum(prod(w.shape) for w in parts.weights),
        num_matmul_parameters=sum(prod(w.shape) for w in parts.weights if w.tokens in per_token),
        flops_per_sample=flops.total,
        flops_formula=flops.formula,
    )
