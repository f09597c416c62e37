"""Model families, with closed forms for sizes, FLOPs and activations."""

from eke.config.schema import Config
from eke.models.families.bert_gpt2_t5 import BERT, GPT2, T5
from eke.models.families.family_record import (
    FLOAT32_BYTES,
    AttentionLayers,
    Family,
    Kernel,
    Role,
    Shape,
    Stack,
    Structure,
    Tokens,
    Weight,
    head_width,
)
from eke.models.families.llama import LLAMA, MIXTRAL, OTHER, QWEN2, QWEN3
from eke.models.families.own import CUSTOM

FAMILIES = {
    each.name: each for each in (LLAMA, QWEN2, QWEN3, MIXTRAL, BERT, GPT2, T5, OTHER, CUSTOM)
}
"""`model.family` -> its record."""


def family_of(config: Config) -> Family:
    """Return the record of the configuration's model."""
    return FAMILIES[config.model.family]
