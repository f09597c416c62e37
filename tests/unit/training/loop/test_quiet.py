"""Nothing but eke's own words in a log, and no library imported for nothing."""

import logging
import re
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from recipe_plans import planned
from support import environment
from terminals import shown
from unit.plan.cases import CPU, GPU, SYNTHETIC, plan_of
from unit.plan.record.samples import step_row

from eke.plan.record import IN_LOG
from eke.training.loop import loop, worker
from eke.training.loop.environment import (
    NOISY_LOGGERS,
    configure_allocator,
    quiet_imports,
    quiet_libraries,
)

SAVE = """
import sys
from pathlib import Path
from eke.training.loop.worker import _set_up_output
_set_up_output()
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging
from accelerate.utils import other
from eke.training.model.save_model import save_pretrained
logging.disable_progress_bar()
size = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
save_pretrained(LlamaForCausalLM(LlamaConfig(vocab_size=16, **size)), Path(sys.argv[1]))
assert "torchao" in sys.modules, "what talks was not even imported"
assert "deepspeed" not in sys.modules
assert other.is_deepspeed_available(), "it is there again for who asks for it"
"""


@pytest.fixture
def levels():
    """The levels of before."""
    loggers = [logging.getLogger(name) for name in NOISY_LOGGERS]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


@pytest.mark.slow
@pytest.mark.skipif(
    not (find_spec("torchao") and find_spec("deepspeed")), reason="the extras that talk"
)
def test_building_and_saving_print_no_output(tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SAVE, str(tmp_path / "model")],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_lines_about_steps_are_marked_for_the_starting_command() -> None:
    job = SimpleNamespace(plan=SimpleNamespace(steps=SimpleNamespace(total=4)))

    def log() -> None:
        logging.root.handlers.clear()  # pytest's, which prevent others
        worker._set_up_output()
        loop._log_step(job, step_row(2))
        logging.getLogger("eke").info("saved")

    step, other = shown(log, [0])[0].splitlines()
    assert step.startswith(IN_LOG)
    assert re.fullmatch(r"\d\d:\d\d:\d\d saved", other)


def test_errors_are_logged(levels, caplog) -> None:
    quiet_imports()
    for name in NOISY_LOGGERS:
        logging.getLogger(name).warning("nobody can act on this")
        logging.getLogger(name).error("%s is broken", name)
    assert [r.getMessage() for r in caplog.records] == [
        f"{name} is broken" for name in NOISY_LOGGERS
    ]


@pytest.mark.parametrize(("device", "told"), [(CPU, "cpu"), (GPU, None)], ids=["cpu", "gpu"])
def test_deepspeed_accelerator_is_set_only_for_a_cpu(device, told, monkeypatch, levels) -> None:
    import os
    import warnings

    environ: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environ)
    with warnings.catch_warnings():
        quiet_libraries(plan_of(*SYNTHETIC, device=device))
    assert environ.get("DS_ACCELERATOR") == told


RAGGED = ("data=synthetic", "data.lengths=uniform", "data.seq_len=512", "hardware=h100")


@pytest.mark.parametrize(
    ("overrides", "variable", "expected"),
    [
        (RAGGED, None, ["expandable_segments:True"]),
        (RAGGED, "PYTORCH_ALLOC_CONF", []),
        (RAGGED, "PYTORCH_CUDA_ALLOC_CONF", []),
        ((*RAGGED, "data.packing=on"), None, []),
        (("data=synthetic", "hardware=h100"), None, []),
        ((*RAGGED[:-1], "hardware=cpu"), None, []),
    ],
    ids=["ragged", "variable", "old variable", "packed", "fixed", "cpu"],
)
def test_allocator_uses_expandable_segments_for_ragged_data(
    overrides, variable, expected, monkeypatch
) -> None:
    found: list[str] = []
    monkeypatch.setattr("torch._C._accelerator_setAllocatorSettings", found.append)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "max_split_size_mb:64")
    plan = planned(*overrides)
    configure_allocator(plan)
    assert found == expected
    said = "CUDA memory" in {decision.key for decision in plan.decisions}
    assert said == bool(expected)
