"""Highest sum of tensors in each phase of runs, in forked ranks on a CPU.

`python phases_in_ranks.py FOLDER...` has as many ranks as each run's plan says train it to its end,
and then continue it from its checkpoint. It prints a JSON object: folder -> phase -> bytes of rank
0. A save in the background is awaited, so that nothing else is in its peak.
"""

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd.profiler import profile

from eke.common.paths import LOCAL_RANK, RANK, RENDEZVOUS_VARIABLE, WORLD_SIZE, RunPaths
from eke.plan.planner import read_plan
from eke.training.loop import attempt, loop, worker
from eke.training.observe.memory_stages import allocations

Peaks = dict[str, int]


def count_from_now_on() -> None:
    """Let PyTorch count the blocks of all threads to the end of the process."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True


@contextmanager
def watched(peaks: Peaks, phase: str) -> Iterator[None]:
    with profile(use_cpu=True, use_kineto=True, profile_memory=True) as seen:
        yield
    found = allocations(seen.kineto_results.experimental_event_tree())
    peaks[phase] = max([peaks.get(phase, 0), *(total for _, total in found)])


def train(folder: Path, start: str) -> Peaks:
    """This rank's peaks; `start` is the name of the phase that builds or loads."""
    peaks: Peaks = {}
    save = loop.save

    def during(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            with watched(peaks, phase):
                return function(*args, **more)

        return call

    def save_and_wait(job: Any, *args: Any, **more: Any) -> None:
        save(job, *args, **more)
        while job.saving is not None and not job.saving.written.done():
            torch.empty(1)  # notes the sum
        loop.finish_saving(job)

    count_from_now_on()
    with (
        patch.object(attempt, "TrainingState", during(start, attempt.TrainingState)),
        patch.object(loop, "train_step", during("step", loop.train_step)),
        patch.object(loop, "evaluate_at", during("evaluation", loop.evaluate_at)),
        patch.object(loop, "save", during("save", save_and_wait)),
        patch.object(loop, "profile_step", lambda *_: nullcontext()),  # it profiles, too
    ):
        code = worker.main([str(folder)])
    assert not code, f"the worker ended with {code}"
    return peaks


def in_ranks(folder: Path, start: str) -> Peaks:
    """Fork the ranks of a run; returns the peaks of rank 0."""
    world = read_plan(RunPaths(folder)).batch.world_size
    meeting = folder.with_name(f"{folder.name}-{start}")
    children, (reading, writing) = [], os.pipe()
    for rank in range(world):
        if pid := os.fork():
            children.append(pid)
            continue
        code = 1
        try:
            names = {RANK: rank, LOCAL_RANK: rank, WORLD_SIZE: world, RENDEZVOUS_VARIABLE: meeting}
            os.environ |= {name: str(value) for name, value in names.items()}
            os.environ["LOCAL_WORLD_SIZE"] = str(world)
            found = train(folder, start)
            if rank == 0:
                os.write(writing, json.dumps(found).encode())
            code = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(writing)
    for _ in children:
        if os.wait()[1]:  # the others would wait for it
            for pid in children:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            sys.exit(f"a rank of {folder} failed")
    with os.fdopen(reading) as told:
        return dict(json.load(told))


if __name__ == "__main__":
    every = {}
    for name in sys.argv[1:]:
        every[name] = in_ranks(Path(name), "load") | in_ranks(Path(name), "resume")
    print("RESULT", json.dumps(every))
