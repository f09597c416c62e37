"""Rules about model, task and data."""

from eke.common.errors import Fix
from eke.common.text import BYTE_VOCABULARY
from eke.config.schema import (
    Adapters,
    BertModel,
    Compute,
    CustomModel,
    GPT2Model,
    LlamaModel,
    MaskedLM,
    MixtralModel,
    PretrainedModel,
    SequenceClassification,
    T5Model,
)
from eke.data.sources import BYTES, tokenizer_of
from eke.models.checkpoints.architecture import router_loss
from eke.models.families import FAMILIES, head_width
from eke.models.sizes import BFLOAT16_BYTES, computed_formats, decide_formats
from eke.rules.rule import Rule, RuleInputs, if_changed, unsafe, without_benefit, without_effect


def _smallest_model(facts: RuleInputs) -> str:
    task = facts.config.targets.option
    family = next(each for each in FAMILIES.values() if task in each.tasks)
    return f"model={family.smallest or family.name}"


def _heads(facts: RuleInputs) -> int:
    return facts.config.model.num_attention_heads


def _head_dim_is_derived(facts: RuleInputs) -> bool:
    return getattr(facts.config.model, "head_dim", None) is None


def _next_divisor(key: str, number: int, limit: int) -> Fix:
    """Return the override with the largest divisor of `number` up to `limit`."""
    divisor = next(d for d in range(min(limit, number), 0, -1) if number % d == 0)
    return Fix(f"model.{key}={divisor}")


def _key_value_heads(facts: RuleInputs) -> int | None:
    model = facts.config.model
    return model.num_key_value_heads if isinstance(model, LlamaModel) else None


def max_positions(facts: RuleInputs) -> int | None:
    """Return the largest number of positions of the model, None if unlimited."""
    return getattr(facts.config.model, "max_position_embeddings", None)


def _longest(facts: RuleInputs) -> int:
    """Return the tokens of the longest row of encoder or decoder."""
    return max(facts.data.seq_len, getattr(facts.config.task, "target_len", None) or 0)


def _length_fix(facts: RuleInputs) -> Fix:
    limit = max_positions(facts)
    if _longest(facts) > facts.data.seq_len:
        return Fix(f"task.target_len={limit}")
    usable = limit and (limit >= 4 or _is_pretrained(facts))
    return Fix(f"data.seq_len={limit}") if usable else Fix("model.max_position_embeddings=512")


def _is_pretrained(facts: RuleInputs) -> bool:
    return isinstance(facts.config.model, PretrainedModel)


_ROW_BYTES = 16
"""Row alignment in bytes of torch._grouped_mm, with which transformers 5 computes experts
(torch 2.13: "strides should be multiple of 16 bytes")."""


def _aligned(key: str) -> Rule:
    """Return the rule that a width of the experts is aligned for their matrix product."""

    def unit(facts: RuleInputs) -> int:
        narrow = computed_formats(facts.config) != {Compute.float32.value}
        return _ROW_BYTES // (
            BFLOAT16_BYTES if narrow else decide_formats(facts.config).frozen_bytes
        )

    def width(facts: RuleInputs) -> int:
        return int(getattr(facts.config.model, key))

    return Rule(
        key=f"model.{key}",
        when=lambda f: f.model_family.is_moe and width(f) % unit(f) != 0,
        why=lambda f: f"must be a multiple of {unit(f)} for the experts' matrix product",
        fix=lambda f: Fix(f"model.{key}={-(-width(f) // unit(f)) * unit(f)}"),
        source="measured: torch._grouped_mm on a CPU rejects other widths",
        versions="torch 2.13",
    )


def _experts(facts: RuleInputs) -> tuple[int, int]:
    """Return the number of experts per token and of all experts, 0 and 0 without experts."""
    model = facts.config.model
    if not isinstance(model, MixtralModel):
        return 0, 0
    return model.num_experts_per_tok, model.num_local_experts


def _rotary_width(facts: RuleInputs) -> int:
    """Return the width of a head with rotary positions, 0 for other models."""
    model = facts.config.model
    return head_width(model) if isinstance(model, LlamaModel) else 0


_STRETCHED_FROM = 8192
"""Tokens of Llama 3's training before its positions were stretched (its config.json)."""

_ROTARY = "Su et al. 2021, arXiv:2104.09864"
_HF_MODELS = "https://huggingface.co/docs/transformers/model_doc/auto"

RULES = dict(
    router_loss_needs_router=Rule(
        key="task.router_loss",
        when=lambda f: (
            f.config.task.router_loss not in ("auto", "off") and router_loss(f.config) is None
        ),
        why="this model has no router loss. Allowed: auto, off",
        source="the forward pass of the class of model and task",
    ),
    task_needs_other_model=Rule(
        key="task",
        when=lambda f: f.config.task.option not in f.model_family.tasks,
        why=lambda f: (
            f"model={f.config.model.option} ({f.model_family.name}) supports only "
            + " and ".join(f.model_family.tasks)
        ),
        fix=lambda f: Fix(
            f"task={f.model_family.tasks[0]}",
            remark=f"or keep the task: {_smallest_model(f)}",
        ),
        source=_HF_MODELS,
    ),
    heads_divide_width=Rule(
        key="model.num_attention_heads",
        when=lambda f: (
            (_head_dim_is_derived(f) or isinstance(f.config.model, LlamaModel))
            and _heads(f) > 0
            and f.config.model.hidden_size % _heads(f) != 0
        ),
        why=lambda f: f"does not divide model.hidden_size = {f.config.model.hidden_size}",
        fix=lambda f: _next_divisor("num_attention_heads", f.config.model.hidden_size, _heads(f)),
        # LlamaConfig.validate_architecture rejects it even if head_dim sets another width.
        source="Vaswani et al. 2017, arXiv:1706.03762, section 3.2.2, and LlamaConfig",
        versions="transformers >= 5 (with head_dim set)",
    ),
    key_value_heads_divide_heads=Rule(
        key="model.num_key_value_heads",
        when=lambda f: (k := _key_value_heads(f)) and _heads(f) % k != 0,
        why=lambda f: f"does not divide model.num_attention_heads = {_heads(f)}",
        fix=lambda f: _next_divisor("num_key_value_heads", _heads(f), _key_value_heads(f) or 1),
        source="Ainslie et al. 2023, arXiv:2305.13245",
    ),
    rotary_width_is_even=Rule(
        key="model.hidden_size",
        when=lambda f: (
            _rotary_width(f) % 2 != 0
            and _head_dim_is_derived(f)
            and f.config.model.hidden_size % _heads(f) == 0  # else another rule reports it
        ),
        why=lambda f: (
            f"gives a head width of {_rotary_width(f)}. Rotary positions need an even width"
        ),
        fix=lambda f: Fix(f"model.hidden_size={_heads(f) * (_rotary_width(f) + 1)}"),
        source=_ROTARY,
    ),
    rotary_head_dim_is_even=Rule(
        key="model.head_dim",
        when=lambda f: _rotary_width(f) % 2 != 0 and not _head_dim_is_derived(f),
        why="rotary positions need an even head width",
        fix=lambda f: Fix(f"model.head_dim={_rotary_width(f) + 1}"),
        source=_ROTARY,
    ),
    experts_for_each_token=Rule(
        key="model.num_experts_per_tok",
        when=lambda f: _experts(f)[0] > _experts(f)[1],
        why=lambda f: f"exceeds model.num_local_experts = {_experts(f)[1]}",
        fix=lambda f: Fix(f"model.num_experts_per_tok={_experts(f)[1]}"),
        source="Shazeer et al. 2017, arXiv:1701.06538, section 2.1",
    ),
    experts_hidden_size_is_aligned=_aligned("hidden_size"),
    experts_intermediate_size_is_aligned=_aligned("intermediate_size"),
    stretching_needs_long_positions=without_benefit(
        key="model.rope_scaling_factor",
        when=lambda f: (
            isinstance(f.config.model, LlamaModel)
            and f.config.model.rope_scaling_factor is not None
            and f.config.model.max_position_embeddings <= _STRETCHED_FROM
        ),
        why=lambda f: (
            f"only helps sequences beyond {_STRETCHED_FROM} tokens. "
            f"model.max_position_embeddings = {max_positions(f)}"
        ),
        source="rope_scaling.original_max_position_embeddings of Llama 3.1's config.json",
    ),
    dropout_is_known=Rule(
        key="model.dropout",
        when=lambda f: (
            f.config.model.dropout is None
            and not isinstance(f.config.model, PretrainedModel | CustomModel)
        ),
        why=lambda f: f"must be a number. model={f.config.model.option} has no checkpoint value",
        fix=Fix("model.dropout=0.1"),
        source="docs/how-to/models.md",
    ),
    sequence_fits_positions=Rule(
        key="data.seq_len",
        when=lambda f: (m := max_positions(f)) and _longest(f) > m,
        value=lambda f: (
            f"{n} task.target_len = {_longest(f)}" if _longest(f) > (n := f.data.seq_len) else n
        ),
        why=lambda f: (
            f"is longer than the {max_positions(f)} tokens of this checkpoint's positions"
            if _is_pretrained(f)
            else f"is longer than model.max_position_embeddings = {max_positions(f)} of "
            f"model={f.config.model.option}"
        ),
        fix=_length_fix,
        source=_HF_MODELS,
    ),
    vocabulary_holds_bytes=Rule(
        key="model.vocab_size",
        when=lambda f: (
            tokenizer_of(f.data) == BYTES
            and f.config.model.vocab_size < BYTE_VOCABULARY
            and not isinstance(f.config.model, CustomModel)
        ),
        why=f"is smaller than the byte tokenizer's {BYTE_VOCABULARY} tokens",
        fix=lambda f: Fix("data=synthetic") if _is_pretrained(f) else Fix("model.vocab_size=320"),
        source="eke.common.text",
    ),
    adapters_freeze_everything=Rule(
        key="model.freeze",
        when=lambda f: f.config.model.freeze and isinstance(f.config.peft, Adapters),
        why=lambda f: (
            f"peft={f.config.peft.option} already freezes all weights of the model except a "
            "classifier head"
        ),
        fix=Fix("model.freeze=[]"),
        source="https://huggingface.co/docs/peft",
    ),
    t5_is_always_tied=if_changed(
        key="model.tie_word_embeddings",
        when=lambda f: isinstance(f.config.model, T5Model),
        why="transformers always ties T5's embeddings. false only removes the scaling of logits",
        source="transformers' T5Config.__post_init__ (scale_decoder_outputs)",
        versions="transformers 5",
    ),
    untied_bert_has_dead_bias=unsafe(
        key="model.tie_word_embeddings",
        when=lambda f: (
            isinstance(f.config.model, BertModel)
            and isinstance(f.config.task, MaskedLM)
            and not f.config.model.tie_word_embeddings
        ),
        why=lambda f: (
            "transformers adds an output bias without use or training: "
            f"{f.config.model.vocab_size} numbers"
        ),
        source="transformers' BertLMPredictionHead (cls.predictions.bias)",
        versions="transformers 5",
    ),
    tied_embeddings_need_head=without_effect(
        key="model.tie_word_embeddings",
        when=lambda f: (
            isinstance(f.config.task, SequenceClassification)
            and isinstance(f.config.model, LlamaModel | GPT2Model)
        ),
        why="a classifier has no output projection to tie",
        source=_HF_MODELS,
    ),
)
