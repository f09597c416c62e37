"""docs/what-to-type.md: for each GPU and model the shortest command that fits by `eke plan`."""

import contextlib
import io
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reference.gpu import read_gpus

from eke.cli import main
from eke.common.text import GIB

HEAD = """\
# What do I type?

*For everyone who has a GPU and a model, and needs a command to begin with.*

Each row is the shortest command that `eke plan --quick` calls *fits*. Find your GPU, copy the
row, and put it behind `python train.py`. Commands of one length are tried in this order: the same
training first, then 16-bit weights, 8-bit optimizer states and recipes. Offloading to the host
comes last, since it is about ten times slower.

- **Rows** train samples of 256 tokens, eight in a step. **2,048 tokens** has the overrides that
  fit with `data.seq_len=2048`.
- **Your checkpoint**: replace `model=llama2_7b` by `model=pretrained model.name_or_path=FOLDER`.
  The named models have random weights, so adapters on them only measure memory and speed.
- **Your rows**: add `data=jsonl data.path=rows.jsonl` ([data](how-to/data.md)).
- **Faster**: add `precision=bf16` (not on a T4) or `recipe=fastest`, or let [eke
  fit](how-to/fit.md) measure.
- **Another GPU or model**: `eke plan model=MODEL hardware=all` answers for all known GPUs.

Memory is the expected peak by formulas, with its range; `eke plan` without `--quick` also traces
a training step and may find that more fits. Every number is a forecast, not measured, where a row
does not say otherwise ([how forecasts are made](explanation/forecast.md), [how accurate they
were](reference/measured.md)).
"""

FOOT = """
Generated from `eke plan --json --quick` by `make pages`.
"""

GPUS = {
    "t4": ("Tesla T4", 16),
    "rtx3090": ("RTX 3090", 24),
    "rtx4090": ("RTX 4090", 24),
    "l40s": ("L40S", 48),
    "a100_80": ("A100", 80),
    "h100": ("H100", 80),
}
"""Option of hardware -> short name and GB of memory as advertised. The catalogue has more devices,
with full names and usable bytes: these six are the ones that docs ask for."""

ALL, ADAPTERS = "all weights", "adapters"
MODELS = (
    ("tiny", ALL, "0.8M"),
    ("gpt2", ALL, "124M"),
    ("llama_1b", ALL, "1.2B"),
    ("llama2_7b", ALL, "7B"),
    ("llama2_7b", ADAPTERS, "7B"),
    ("llama3_8b", ALL, "8B"),
    ("llama3_8b", ADAPTERS, "8B"),
)
"""Option of model, trained weights, and parameters as in the models' names. A choice of sizes: the
catalogue has 22 models, most of about the same sizes."""

_SAME = ("batch=auto", "precision=bf16", "memory=checkpointing")
_OTHER = ("precision=bf16_pure", "optimizer=adamw_8bit", "optimizer=adafactor",
          "recipe=low_memory")  # fmt: skip
_PAIRS = tuple(
    pair
    for pair in itertools.combinations((*_SAME, *_OTHER[:3]), 2)
    if pair[0].partition("=")[0] != pair[1].partition("=")[0]
)
CANDIDATES = {
    ALL: (
        (), *((each,) for each in (*_SAME, *_OTHER)), *_PAIRS,
        _SAME,
        ("batch=auto", "precision=bf16_pure", "memory=checkpointing"),
        ("batch=auto", "memory=checkpointing", "optimizer=adamw_8bit"),
        ("batch=auto", "memory=checkpointing", "optimizer=adafactor"),
        ("batch=auto", "precision=bf16_pure", "optimizer=adamw_8bit"),
        ("batch=auto", "precision=bf16_pure", "memory=checkpointing", "optimizer=adamw_8bit"),
        ("batch=auto", "precision=bf16_pure", "memory=checkpointing", "optimizer=adafactor"),
        ("recipe=large_model_one_gpu",),
    ),
    ADAPTERS: (
        ("peft=lora",), ("peft=qlora",),
        ("peft=lora", "batch=auto"), ("peft=lora", "precision=bf16"),
        ("peft=qlora", "batch=auto"), ("peft=qlora", "memory=checkpointing"),
        ("peft=lora", "precision=bf16", "batch=auto"),
        ("peft=qlora", "batch=auto", "memory=checkpointing"),
        ("peft=qlora", "batch=auto", "precision=bf16"),
        ("peft=qlora", "batch=auto", "memory=checkpointing", "precision=bf16"),
    ),
}  # fmt: skip
"""Trained weights -> the overrides that are tried, the shortest first, offloading last. `eke plan`
proposes changes for one plan and knows no shortest command, so the order is a choice; a test
composes all of them."""


@dataclass(frozen=True)
class Found:
    """The first candidate that fits."""

    overrides: tuple[str, ...]
    plan: dict[str, Any]


def plan(overrides: tuple[str, ...]) -> dict[str, Any] | None:
    """The answer of `eke plan --json --quick` (by formulas), None for a rejected configuration."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        code = main(["plan", *overrides, "--json", "--quick"])
    return json.loads(printed.getvalue()) if code == 0 else None


def shortest(model: str, weights: str, gpu: str, more: tuple[str, ...] = ()) -> Found | None:
    """The first candidate that fits, None without one."""
    for overrides in CANDIDATES[weights]:
        typed = (f"model={model}", *overrides, *more, f"hardware={gpu}")
        answer = plan(typed)
        if answer and answer["memory"]["predicted"]["verdict"] == "fits":
            return Found(overrides, answer)
    return None


def row(model: str, weights: str, gpu: str, results: Path) -> str:
    """One row of the table of a GPU."""
    number = next(size for name, kind, size in MODELS if (name, kind) == (model, weights))
    first = [f"{model} ({number})", weights]
    found = shortest(model, weights, gpu)
    if found is None:
        return f"| {' | '.join([*first, 'nothing fits', '', '', ''])} |"
    longer = ("data.seq_len=2048",)
    valid = plan((f"model={model}", *longer)) is not None  # not more than the model's positions
    long = shortest(model, weights, gpu, longer) if valid else None
    typed = f"`{' '.join((f'model={model}', *found.overrides))}`"
    cells = [typed, *figures_of(found.plan)]
    cells[-1] += _measured(found, gpu, results)
    return f"| {' | '.join([*first, *cells, _longer(found, long, valid)])} |"


def _longer(short: Found, long: Found | None, valid: bool) -> str:
    if long is None:
        return "nothing fits" if valid else "too long for this model"
    return "the same" if long.overrides == short.overrides else f"`{' '.join(long.overrides)}`"


def figures_of(answer: dict[str, Any]) -> list[str]:
    """Cells of memory and speed."""
    memory, speed = answer["memory"]["predicted"], answer["throughput"]["predicted_tokens_per_s"]
    low, expected, high = (f"{memory[key] / GIB:.1f}" for key in ("low", "expected", "high"))
    cell = f"{_rounded(speed['low'])} to {_rounded(speed['high'])}" if speed else ""
    return [f"{expected} ({low} to {high})", cell]


def _rounded(value: float) -> str:
    """With two digits that count."""
    return f"{float(f'{value:.2g}'):,.0f}"


def _measured(found: Found, gpu: str, results: Path) -> str:
    """The speed of a single run that chose the same options on this GPU, if there is one."""
    wanted = GPUS[gpu][0].split()[-1]
    for each in read_gpus(results):
        for record in each.runs.values():
            typed = set(record["overrides"])
            if wanted in each.device.split() and {*found.overrides, found.plan["name"].split()[0],
                                                   "data.seq_len=256"} <= typed:  # fmt: skip
                return f"; measured {_rounded(record['throughput']['tokens_per_s'])}"
    return ""


def section(gpu: str, results: Path) -> Iterator[str]:
    """The heading and the table of one GPU."""
    name, size = GPUS[gpu]
    yield f"## {name} ({size} GB): `hardware={gpu}`\n"  # both are searched
    yield f"On a machine without this GPU, `eke plan model=MODEL hardware={gpu}` plans for it.\n"
    yield "| model | trains | command | memory, GiB | tokens/s | 2,048 tokens |"
    yield "| --- " * 6 + "|"
    yield from (row(model, weights, gpu, results) for model, weights, _ in MODELS)
    yield ""


def what_to_type_page(results: Path) -> str:
    """The whole page, ending in a newline. Takes minutes."""
    lines = [line for gpu in GPUS for line in section(gpu, results)]
    return "\n".join([HEAD, *lines]).rstrip("\n") + "\n" + FOOT
