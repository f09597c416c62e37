"""From a configuration to the size of its model."""

from collections import OrderedDict
from collections.abc import Callable
from math import prod

from eke.common.errors import ConfigError, Problem
from eke.config.schema import Adapters, Config
from eke.models.families import FAMILIES, VALID_TASKS
from eke.models.sizes.adapters import adapt, choose_targets, linear_layers
from eke.models.sizes.flops import SampleMeans, full_samples, training_flops
from eke.models.sizes.parameters import ModelSize
from eke.models.sizes.predicted_positions import with_sparse_head
from eke.models.sizes.structure import Structure, Tokens

MAX_KEPT = 16
"""Models whose tensors are kept: a sweep, or a search for the fastest run, asks for few models,
each some thousand times."""

_kept: OrderedDict[str, Structure] = OrderedDict()


def _once(content: str, make: Callable[[], Structure]) -> Structure:
    """What was made of the same content before, or is made now."""
    found = _kept.pop(content, None) or make()
    _kept[content] = found  # the newest is the last
    if len(_kept) > MAX_KEPT:
        _kept.popitem(last=False)
    return found


def structure(config: Config) -> Structure:
    """The tensors and the attention of the model with its task head.

    Raises:
        ConfigError: if the family has no head for the task.
    """
    return _once(repr((config.model, config.task)), lambda: _structure(config))


def training_structure(config: Config) -> Structure:
    """The tensors as they are trained: with adapters, frozen and 4-bit weights.

    Raises:
        ConfigError: if the family has no head for the task.
    """
    sparse = config.kernels.sparse_prediction
    content = repr((config.model, config.task, config.peft, sparse))
    return _once(content, lambda: with_sparse_head(config, adapt(config, structure(config))))


def _structure(config: Config) -> Structure:
    family, task = config.model.family, config.task.option
    tasks = VALID_TASKS[family]
    if task not in tasks:
        why = f"{family} models have a head for {' and '.join(tasks)} only"
        raise ConfigError(Problem(path="task", value=task, why=why, fix=f"task={tasks[0]}"))
    return FAMILIES[family](config)


def _architecture(config: Config) -> str:
    return getattr(config.model, "model_type", config.model.family)


def model_size(config: Config, means: SampleMeans | None = None) -> ModelSize:
    """Parameters and training FLOPs, equal to what the real transformers class has.

    Adapters are counted among the trained parameters, and not among the model's.

    Args:
        config: of the run.
        means: of its samples; None where each has `data.seq_len` tokens.

    Raises:
        ConfigError: if the family has no head for the task.
    """
    parts = structure(config)
    trained = adapt(config, parts)
    multiplied = with_sparse_head(config, trained)
    known = parts.attention and _is_known(config)
    flops = training_flops(config, multiplied, means) if known else None
    samples = means or full_samples(config)
    tokens = samples.source + (samples.target if config.task.option == "seq2seq_lm" else 0)
    per_token = (Tokens.source, Tokens.target)
    return ModelSize(
        num_parameters=sum(prod(w.shape) for w in parts.weights),
        num_active_parameters=sum(w.num_active for w in parts.weights),
        num_trained_parameters=(
            sum(prod(w.shape) for w in trained.weights if w.trained) if _is_known(config) else None
        ),
        num_matmul_parameters=sum(w.num_active for w in parts.weights if w.tokens in per_token),
        flops_per_sample=flops.total if flops else None,
        flops_formula=flops.formula if flops else f"unknown for {_architecture(config)}",
        tokens_per_sample=tokens,
    )


def adapted_layers(config: Config) -> tuple[str, ...]:
    """Names of the adapted layers, from the Transformer layer on, sorted; none where unknown.

    Raises:
        ConfigError: if the family has no head for the task.
    """
    if not isinstance(config.peft, Adapters):
        return ()
    return tuple(sorted(choose_targets(config, linear_layers(structure(config))).modules))


def _is_known(config: Config) -> bool:
    """Whether it is known what is trained: adapters go by the names of layers."""
    return config.model.family != "other" or not isinstance(config.peft, Adapters)
