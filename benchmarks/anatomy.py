"""Anatomy of a training step: contractions, normalisations, element-wise; forward and backward.

python benchmarks/anatomy.py [--size small|full] [--rounds N] [--out FILE]

Profiles steps of a BERT and of a Llama that eke builds, on the GPU where there is one, on one CPU
thread else. Writes results/anatomy_DEVICE.json; notes/claims.md compares it with the
guides.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: it is read once
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch.profiler writes its own log to stderr

import torch
from anatomy_split import KINDS, NORM_SCOPE, PHASES, Event, split
from arguments import at_least, writable
from loops import make_job
from paired import summarize
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from eke.common.files import write_json
from eke.hardware import detect, environment
from eke.hardware.cpu import cpu_name
from eke.training.loop.loop import train_step
from eke.training.loop.training_state import TrainingState

WARMUP = 2
"""Steps that are not profiled: they make the optimizer's state and load kernels."""
SIZES = {
    "small": {"hidden": 128, "layers": 2, "tokens": 64, "batch": 4},
    "full": {"hidden": 512, "layers": 4, "tokens": 128, "batch": 8},
}
MODELS = {
    "bert": ("model=tiny_bert", "task=masked_lm", "model.dropout=0.1"),
    "llama": ("model=tiny",),
}
"""BERT with the dropout of its authors (Devlin et al. 2018), which the guide counts as a kind."""
ATTENTION = {"bert": ("eager",), "llama": ("eager", "sdpa")}
"""Eager has a softmax of its own, as the guide's list has; flash kernels do not take it apart."""


def overrides_of(model: str, attention: str, size: dict[str, int], num_steps: int) -> list[str]:
    """What is typed for one case."""
    hidden = size["hidden"]
    return [
        *MODELS[model],
        f"attention={attention}",
        f"model.hidden_size={hidden}",
        f"model.intermediate_size={4 * hidden}",
        f"model.num_attention_heads={hidden // 64 or 1}",
        f"model.num_hidden_layers={size['layers']}",
        "data=synthetic",
        f"data.seq_len={size['tokens']}",
        f"batch.per_device={size['batch']}",
        f"train.steps={num_steps}",
    ]


def mark_norms(model: torch.nn.Module) -> None:
    """Mark the forward pass of every normalisation layer in the trace."""
    for module in model.modules():
        if type(module).__name__.endswith("Norm"):
            forward = module.forward

            def marked(*args: Any, forward: Any = forward, **kwargs: Any) -> Any:
                with record_function(NORM_SCOPE):
                    return forward(*args, **kwargs)

            module.forward = marked  # type: ignore[method-assign]  # a mark, same result


def profiled_step(
    job: TrainingState, batches: Any, step: int, on_gpu: bool
) -> dict[str, dict[str, float]]:
    """Microseconds by phase and kind of one training step."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as trace:
        train_step(job, batches, step)
        if on_gpu:
            torch.cuda.synchronize()
    return split(as_events(trace.events(), on_gpu))


def as_events(found: Any, on_gpu: bool) -> list[Event]:
    """The host's events of a trace; on a GPU with the time of the kernels that they launched."""
    known: dict[int, Event] = {}

    def convert(event: Any) -> Event:
        if id(event) not in known:
            own = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            parent = convert(event.cpu_parent) if event.cpu_parent else None
            known[id(event)] = Event(
                event.name, event.time_range.start, own, parent, event.sequence_nr
            )
        return known[id(event)]

    return [convert(event) for event in found if event.device_type == DeviceType.CPU]


def measure(model: str, attention: str, size: dict[str, int], rounds: int) -> dict[str, Any]:
    """Shares and ratios of one model, medians over the rounds."""
    on_gpu = torch.cuda.is_available()
    typed = overrides_of(model, attention, size, rounds + WARMUP)
    with tempfile.TemporaryDirectory() as folder:
        job = make_job(Path(folder), *typed, hardware="auto" if on_gpu else "cpu")
        mark_norms(job.bare_model)
        batches = job.data.train_steps(0)
        for step in range(WARMUP):
            train_step(job, batches, step)
        steps = [profiled_step(job, batches, WARMUP + n, on_gpu) for n in range(rounds)]
    return {"model": model, "attention": attention, "overrides": typed, **summary_of(steps)}


def summary_of(steps: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Shares of forward and backward together, by kind; backward over forward, all and by kind."""
    shares: dict[str, Any] = {}
    ratios: dict[str, Any] = {}
    for kind in KINDS:
        both = [step["forward"][kind] + step["backward"][kind] for step in steps]
        parts = [a / passes(step) for a, step in zip(both, steps, strict=True)]
        shares[kind] = summarize(parts).as_dict()
        if all(step["forward"][kind] > 0 for step in steps):
            rows = [step["backward"][kind] / step["forward"][kind] for step in steps]
            ratios[kind] = summarize(rows).as_dict()
    whole = [sum(step["backward"].values()) / sum(step["forward"].values()) for step in steps]
    times = {p: summarize([sum(s[p].values()) / 1e3 for s in steps]).as_dict() for p in PHASES}
    return {
        "share": shares,
        "backward_over_forward": {"all": summarize(whole).as_dict(), **ratios},
        "ms_per_step": times,
    }


def passes(step: dict[str, dict[str, float]]) -> float:
    """Microseconds of forward and backward."""
    return sum(step["forward"].values()) + sum(step["backward"].values())


def print_case(case: dict[str, Any]) -> None:
    """One model's lines."""
    print(f"\n{case['model']}, attention={case['attention']}")
    for kind in KINDS:
        share = case["share"][kind]
        ratio = case["backward_over_forward"].get(kind)
        more = f"   backward/forward {ratio['median']:.2f}" if ratio else ""
        print(f"  {kind:<14}{share['median']:7.1%} [{share['p10']:.1%} {share['p90']:.1%}]{more}")
    whole = case["backward_over_forward"]["all"]
    print(f"  backward/forward, all {whole['median']:.2f} [{whole['p10']:.2f} {whole['p90']:.2f}]")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument(
        "--rounds", type=at_least(2), default=12, help="profiled steps of each model"
    )
    parser.add_argument("--out", type=Path, help="default: results/anatomy_DEVICE.json")
    asked = parser.parse_args()
    gpu = detect().name if torch.cuda.is_available() else None
    name = (gpu or "cpu").lower().replace(" ", "_")
    out = writable(parser, asked.out or Path(f"results/anatomy_{name}.json"))
    size = SIZES[asked.size]
    cases = {
        f"{model} {attention}": measure(model, attention, size, asked.rounds)
        for model, kinds in ATTENTION.items()
        for attention in kinds
    }
    for case in cases.values():
        print_case(case)
    record = {
        "benchmark": "anatomy",
        "note": "under the profiler, which adds to short operations; other jobs may have run "
        "beside it: shares and ratios are what counts, not milliseconds",
        "hardware": {
            "device": gpu or cpu_name(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "load_average_1m_at_end": os.getloadavg()[0],
        },
        "environment": {key: environment()[key] for key in ("time", "python", "versions")},
        "size": {"name": asked.size, **size},
        "rounds": asked.rounds,
        "cases": cases,
    }
    write_json(out, record)
    print(f"\nwritten to {out}")


if __name__ == "__main__":
    main()
