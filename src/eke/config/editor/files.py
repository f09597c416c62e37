"""The schemas as files in a folder, and the settings by which an editor finds them."""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from eke.common.errors import ConfigError, Problem
from eke.common.files import write_atomic
from eke.config.compose.catalogue import make_catalogue
from eke.config.compose.user_config_dir import check_folder
from eke.config.editor.schemas import CONFIG, make_schemas


def write_schemas(folder: Path, config_dir: Path | None = None) -> dict[str, Any]:
    """Write one JSON schema per kind of file into `folder`, which is made if it is not there.

    Args:
        folder: where the schemas go.
        config_dir: a folder with the user's own options, which the schemas then know, too.

    Returns:
        Settings of the YAML language server that join the schemas and the files they are for.

    Raises:
        ConfigError: `folder` is a file, or something is wrong with `config_dir`.
        OSError: `folder` cannot be written.
    """
    problems = check_folder(config_dir) if config_dir else []
    if problems:
        raise ConfigError(problems)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(Problem("eke schema", str(folder), "is a file, not a folder"))
    folder.mkdir(parents=True, exist_ok=True)
    schemas = make_schemas(make_catalogue(config_dir))
    for name, schema in schemas.items():
        write_atomic(folder / f"{name}.json", as_text(schema), shared=True)
    folders = ["conf", *([_from_here(config_dir)] if config_dir else [])]
    return editor_settings(schemas, _place(folder), folders)


def as_text(schema: dict[str, Any]) -> str:
    """A schema as it is written to a file."""
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def editor_settings(schemas: Iterable[str], place: str, folders: Sequence[str]) -> dict[str, Any]:
    """Settings of the YAML language server that join schemas and files.

    Args:
        schemas: the names `make_schemas` gives them.
        place: where the schemas are: `./` and a folder of the workspace, or a URL.
        folders: folders with options, relative to the one that is open in the editor.
    """
    return {
        "yaml.schemas": {f"{place}/{name}.json": _patterns(name, folders) for name in schemas},
        # What Hydra reads: `on` is true, and "on" a word.
        "yaml.yamlVersion": "1.1",
    }


def _patterns(name: str, folders: Sequence[str]) -> list[str]:
    if name == CONFIG:
        return [f"{folder}/config.yaml" for folder in folders[:1]]  # eke's own is the only one
    own = [f"{folder}/{name}/*.yaml" for folder in folders]
    return ["sweeps/*.yaml", *own] if name == "sweep" else own


def _from_here(folder: Path) -> str:
    """Relative to the current folder; from anywhere, for a folder outside of it."""
    relative = os.path.relpath(folder)
    return f"**/{folder.resolve().name}" if relative.startswith("..") else Path(relative).as_posix()


def _place(folder: Path) -> str:
    relative = os.path.relpath(folder)
    return folder.resolve().as_uri() if relative.startswith("..") else f"./{relative}"
