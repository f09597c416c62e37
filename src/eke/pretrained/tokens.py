"""`data.tokenizer=auto` with a checkpoint: its own tokenizer, where it has one."""

import dataclasses
from typing import Any

from eke.corpus import AUTO
from eke.paths import user_path
from eke.pretrained.locate import Located, locate
from eke.schema import Config, PretrainedModel

FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "spiece.model",
         "tokenizer.model")  # fmt: skip
"""One of these lies in a folder that AutoTokenizer loads
(https://huggingface.co/docs/transformers/main_classes/tokenizer)."""

OF_EKE = ("manifest.json", "state.json")
"""What eke's checkpoints hold beside the weights (eke.run.checkpoint)."""


def resolve_tokenizer(config: Config) -> Config:
    """The configuration with the tokenizer that `auto` stands for.

    Args:
        config: its model is resolved; not changed.

    Raises:
        ConfigError: the checkpoint is gone.
    """
    model = config.model
    if not isinstance(model, PretrainedModel) or getattr(config.data, "tokenizer", "") != AUTO:
        return config
    tokenizer = _beside(locate(model.name_or_path, model.revision)) or AUTO
    data: Any = config.data  # some sources have no tokenizer; this one does
    return dataclasses.replace(config, data=dataclasses.replace(data, tokenizer=tokenizer))


def is_of_eke_without_tokenizer(name_or_path: str) -> bool:
    """Whether a folder is a checkpoint of eke's that was trained on bytes.

    Whatever else turned its text into tokens would lie beside it (eke.run.checkpoint).
    """
    folder = user_path(name_or_path)
    there = [(folder / name).is_file() for name in OF_EKE]
    return all(there) and not any((folder / name).is_file() for name in FILES)


def _beside(found: Located) -> str:
    """The folder or name to load a tokenizer from; empty when the checkpoint has none."""
    if any((found.folder / name).is_file() for name in FILES):
        return str(found.folder)
    return "" if found.is_local else _on_hub(found)


def _on_hub(found: Located) -> str:
    """A hub model of which config.json alone was fetched so far."""
    from huggingface_hub import constants

    return "" if constants.HF_HUB_OFFLINE else found.typed
