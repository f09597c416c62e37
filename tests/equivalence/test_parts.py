"""Models that several ranks build in parts have one process's weights, bit for bit."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from parts_in_ranks import FAMILIES, OPTIONS, OTHERS
from support import environment

HELPER = Path(__file__).parent.parent / "parts_in_ranks.py"

WHOLE_TEXT = [f for f in FAMILIES if f not in ("gpt2", "t5", "bert")]
"""Families whose tables are tied only on request; the others' are in `read`."""

WORLDS = (2, 3, 4)

EVERY_WORLD = [
    *(f"random-{family}" for family in OPTIONS),
    *(f"read-{family}" for family in FAMILIES),
    *(f"tied-{family}" for family in WHOLE_TEXT),
    *(f"classes-{family}" for family in FAMILIES if family != "t5"),
    *(f"lora-{family}" for family in FAMILIES),
    "random_classes-t5", "qlora-llama", "qlora-gpt2", "other files", "a short file",
]  # fmt: skip
"""With each number of ranks."""

ONE_WORLD = [
    *(f"read-{family}" for family in OTHERS),
    *(f"{kind}-{family}" for kind in ("dora", "ia3") for family in ("llama", "gpt2")),
    "lora-phi", "qlora-mixtral", "qlora-phi",
    *(f"random_{kind}-{f}" for kind in ("tied", "bf16", "lora") for f in ("llama", "qwen3")),
    "random_qlora-llama", "random_qlora-gpt2", "random_classes-llama", "random_classes-bert",
    "random_bf16-t5", "bf16-llama", "bf16-bert", "lora_bf16-llama", "lora_classes-bert",
    "lora_classes-gpt2", "lora_classes-mistral", "frozen-llama", "files-qwen3", "base-llama",
    "base-bert", "four_for_three-llama", "four_for_three-bert", "half-llama",
    *(f"zero3_{kind}" for kind in ("random-llama", "random-t5", "read-mixtral", "tied-qwen2",
                                   "lora-bert", "read-gemma2")),
]  # fmt: skip
"""With one number of ranks each, in turns."""

DRAWN = (
    "random-llama", "random-t5", "random_tied-qwen3", "random_classes-bert", "random_lora-llama",
    "read-gpt2", "read-mixtral", "read-phi", "tied-mistral", "four_for_three-bert", "lora-qwen2",
    "qlora-llama", "other files", "a short file",
)  # fmt: skip


def wrong_in_ranks(folder: Path, cases: Mapping[int, Sequence[str]]) -> dict[str, list[str]]:
    """Number of ranks -> cases; `CASE on RANKS` -> what differs there from one process's."""
    typed = [sys.executable, str(HELPER), str(folder), json.dumps(cases)]
    mine = {**environment(folder), "PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run(typed, capture_output=True, text=True, env=mine, check=False)
    answers = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert answers, done.stderr[-4000:]
    found = json.loads(answers[0].removeprefix("RESULT "))
    assert {int(w): set(of) for w, of in found.items()} == {w: set(of) for w, of in cases.items()}
    return {f"{n} on {w}": what for w, of in found.items() for n, what in of.items() if what}


def test_twelve_models_built_in_parts_match_one_process(tmp_path) -> None:
    assert wrong_in_ranks(tmp_path, {2: DRAWN}) == {}


@pytest.mark.slow
def test_every_model_built_in_parts_matches_one_process(tmp_path) -> None:
    turns = {w: ONE_WORLD[n :: len(WORLDS)] for n, w in enumerate(WORLDS)}
    assert wrong_in_ranks(tmp_path, {w: EVERY_WORLD + turns[w] for w in WORLDS}) == {}
