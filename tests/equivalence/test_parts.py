"""Models that several ranks build in parts have one process's weights, bit for bit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from parts_in_ranks import FAMILIES, OPTIONS, OTHERS
from safetensors.torch import save_file
from support import PATIENCE_S, environment

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
]  # fmt: skip

DRAWN = (
    "random-llama", "random-t5", "random_tied-qwen3", "random_classes-bert", "random_lora-llama",
    "read-gpt2", "read-mixtral", "read-phi", "tied-mistral", "four_for_three-bert", "lora-qwen2",
    "qlora-llama",
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


def test_twelve_models_are_those_of_one_process(tmp_path) -> None:
    assert wrong_in_ranks(tmp_path, [2], list(DRAWN)) == {}


@pytest.mark.slow
def test_every_model_is_that_of_one_process(tmp_path) -> None:
    assert wrong_in_ranks(tmp_path, [2, 3, 4], EVERYTHING) == {}


DISAGREE = """
import os, sys
from pathlib import Path
import torch, torch.distributed as dist
from eke.training.distributed.parts import _shapes
rank = int(sys.argv[1]); folder = Path(sys.argv[2])
dist.init_process_group("gloo", f"file://{folder}/meeting", None, 2, rank)
print(_shapes([folder / sys.argv[3 + rank]]))
"""


@pytest.mark.parametrize("second", ["other.safetensors", "cut.safetensors"])
def test_ranks_with_other_files_both_say_so(second, tmp_path) -> None:
    """Before any of them waits for the other: one file has another size, or ends too early."""
    save_file({"weight": torch.zeros(4, 2)}, tmp_path / "one.safetensors")
    save_file({"weight": torch.zeros(5, 2)}, tmp_path / "other.safetensors")
    whole = (tmp_path / "one.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-8])
    mine = {**environment(tmp_path), "PYTHONPATH": ":".join(filter(None, sys.path))}
    typed = [sys.executable, "-c", DISAGREE]
    names = [str(tmp_path), "one.safetensors", second]
    ranks = [
        subprocess.Popen([*typed, str(rank), *names], stderr=subprocess.PIPE, text=True, env=mine)
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=PATIENCE_S)[1] for rank in ranks]
    assert all(rank.returncode == 1 for rank in ranks), said
    assert "ranks [1], by their headers -> the same files" in said[0]
    assert ("ranks [0]" if second.startswith("other") else "SafetensorError") in said[1]
