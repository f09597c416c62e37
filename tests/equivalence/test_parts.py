"""Models that several ranks build in parts have one process's weights, bit for bit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from parts_in_ranks import FAMILIES, OPTIONS, OTHERS
from support import environment

HELPER = Path(__file__).parent.parent / "parts_in_ranks.py"

WHOLE_TEXT = [f for f in FAMILIES if f not in ("gpt2", "t5", "bert")]
"""Families whose tables are tied only on request; the others' are in `read`."""

EVERYTHING = [
    *(f"random-{family}" for family in OPTIONS),
    *(f"read-{family}" for family in (*FAMILIES, *OTHERS)),
    *(f"tied-{family}" for family in WHOLE_TEXT),
    *(f"classes-{family}" for family in FAMILIES if family != "t5"),
    *(f"lora-{family}" for family in (*FAMILIES, "phi")),
    *(f"{kind}-{family}" for kind in ("dora", "ia3") for family in ("llama", "gpt2")),
    *(f"qlora-{family}" for family in ("llama", "gpt2", "mixtral", "phi")),
    *(f"random_{kind}-{f}" for kind in ("tied", "bf16", "lora") for f in ("llama", "qwen3")),
    "random_qlora-llama", "random_qlora-gpt2", "random_classes-llama", "random_classes-bert",
    "random_bf16-t5", "random_classes-t5", "bf16-llama", "bf16-bert", "lora_bf16-llama",
    "lora_classes-bert", "lora_classes-gpt2", "lora_classes-mistral", "frozen-llama", "files-qwen3",
    "base-llama", "base-bert", "four_for_three-llama", "four_for_three-bert", "half-llama",
    *(f"zero3_{kind}" for kind in ("random-llama", "random-t5", "read-mixtral", "tied-qwen2",
                                   "lora-bert", "read-gemma2")),
    "other files", "a short file",
]  # fmt: skip

DRAWN = (
    "random-llama", "random-t5", "random_tied-qwen3", "random_classes-bert", "random_lora-llama",
    "read-gpt2", "read-mixtral", "read-phi", "tied-mistral", "four_for_three-bert", "lora-qwen2",
    "qlora-llama", "other files", "a short file",
)  # fmt: skip


def wrong_in_ranks(folder: Path, worlds: list[int], names: list[str]) -> dict[str, list[str]]:
    """`CASE on WORLD` -> what differs there from one process's."""
    typed = [sys.executable, str(HELPER), str(folder), json.dumps(worlds), json.dumps(names)]
    mine = {**environment(folder), "PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run(typed, capture_output=True, text=True, env=mine, check=False)
    answers = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert answers, done.stderr[-4000:]
    found = json.loads(answers[0].removeprefix("RESULT "))
    assert sorted(found) == sorted(map(str, worlds))
    assert all(set(of) == set(names) for of in found.values())
    return {f"{n} on {w}": what for w, of in found.items() for n, what in of.items() if what}


def test_twelve_models_built_in_parts_match_one_process(tmp_path) -> None:
    assert wrong_in_ranks(tmp_path, [2], list(DRAWN)) == {}


@pytest.mark.slow
def test_every_model_built_in_parts_matches_one_process(tmp_path) -> None:
    assert wrong_in_ranks(tmp_path, [2, 3, 4], EVERYTHING) == {}
