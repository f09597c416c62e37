"""Without the rules about the model and the work: what really goes wrong."""

import dataclasses
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader
from trained import record_of
from unit.rules.without import light_plan, trained
from unit.training.model.plans import hand_plan

from eke.common.errors import ConfigError
from eke.common.paths import RunPaths
from eke.launch.processes.run_dir import lock_run_folder
from eke.models.checkpoints.architecture import router_loss
from eke.rules import RULES, RuleInputs
from eke.training.model.build_model import build_model
from eke.training.optimizer.build_optimizer import build_schedule

CPU = torch.device("cpu")


def test_experts_of_unaligned_width_cannot_be_multiplied(tmp_path) -> None:
    heads = ("model=tiny_moe", "model.num_attention_heads=3")
    with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
        trained(tmp_path, *heads, "model.hidden_size=42")
    trained(tmp_path / "aligned", *heads, "model.hidden_size=48")


def test_rope_scaling_changes_frequencies_of_short_sequences() -> None:
    plain, stretched = (
        build_model(hand_plan(*more), CPU).model.rotary_emb.inv_freq
        for more in ((), ("model.rope_scaling_factor=8",))
    )
    assert not torch.equal(plain, stretched)
    assert stretched.min() == plain.min() / 8, "the slowest one by the whole factor"


@pytest.mark.parametrize("typed", ["0.1", "aut", "-1", "0", "nan"])
def test_router_loss_without_router_is_zero(typed) -> None:
    for model in ("tiny", "tiny_moe"):
        plan = hand_plan(f"model={model}", f"task.router_loss={typed}")
        trains = router_loss(plan.config) is not None
        assert trains == (model == "tiny_moe" and typed == "0.1")
        found = {rule.id for rule in RULES if rule.when(RuleInputs(plan.config, plan.device))}
        assert ("router_loss_needs_router" in found) != trains


def test_random_special_ids_end_texts_early(tmp_path) -> None:
    with pytest.raises(ValueError, match="same number of <eos> tokens"):
        trained(
            tmp_path,
            "model=tiny_t5",
            "task=sequence_classification",
            "data.min_token=0",
            "data.max_token=8",
        )


@pytest.mark.parametrize(
    ("typed", "asked", "got"),
    [
        (("batch.target=32", "batch.accumulation=2"), 2, 8),
        (("batch.target=10",), 10, 8),
    ],
    ids=["batch_contradiction", "target_is_multiple"],
)
def test_indivisible_batch_is_planned_as_another_batch(typed, asked, got) -> None:
    batch = light_plan(*typed, "data.num_samples=64").batch
    found = batch.samples_per_step if "batch.accumulation" not in " ".join(typed) else None
    assert (found or batch.accumulation) == got != asked


def test_batch_auto_replaces_explicit_batch_keys() -> None:
    """A micro-batch leaves nothing to choose; an accumulation follows from the target."""
    typed = light_plan("batch=auto", "batch.per_device=2", "data.num_samples=64")
    assert typed.config.batch.per_device is not None
    open_batch = ("batch=auto", "batch.per_device=null", "data.num_samples=64")
    times = light_plan(*open_batch, "batch.accumulation=3").batch
    assert times.accumulation != 3


def test_steps_and_epochs_together_use_one() -> None:
    assert light_plan("train.steps=5", "train.epochs=1").steps.total == 4  # 16 samples / 4


def test_overlong_warm_up_never_reaches_the_peak() -> None:
    plan = dataclasses.replace(hand_plan(), steps=SimpleNamespace(total=5, warmup=6))
    rates = [build_schedule(plan)(step) for step in range(5)]
    assert max(rates) == 5 / 6


def test_run_with_only_warm_up_steps_has_no_speed(tmp_path) -> None:
    record = record_of(trained(tmp_path, "train.timing_warmup_steps=2", "train.steps=2"))
    assert record.throughput.samples_per_s is None
    longer = trained(tmp_path / "longer", "train.timing_warmup_steps=2", "train.steps=4")
    assert record_of(longer).throughput.samples_per_s


def test_pytorch_warns_about_more_loader_processes_than_cores() -> None:
    with pytest.warns(UserWarning, match="suggested max number of worker"):
        DataLoader(range(4), num_workers=10_000)


def test_file_of_another_user_cannot_be_read() -> None:
    """In a process without the rights of root, which may read everything."""
    code = (
        "import os, sys, tempfile, pathlib\n"
        "path = pathlib.Path(tempfile.mkdtemp()) / 'a'\n"
        "path.write_text('text'); path.chmod(0); path.parent.chmod(0o755)\n"
        "if os.geteuid() == 0: os.seteuid(65534)\n"
        "assert path.exists() and not os.access(path, os.R_OK, effective_ids=True)\n"
        "path.read_text()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "PermissionError" in done.stderr.splitlines()[-1]


def test_run_folder_below_a_file_cannot_be_created(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    folder = RunPaths(tmp_path / "file" / "runs" / "run")
    with pytest.raises(ConfigError, match="Not a directory"), lock_run_folder(folder):
        pass
