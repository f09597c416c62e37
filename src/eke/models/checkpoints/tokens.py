"""`data.tokenizer=auto` with a checkpoint: its own tokenizer, where it has one."""

import dataclasses
from typing import Any

from eke.common.paths import user_path
from eke.config.schema import Config, PretrainedModel
from eke.data.sources import AUTO
from eke.data.sources.request import TOKENIZER_FILES
from eke.models.checkpoints.locate import Located, locate
from eke.models.checkpoints.problem import refuse

FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "spiece.model",
         "tokenizer.model")  # fmt: skip
"""One of these lies in a folder that AutoTokenizer loads
(https://huggingface.co/docs/transformers/main_classes/tokenizer)."""

OF_EKE = ("manifest.json", "state.json")
"""What eke's checkpoints hold beside the weights (eke.training.checkpoint.checkpoint)."""


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

    Whatever else turned its text into tokens would lie beside it
    (eke.training.checkpoint.checkpoint).
    """
    folder = user_path(name_or_path)
    there = [(folder / name).is_file() for name in OF_EKE]
    return all(there) and not any((folder / name).is_file() for name in FILES)


def _beside(found: Located) -> str:
    """The folder or name to load a tokenizer from; empty when the checkpoint has none."""
    if _has_tokenizer(found):
        return str(found.folder)
    return "" if found.is_local else _on_hub(found)


def _has_tokenizer(found: Located) -> bool:
    return any((found.folder / name).is_file() for name in FILES)


def _on_hub(found: Located) -> str:
    """A hub model of which config.json alone was fetched so far."""
    from huggingface_hub import constants, snapshot_download

    if constants.HF_HUB_OFFLINE:
        return ""
    patterns = [*(f"{name}*" for name in TOKENIZER_FILES), "*.model", "*.tiktoken"]
    try:  # of the commit that the weights are of: a name would mean the newest
        snapshot_download(found.typed, revision=found.commit, allow_patterns=patterns)
    except Exception as error:  # huggingface_hub's, httpx's, the file system's
        why = f"its tokenizer cannot be fetched ({type(error).__name__})"
        raise refuse(found.typed, why, f"hf download {found.typed}") from error
    return str(found.folder) if _has_tokenizer(found) else ""
