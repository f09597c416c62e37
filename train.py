"""Train one Transformer, or a sweep of them, as configured.

python train.py precision=bf16 optimizer=adafactor
python train.py --help
"""

import sys

from eke.app import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
