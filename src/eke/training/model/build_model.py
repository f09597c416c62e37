"""Model construction with transformers' classes, with random weights or from a checkpoint.

transformers is imported inside the functions: naming a builder must not cost its import.
"""

import logging
from collections.abc import Callable
from typing import Any, cast

import torch

from eke.common.text import BOS, EOS, PAD
from eke.config.schema import (
    BertModel,
    Config,
    GPT2Model,
    LlamaModel,
    MixtralModel,
    PretrainedModel,
    SequenceClassification,
    T5Model,
)
from eke.plan.planner import Plan
from eke.training.model.adapters import convert_linear_layers, is_four_bit, quantise
from eke.training.model.attention_kernels import ATTENTION
from eke.training.model.load_pretrained import (
    LoadReport,
    checkpoint_configuration,
    is_padding_alone,
    learn_padding,
    load_pretrained,
    set_special_ids,
)
from eke.training.model.number_formats import weights_dtype
from eke.training.model.unused import HEADS, cast_experts, drawn_in_float32, freeze_unused

log = logging.getLogger(__name__)


def build_model(plan: Plan, device: torch.device) -> torch.nn.Module:
    """Build the model of the plan, and log the report.

    Raises:
        RunError: a checkpoint does not hold what the plan was made for.
    """
    model, report = build_model_and_report(plan, device)
    for warning in report.warnings:
        log.warning(warning)
    return model


def build_model_and_report(plan: Plan, device: torch.device) -> tuple[torch.nn.Module, LoadReport]:
    """Build the model of the plan on `device`, in training mode, with a report.

    Its weights are float32; with peft=qlora those of the Transformer layers become 4-bit on their
    way from the host to the device.

    Random weights depend on sizes, task and seed alone, not on precision (but for rounding),
    attention or compilation (and on the device type, whose generator draws them). Weights are
    created or loaded on the device, once; the caller's random state is left as it was. Parameters
    that no output of this task depends on are frozen. The loss is computed from the logits, so
    `forward` takes no labels.

    Args:
        plan: the run; its configuration's model, task, attention and seed are read.
        device: where the weights are created.

    Raises:
        RunError: a checkpoint does not hold what the plan was made for.
    """
    four_bit = is_four_bit(plan) and device.type != "meta"
    place = torch.device("cpu") if four_bit else device
    if isinstance(plan.config.model, PretrainedModel):
        model, report = load_pretrained(plan, place)
    else:
        model, report = _random_model(plan, place), LoadReport()
    learn_padding(plan, model)
    freeze_unused(model)
    cast_experts(model)
    convert_linear_layers(plan, model, device)
    if four_bit:
        model = quantise(plan, model, device)
    return model.train(), report


def _random_model(plan: Plan, device: torch.device) -> torch.nn.Module:
    """Transformers' own initialisation, run on the device: its classes allocate where they draw."""
    import transformers

    config = plan.config
    model_config = model_configuration(plan)
    pad = model_config.pad_token_id
    if pad is not None and not is_padding_alone(plan.vocabulary, pad):
        model_config.pad_token_id = None  # drawn as any other token; classifiers need it below
    head = getattr(transformers, HEADS[config.task.option])
    forked = [device] if device.type == "cuda" else []
    dtype = weights_dtype(plan)
    with torch.random.fork_rng(devices=forked), device, drawn_in_float32(dtype):
        torch.manual_seed(config.seed)
        model = head.from_config(
            model_config,
            dtype=dtype,
            attn_implementation=ATTENTION[config.attention.option],
        )
    model.config.pad_token_id = pad
    return cast(torch.nn.Module, model)


def model_configuration(plan: Plan) -> Any:
    """Transformers' configuration of the planned model, as it is built and saved.

    Raises:
        RunError: a checkpoint's cannot be used.
    """
    if isinstance(plan.config.model, PretrainedModel):
        return checkpoint_configuration(plan)
    config = BUILDERS[plan.config.model.family](plan.config)
    config.use_cache = False
    set_special_ids(config, plan)
    return config


def _common(config: Config) -> dict[str, Any]:
    """Arguments that mean the same in every family's configuration class."""
    arguments: dict[str, Any] = {
        "vocab_size": config.model.vocab_size,
        "tie_word_embeddings": config.model.tie_word_embeddings,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    if config.task.option == "sequence_classification":
        arguments["num_labels"] = cast(SequenceClassification, config.task).num_labels
    return arguments


def _decoder(config: Config) -> dict[str, Any]:
    """Arguments of the Llama-like decoders, whose only dropout is inside attention."""
    model = cast(LlamaModel, config.model)
    return {
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        # Qwen3 and Mixtral have defaults of their own for what is None here.
        "num_key_value_heads": model.num_key_value_heads or model.num_attention_heads,
        "head_dim": model.head_dim or model.hidden_size // model.num_attention_heads,
        "intermediate_size": model.intermediate_size,
        "max_position_embeddings": model.max_position_embeddings,
        "rope_parameters": _rope(model),
        "rms_norm_eps": model.rms_norm_eps,
        "attention_dropout": model.dropout,
        **_common(config),
    }


def _rope(model: LlamaModel) -> dict[str, Any]:
    """Rotary positions, plain or stretched as in Llama 3.1 and 3.2.

    Source: transformers' modeling_rope_utils (rope_type llama3); the constants are those of
    meta-llama/Llama-3.2-1B's config.json.
    """
    if model.rope_scaling_factor is None:
        return {"rope_type": "default", "rope_theta": model.rope_theta}
    return {
        "rope_type": "llama3",
        "rope_theta": model.rope_theta,
        "factor": model.rope_scaling_factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _llama(config: Config) -> Any:
    """LlamaConfig."""
    from transformers import LlamaConfig

    return LlamaConfig(**_decoder(config))


def _qwen3(config: Config) -> Any:
    """Qwen3Config."""
    from transformers import Qwen3Config

    return Qwen3Config(**_decoder(config))


def _mixtral(config: Config) -> Any:
    """MixtralConfig; without router logits in its output, since nothing here adds their loss."""
    from transformers import MixtralConfig

    model = cast(MixtralModel, config.model)
    return MixtralConfig(
        num_local_experts=model.num_local_experts,
        num_experts_per_tok=model.num_experts_per_tok,
        output_router_logits=False,
        **_decoder(config),
    )


def _bert(config: Config) -> Any:
    """BertConfig."""
    from transformers import BertConfig

    model = cast(BertModel, config.model)
    return BertConfig(
        hidden_size=model.hidden_size,
        num_hidden_layers=model.num_hidden_layers,
        num_attention_heads=model.num_attention_heads,
        intermediate_size=model.intermediate_size,
        max_position_embeddings=model.max_position_embeddings,
        type_vocab_size=model.type_vocab_size,
        hidden_dropout_prob=model.dropout,
        attention_probs_dropout_prob=model.dropout,
        classifier_dropout=model.dropout,
        **_common(config),
    )


def _gpt2(config: Config) -> Any:
    """GPT2Config."""
    from transformers import GPT2Config

    model = cast(GPT2Model, config.model)
    return GPT2Config(
        n_embd=model.hidden_size,
        n_layer=model.num_hidden_layers,
        n_head=model.num_attention_heads,
        n_inner=model.intermediate_size,
        n_positions=model.max_position_embeddings,
        resid_pdrop=model.dropout,
        embd_pdrop=model.dropout,
        attn_pdrop=model.dropout,
        **_common(config),
    )


def _t5(config: Config) -> Any:
    """T5Config; transformers has one dropout for the whole model and one for its classifier."""
    from transformers import T5Config

    model = cast(T5Model, config.model)
    return T5Config(
        d_model=model.hidden_size,
        d_kv=model.head_dim or model.hidden_size // model.num_attention_heads,
        d_ff=model.intermediate_size,
        num_layers=model.num_hidden_layers,
        num_decoder_layers=model.num_decoder_layers,
        num_heads=model.num_attention_heads,
        feed_forward_proj="gated-gelu" if model.gated else "relu",
        dropout_rate=model.dropout,
        classifier_dropout=model.dropout,
        decoder_start_token_id=PAD,
        **_common(config),
    )


BUILDERS: dict[str, Callable[[Config], Any]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "bert": _bert,
    "gpt2": _gpt2,
    "t5": _t5,
}
"""`model.family` -> transformers' configuration object."""
