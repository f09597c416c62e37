"""`python -m eke.cli`: the `eke` command without its console script."""

import sys

from eke.cli import main

if __name__ == "__main__":
    sys.exit(main())
