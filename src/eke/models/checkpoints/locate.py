"""Location of a checkpoint (a local folder or the Hub's cache) and of its tokenizer."""

import dataclasses
import json
import logging
import os
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.output import write_line
from eke.common.paths import user_path
from eke.common.text import closest_path, override
from eke.config.schema import Config, PretrainedModel
from eke.data.sources import AUTO
from eke.data.sources.request import TOKENIZER_FILES

KEY = "model.name_or_path"
ANOTHER = Fix(f"{KEY}=ANOTHER_FOLDER_OR_HUB_NAME")


def _named(folder: object) -> Fix:
    return Fix(override(KEY, str(folder)))


def unusable(typed: str, why: str, fix: Fix = ANOTHER, key: str = KEY) -> ConfigError:
    """Return the error for a checkpoint that cannot be used."""
    return ConfigError(Problem(key, typed, why, fix, "pretrained"))


CONFIG = "config.json"
_ADAPTER = "adapter_config.json"

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# huggingface_hub.utils.validate_repo_id: owner and name, or only a name


@dataclass(frozen=True)
class LocalCheckpoint:
    """A checkpoint on this machine."""

    typed: str
    """Value of `model.name_or_path`."""
    folder: Path
    """Folder with config.json; for a Hub model possibly without weights."""
    commit: str = ""
    """Commit of a Hub model, 40 hex digits, empty for a local folder."""

    @property
    def is_local(self) -> bool:
        """True if the checkpoint is a folder of the user."""
        return not self.commit


def locate(typed: str, revision: str | None) -> LocalCheckpoint:
    """Find the folder with a checkpoint's config.json, downloading this file from the Hub."""
    path = user_path(typed)
    if os.path.exists(path):  # has precedence over a Hub model, as in transformers
        if revision is not None:
            why = f"is a revision of a hub model, and {typed} is a folder of this machine"
            raise unusable(revision, why, Fix("model.revision=null"), "model.revision")
        return LocalCheckpoint(typed, _local(typed, path))
    if typed.startswith((".", "/", "~")) or not _HUB_NAME.fullmatch(typed):
        why = "there is no such folder, and it is no name on the hub"
        raise unusable(typed, why, _named(_near_folder(typed)))
    return _on_hub(typed, revision)


def _near_folder(typed: str, otherwise: str = "ANOTHER_FOLDER_OR_HUB_NAME") -> Path | str:
    """Return a checkpoint with a similar path to a missing folder, else `otherwise`."""
    found = closest_path(user_path(typed))
    return found if found is not None and (found / CONFIG).is_file() else otherwise


def _local(typed: str, path: Path) -> Path:
    if not path.is_dir():
        folder = path.parent if (path.parent / CONFIG).is_file() else "FOLDER"
        why = "is a file; a checkpoint is a folder with a config.json"
        raise unusable(typed, why, _named(folder))
    if not os.access(path, os.R_OK | os.X_OK):
        raise unusable(typed, "the folder cannot be read")
    adapter = (path / _ADAPTER).is_file()
    if (path / CONFIG).is_file() and not (adapter and not any(path.glob("model*.safetensors"))):
        return Path(os.path.abspath(path))
    if adapter:
        base = ""
        with suppress(OSError, ValueError, AttributeError):
            base = json.loads((path / _ADAPTER).read_text()).get("base_model_name_or_path")
        why = "holds an adapter (PEFT) without the model it was trained on, and eke loads models"
        raise unusable(typed, why, _named(base or "FOLDER_OF_THE_MERGED_MODEL"))
    inner = _checkpoint_inside(path)
    if (path / "plan.json").is_file():
        why = "is a run folder of eke" + ("" if inner else ", without a finished checkpoint")
        raise unusable(typed, why, _named(inner or "ANOTHER_RUN"))
    why = f"has no {CONFIG}" + (", but a folder in it has" if inner else "")
    raise unusable(typed, why, _named(inner or "FOLDER_WITH_A_CONFIG_JSON"))


def _checkpoint_inside(path: Path) -> Path | None:
    """Return the newest checkpoint in a run folder or a Trainer's output folder."""

    def number(path: Path) -> tuple[int, str]:  # `checkpoint-1000` after `checkpoint-200`
        digits = re.findall(r"\d+", f"{path.parent.name}/{path.name}")
        return int(digits[-1]) if digits else -1, path.name

    for pattern in ("*", "checkpoints/*", "checkpoints/*/*", "*/*"):
        if found := [p.parent for p in path.glob(f"{pattern}/{CONFIG}")]:
            return max(found, key=number)
    return None


def _on_hub(name: str, revision: str | None) -> LocalCheckpoint:
    """Locate a Hub model in the cache, or download only its config.json."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    found = try_to_load_from_cache(name, CONFIG, revision=revision)
    if not isinstance(found, str):
        write_line(f"asking the Hugging Face hub for {name} ...", sys.stderr)
        try:
            # The logger prints two lines for each of five attempts. The error below suffices.
            logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)
            found = hf_hub_download(name, CONFIG, revision=revision)
        except Exception as error:  # from huggingface_hub, httpx or the file system
            raise _unreachable(name, revision, error) from error
    folder = Path(found).parent
    return LocalCheckpoint(name, folder, commit=folder.name)


def _unreachable(name: str, revision: str | None, error: Exception) -> ConfigError:
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        why = "its owner wants to be asked first; ask on its page"
        return unusable(name, why, Fix(remark="hf auth login"))
    if isinstance(error, errors.RepositoryNotFoundError):
        why = "there is no such folder, and no such model on the hub"
        why += " (or a private one: hf auth login)"
        return unusable(name, why, _named(_near_folder(name)))
    if isinstance(error, errors.RevisionNotFoundError):
        why = f"{name} has no such branch, tag or commit"
        return unusable(str(revision), why, Fix("model.revision=null"), "model.revision")
    is_local = isinstance(error, errors.LocalEntryNotFoundError)
    if isinstance(error, errors.EntryNotFoundError) and not is_local:
        return unusable(name, f"this model of the hub has no {CONFIG}: it is not of transformers")
    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else type(error).__name__
    why = "there is no such folder, the hub's cache does not hold it, and the hub cannot be reached"
    folder = _near_folder(name, "LOCAL_FOLDER")
    fix = Fix(override(KEY, str(folder)), remark=f"or, with a connection: hf download {name}")
    return unusable(name, f"{why} ({reason})", fix)


_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "spiece.model",
         "tokenizer.model")  # fmt: skip
"""Files of which a folder for AutoTokenizer has at least one
(https://huggingface.co/docs/transformers/main_classes/tokenizer)."""

_OF_EKE = ("manifest.json", "state.json")
"""Files of eke's checkpoints in addition to weights (eke.training.checkpoint)."""


def resolve_tokenizer(config: Config) -> Config:
    """Replace the tokenizer `auto` by the checkpoint's tokenizer if it has one."""
    model = config.model
    if not isinstance(model, PretrainedModel) or getattr(config.data, "tokenizer", "") != AUTO:
        return config
    found = locate(model.name_or_path, model.revision)
    if not (found.is_local or _has_tokenizer(found.folder)):
        _fetch_tokenizer(found)
    tokenizer = str(found.folder) if _has_tokenizer(found.folder) else AUTO
    data: Any = config.data  # some sources have no tokenizer, but this one has
    return dataclasses.replace(config, data=dataclasses.replace(data, tokenizer=tokenizer))


def is_of_eke_without_tokenizer(name_or_path: str) -> bool:
    """Return whether a folder is a checkpoint of eke with the byte tokenizer."""
    folder = user_path(name_or_path)
    is_of_eke = all((folder / name).is_file() for name in _OF_EKE)
    return is_of_eke and not _has_tokenizer(folder)


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _FILES)


def _fetch_tokenizer(found: LocalCheckpoint) -> None:
    from huggingface_hub import constants, snapshot_download

    if constants.HF_HUB_OFFLINE:
        return
    patterns = [*(f"{name}*" for name in TOKENIZER_FILES), "*.model", "*.tiktoken"]
    try:  # the commit of the weights, since a branch may have a newer one
        snapshot_download(found.typed, revision=found.commit, allow_patterns=patterns)
    except Exception as error:  # from huggingface_hub, httpx or the file system
        why = f"its tokenizer cannot be fetched ({type(error).__name__})"
        raise unusable(found.typed, why, Fix(remark=f"hf download {found.typed}")) from error
