"""`eke schema`: write JSON schemas for editors and print the editor settings."""

import json
import sys
from pathlib import Path

from eke.common.errors import ConfigError, EkeError, Fix, Problem, of_system
from eke.common.paths import user_path
from eke.config.editor import write_schemas

_FLAGS = ("--config-dir", "-cd")
_FORM = "eke schema FOLDER"

DEFAULT_FOLDER = ".schemas"
"""Schema folder referenced by .vscode/settings.json."""

HELP = """\
usage: eke schema [-h] [--config-dir CONF] [FOLDER]

Write JSON schemas of the option files to FOLDER, and print the settings with which an editor's YAML
language server completes and checks option files (docs/how-to/editor.md).

  FOLDER             created if missing; default: .schemas
  --config-dir CONF  folder with your own options, included in the schemas
  -h, --help         show this help
"""


def main(arguments: list[str]) -> int:
    """Write the schemas and print the editor settings; return the exit code."""
    if "--help" in arguments or "-h" in arguments:
        sys.stdout.write(HELP)
        return 0
    try:
        folder, config_dir = _read(arguments)
        settings = write_schemas(folder, config_dir)
    except EkeError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except OSError as error:
        sys.stderr.write(f"{of_system(error, folder)}\n")
        return EkeError.exit_code
    number = len(settings["yaml.schemas"])
    sys.stderr.write(f"{number} schemas in {folder}; settings of the YAML language server:\n")
    sys.stdout.write(json.dumps(settings, indent=2) + "\n")
    return 0


def _read(arguments: list[str]) -> tuple[Path, Path | None]:
    folders: list[str] = []
    config_dir: str | None = None
    left = list(arguments)
    while left:
        word, equals, value = left.pop(0).partition("=")
        if word in _FLAGS:
            value = value if equals else left.pop(0) if left else ""
            if not value:
                raise ConfigError(
                    Problem(word, "", f"{word} needs a value", Fix(remark=f"{word} CONF"))
                )
            config_dir = value
        elif word.startswith("-"):
            fix = Fix(remark=f"{_FORM} --config-dir CONF")
            raise ConfigError(Problem(word, value, "is not an option of eke schema", fix))
        else:
            folders.append(word + equals + value)
    if len(folders) > 1:
        why = "takes one folder"
        raise ConfigError(Problem("eke schema", " ".join(folders), why, Fix(remark=_FORM)))
    folder = folders[0] if folders else DEFAULT_FOLDER
    return user_path(folder), user_path(config_dir) if config_dir else None
