"""Configurations for the tests of this folder, through Hydra's compose API."""

from functools import cache

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from eke.common.paths import conf_folder
from eke.config.schema import Config, register, resolve_attention
from eke.models.families import FAMILIES


@cache
def make_config(*overrides: str) -> Config:
    """The configuration of these overrides; shared, so do not change it."""
    register()
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        config = OmegaConf.to_object(compose("config", overrides=list(overrides)))
    assert isinstance(config, Config)
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

CHECKPOINTS_ONLY = {"qwen2", "other"}
"""Families that no size table is of."""

TINY_CASES = [(TINY[family], task) for family in TINY for task in FAMILIES[family].tasks]
"""Every family with every task it has a head for."""
