"""`eke -sc ...`: what a shell asks the `eke` command."""

import re
import sys

from eke.common.errors import ConfigError
from eke.config.compose.completion import answer_shell

# A line of the usage: two spaces, the command, what follows it, two spaces or more, what it does.
_LINE = re.compile(r"^  eke (\w+).*? {2,}(\S.*)$", flags=re.MULTILINE)


def main(request: list[str], usage: str) -> int:
    """Answer a shell; the commands and what they do are read from the usage text."""
    try:
        sys.stdout.write(answer_shell(request, dict(_LINE.findall(usage))))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0
