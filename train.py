"""Train one Transformer, or a sweep of them, as configured.

python train.py precision=bf16 optimizer=adafactor
python train.py --help
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # This checkout's eke, installed or not.
    sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))
    try:
        from eke.cli import main  # shell completion looks for this line
        from eke.common.streams import use_utf8

        use_utf8()
        sys.exit(main(["train", *sys.argv[1:]]))
    except KeyboardInterrupt:  # while it was still being imported
        sys.exit(75)
