"""`python -m eke`: the command `eke`."""

import os
import sys

# The current folder comes first on the import path: a `torch.py` there would run.
if not sys.flags.safe_path and os.path.realpath(sys.path[0]) != os.path.realpath(
    os.path.dirname(os.path.dirname(__file__))
):
    del sys.path[0]

from eke.cli import main

if __name__ == "__main__":
    sys.exit(main())
