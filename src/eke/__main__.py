"""`python -m eke`: the command `eke`."""

import sys

from eke.cli import main

if __name__ == "__main__":
    sys.exit(main())
