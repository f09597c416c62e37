"""Configurations for unit tests, composed without the checks of the command line."""

from functools import cache
from typing import Any

from omegaconf import OmegaConf
from support import last_wins

from eke.config.compose.catalogue import make_catalogue
from eke.config.compose.compose_cache import hydra_state, make_trees
from eke.config.compose.composer import compose_tree
from eke.config.compose.own_code import typed_config
from eke.config.schema import Config, resolve_attention
from eke.models.families import FAMILIES


@cache
def make_config(*overrides: str) -> Config:
    """The configuration of these overrides; shared, so do not change it."""
    with hydra_state():  # Hydra takes a fifth of a second for each, but for the trees of `compose`
        tree = compose_tree(last_wins(*overrides), make_trees(make_catalogue()))
    composed: Any = OmegaConf.to_object(tree.config)
    config, problems = typed_config(composed)
    assert not problems
    return resolve_attention(config)


TINY = {
    "llama": "tiny",
    "qwen3": "tiny_qwen3",
    "mixtral": "tiny_moe",
    "bert": "tiny_bert",
    "gpt2": "tiny_gpt2",
    "t5": "tiny_t5",
}
"""Family -> its smallest option."""

CHECKPOINTS_ONLY = {"qwen2", "other", "custom"}
"""Families that no size table is of."""

TINY_CASES = [(TINY[family], task) for family in TINY for task in FAMILIES[family].tasks]
"""Every family with every task it has a head for."""

FAMILY_CASES = [
    ("tiny", "causal_lm"),
    ("tiny_qwen3", "sequence_classification"),
    ("tiny_moe", "causal_lm"),
    ("tiny_bert", "masked_lm"),
    ("tiny_gpt2", "sequence_classification"),
    ("tiny_t5", "seq2seq_lm"),
]
"""Every family and every task once, for what the head has no part in."""
