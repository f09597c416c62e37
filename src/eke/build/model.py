"""The model: transformers' own classes with random weights, from sizes alone; no network.

transformers is imported inside the functions: naming a builder must not cost its import.
"""

from collections.abc import Callable
from typing import Any, cast

import torch

from eke.build.attention import ATTENTION
from eke.plan import Plan
from eke.schema import BertModel, Config, GPT2Model, LlamaModel, SequenceClassification, T5Model
from eke.tokens import BOS, EOS, PAD

HEADS: dict[str, str] = {
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "sequence_classification": "AutoModelForSequenceClassification",
    "seq2seq_lm": "AutoModelForSeq2SeqLM",
}
"""`task.option` -> transformers' class with that head."""


def build_model(plan: Plan, device: torch.device) -> torch.nn.Module:
    """The model of the plan on `device`: float32, training mode, random weights.

    The weights depend on sizes, task and seed alone, not on precision, attention or compilation
    (and on the device type, whose generator draws them). They are created on the device, once; the
    caller's random state is left as it was. The loss is computed from the logits, so `forward`
    takes no labels.

    Args:
        plan: the run; its configuration's model, task, attention and seed are read.
        device: where the weights are created.
    """
    import transformers

    config = plan.config
    model_config = BUILDERS[config.model.family](config)
    model_config.use_cache = False
    head = getattr(transformers, HEADS[config.task.option])
    forked = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=forked), device:
        torch.manual_seed(config.seed)
        model = head.from_config(
            model_config,
            dtype=torch.float32,
            attn_implementation=ATTENTION[config.attention.option],
        )
    return cast(torch.nn.Module, model.train())


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


def _llama(config: Config) -> Any:
    """LlamaConfig: the only dropout of the family is inside attention."""
    from transformers import LlamaConfig

    model = cast(LlamaModel, config.model)
    return LlamaConfig(
        hidden_size=model.hidden_size,
        num_hidden_layers=model.num_hidden_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        intermediate_size=model.intermediate_size,
        max_position_embeddings=model.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
        rms_norm_eps=model.rms_norm_eps,
        attention_dropout=model.dropout,
        **_common(config),
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
    "bert": _bert,
    "gpt2": _gpt2,
    "t5": _t5,
}
"""`model.family` -> transformers' configuration object."""
