"""What the two closer looks of eke.training.observe.observe_run cost the step they look at.

python benchmarks/closer_look.py [--rounds N]

Rounds of one plain step, one with the kernel probe and one with the memory profile, on the tiny
BERT of host_overhead.py and on eke's default model, one thread. A run takes each look once, in
warm-up.
"""

import argparse
import os
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: it is read once
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch.profiler writes its own log to stderr

from arguments import at_least
from loops import bert, make_job
from paired import Start, Turns, difference, ratio, summarize

from eke.training.loop.loop import train_step
from eke.training.loop.training_state import TrainingState
from eke.training.observe.observe_run import profile_step

LOOKS = {"plain step": 2, "kernel probe": 0, "memory profile": 1}
"""Which look a step takes -> the number that makes `profile_step` take it."""
WARMUP = 3
"""Steps and looks before the first round: both import and initialise something once."""


def compare(job: TrainingState, num_rounds: int) -> dict[str, Turns]:
    """Milliseconds of one step with each look."""
    batches = job.data.train_steps(0)
    turns = {name: Turns() for name in LOOKS}
    for step in range((num_rounds + WARMUP) * len(LOOKS)):
        name = list(LOOKS)[step % len(LOOKS)]
        start = Start.now()
        with profile_step(job, LOOKS[name]):
            train_step(job, batches, step)
        if step >= WARMUP * len(LOOKS):
            start.end(turns[name], 1)
    return turns


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=at_least(2), default=30, help="steps of each kind")
    asked = parser.parse_args()
    steps = (asked.rounds + WARMUP) * len(LOOKS)
    workloads = {
        "BERT, 2 layers, 64 wide, 4 x 32": bert(2, steps),
        "model=tiny (default), 8 x 256": (f"train.steps={steps}", "data=synthetic"),
    }
    for title, overrides in workloads.items():
        with tempfile.TemporaryDirectory() as folder:
            turns = compare(make_job(Path(folder), *overrides), asked.rounds)
        print(f"\n{title}: wall milliseconds of a step, median [p10 p90] of {asked.rounds}")
        for name, mine in turns.items():
            all_of, longer = summarize(mine.wall_ms), difference(mine, turns["plain step"], "wall")
            print(
                f"  {name:<16}{all_of.median:9.2f}{all_of.p10:9.2f}{all_of.p90:9.2f}   "
                f"longer by {longer.median:8.2f} [{longer.low:.2f} {longer.high:.2f}], "
                f"ratio {ratio(mine, turns['plain step'], 'wall').median:.2f}"
            )


if __name__ == "__main__":
    main()
