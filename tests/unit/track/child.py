"""A training process in small: `python child.py FOLDER`, then one number of rows a line on stdin.

Answers each line with `logged` once the tracker took the rows; end of input finishes the run.
"""

import sys
from pathlib import Path

from eke import schema
from eke.track import TrackedRun, build_tracker


def main() -> None:
    run = TrackedRun(
        run_id="0123456789abcdef",
        name="optimizer=adafactor",
        group="sweep-1",
        tags=("cpu", "t" * 80),
        notes="python train.py optimizer=adafactor",
        factors={"optim": "adafactor", "deepspeed": "zero2", "seed": "seven", "a.b": "c"},
        config={"optim": {"lr": 1e-3}, "deepspeed": {"stage": 2}, "seed": 7, "path": None},
        directory=Path(sys.argv[1]),
        attempt=0,
        settings=schema.Tracker(),
    )
    tracker = build_tracker(run)
    step = 0
    for line in sys.stdin:
        for _ in range(int(line)):
            step += 1
            tracker.log([{"train/global_step": step, "train/loss": 1 / step}])
        print("logged", flush=True)
    tracker.summary({"loss/train_final": 0.5})
    tracker.finish(3)
    print(f"problem: {tracker.problem}", flush=True)


if __name__ == "__main__":
    main()
