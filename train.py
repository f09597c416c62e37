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
        from eke.common.runtime import collect_seldom
        from eke.common.streams import open_streams, use_utf8

        use_utf8()
        open_streams()
        collect_seldom()
        from eke.workflows import main

        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # while it was still being imported
        sys.exit(75)
