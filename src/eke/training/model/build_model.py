"""Construction of models of transformers with random weights or from a checkpoint."""

from contextlib import nullcontext
from typing import Any, cast

import torch

from eke.common.text import BOS, EOS, PAD
from eke.config.schema import Config, CustomModel, PretrainedModel
from eke.models.families import family_of
from eke.plan.planner import Plan
from eke.training.custom.build import build_own_model
from eke.training.distributed.parts import Parts
from eke.training.model.adapters import convert_linear_layers, freeze_named, is_four_bit, quantise
from eke.training.model.attention_kernels import ATTENTION
from eke.training.model.load_pretrained import (
    LoadReport,
    checkpoint_configuration,
    is_padding_alone,
    load_pretrained,
    set_special_ids,
    train_padding_embedding,
)
from eke.training.model.model_checks import (
    HEADS,
    cast_experts,
    drawn_in_float32,
    freeze_unused,
    preserve_rng_state,
)
from eke.training.model.number_formats import base_dtype


def build_model(plan: Plan, device: torch.device) -> torch.nn.Module:
    """Return only the model of `build_model_and_report`."""
    return build_model_and_report(plan, device)[0]


def build_model_and_report(
    plan: Plan, device: torch.device, parts: Parts | None = None
) -> tuple[torch.nn.Module, LoadReport]:
    """Build the planned model on `device`, in training mode, with a report.

    Random weights depend only on sizes, task, seed and device type, except for rounding. The
    caller's random state is kept. Unused parameters and those of `model.freeze` are frozen. With
    peft=qlora weights become 4-bit. With `parts` the model is on the meta device, and `parts` hold
    this rank's rows. Raises RunError: A checkpoint does not match the plan.
    """
    four_bit = is_four_bit(plan) and device.type != "meta"
    place = torch.device("cpu") if four_bit else device
    if isinstance(plan.config.model, CustomModel):
        model, report = build_own_model(plan, place, parts), LoadReport()
    elif isinstance(plan.config.model, PretrainedModel):
        model, report = load_pretrained(plan, place, parts)
    else:
        model, report = _random_model(plan, place, parts), LoadReport()
    with parts or nullcontext():
        freeze_named(plan, model)
        if not isinstance(plan.config.model, CustomModel):
            train_padding_embedding(plan, model)
        freeze_unused(model)
        cast_experts(model)
        convert_linear_layers(plan, model, device)
        if four_bit:
            model = quantise(plan, model, device, parts)
    return model.train(), report


def _random_model(plan: Plan, device: torch.device, parts: Parts | None) -> torch.nn.Module:
    import transformers

    config = plan.config
    model_config = model_configuration(plan)
    pad = model_config.pad_token_id
    if pad is not None and not is_padding_alone(plan.vocabulary, pad):
        model_config.pad_token_id = None  # draws its row too, and is restored for classifiers
    head = getattr(transformers, HEADS[plan.targets.option])
    dtype = base_dtype(plan)
    random, cut = preserve_rng_state(device, config.seed), parts.drawn() if parts else nullcontext()
    with random, device, drawn_in_float32(dtype), cut:
        model = head.from_config(
            model_config, dtype=dtype, attn_implementation=ATTENTION[config.attention.option]
        )
    model.config.pad_token_id = pad
    return cast(torch.nn.Module, model)


def model_configuration(plan: Plan) -> Any:
    """Return transformers' configuration of the planned model. RunError: unusable checkpoint."""
    if isinstance(plan.config.model, PretrainedModel):
        return checkpoint_configuration(plan)
    config = make_model_config(plan.config)
    config.use_cache = False
    set_special_ids(config, plan)
    return config


def make_model_config(config: Config) -> Any:
    """Return transformers' configuration of a model with random weights, without special ids."""
    import transformers

    family = family_of(config)
    assert family.config_arguments is not None, family.name
    arguments: dict[str, Any] = {
        "vocab_size": config.model.vocab_size,
        "tie_word_embeddings": config.model.tie_word_embeddings,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        **family.config_arguments(config),
    }
    if num_labels := config.targets.num_labels:
        arguments["num_labels"] = num_labels
        arguments["problem_type"] = config.targets.problem.full_name
    return getattr(transformers, family.config_class)(**arguments)
