"""Train one run or a sweep.

python train.py precision=bf16 optimizer=adafactor
python train.py --help
"""

import shlex
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def not_installed(error: ImportError) -> str:
    """Return a message for missing packages, with the command that installs them."""
    environment, word = HERE / ".venv" / "bin" / "activate", shlex.quote
    enter = f". {word(str(environment))}   (once per shell, activates the environment)"
    install = f"make -C {word(str(HERE))} run   (installs packages and trains the default model)"
    fix = enter if (environment.parent / "eke").exists() else install
    return f"not installed here: {error.name} for {sys.executable}\n  -> {fix}"


if __name__ == "__main__":
    if sys.version_info < (3, 11):  # noqa: UP036  # any version may run this file
        sys.exit(f"eke needs Python 3.11 or newer: {sys.executable} is {sys.version.split()[0]}")
    # Import eke from this checkout.
    sys.path.insert(0, str(HERE / "src"))
    try:
        from eke.cli import main  # shell completion looks for this line
        from eke.common.output import use_utf8

        use_utf8()
        sys.exit(main(["train", *sys.argv[1:]]))
    except KeyboardInterrupt:  # during the import
        sys.exit(75)
    except ModuleNotFoundError as missing:
        if (missing.name or "eke").partition(".")[0] == "eke":
            raise
        sys.exit(not_installed(missing))
