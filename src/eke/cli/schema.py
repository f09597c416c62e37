"""`eke schema`: write JSON schemas for editors and print the editor settings."""

import json
import sys
from collections.abc import Sequence

from eke.cli import make_parser
from eke.common.paths import user_path
from eke.common.screen import is_quiet
from eke.config.editor import write_schemas

DEFAULT_FOLDER = ".schemas"
"""Schema folder that .vscode/settings.json refers to."""

_DESCRIPTION = """\
Writes JSON schemas of the option files and prints editor settings. With them, an editor's YAML
language server completes and checks option files (docs/how-to/editor.md).
"""


def main(arguments: Sequence[str]) -> int:
    """Write the schemas, print the editor settings and return the exit code."""
    parser = make_parser("schema", _DESCRIPTION)
    about = "folder of the schemas, created if missing (default: %(default)s)"
    parser.add_argument("folder", nargs="?", default=DEFAULT_FOLDER, metavar="FOLDER", help=about)
    about = "folder with your options, included in the schemas"
    parser.add_argument("--config-dir", "-cd", metavar="CONF", help=about)
    parser.add_argument("--json", action="store_true", help="no effect: settings are JSON")
    options = parser.parse_args(arguments)
    folder = user_path(options.folder)
    config_dir = user_path(options.config_dir) if options.config_dir else None
    settings = write_schemas(folder, config_dir)
    number = len(settings["yaml.schemas"])
    if not is_quiet():
        sys.stderr.write(f"{number} schemas in {folder}. Settings of the YAML language server:\n")
    sys.stdout.write(json.dumps(settings, indent=2) + "\n")
    return 0
