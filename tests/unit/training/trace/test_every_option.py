"""Every option is traced, but for a short list; no library's error text reaches a user."""

import subprocess
import sys
from pathlib import Path

import pytest
from support import REPO, last_wins

from eke.common.paths import conf_folder
from eke.config.compose import compose
from eke.models.sizes import shared_state_bytes
from eke.training.trace.trace_plan import Untraceable, trace
from eke.workflows.planning import plan_for

SMALL = (
    "model.hidden_size=64", "model.num_hidden_layers=1", "model.num_attention_heads=4",
    "model.vocab_size=320", "data=synthetic", "data.seq_len=64", "data.num_samples=64",
    "tracker=none", "hardware=h100",
)  # fmt: skip

NOT_TRACED = {"peft=qlora": "weights become 4-bit where bitsandbytes reads their values"}
"""Option -> why."""

ELSEWHERE = {
    "data": "the lengths of rows decide, not where they come from; most options need files",
    "experiment": "whole settings, made of the options here",
    "hardware": "a device, not a technique",
    "slurm": "a cluster",
    "sweep": "sets of runs, made of the options here",
    "tracker": "outside of the step",
}
"""Group whose options are not tried -> why."""

UNPLANNED = {
    "model=pretrained": "needs a checkpoint (tests/equivalence)",
    "offload=nvme": "needs a folder and two GPUs",
    "hydra": "no group of eke's",
    "schema": "no group of eke's",
}

NEEDS = {
    "attention=flash2": ("precision=bf16",),
    "attention=flash3": ("precision=bf16",),
    "memory=max_savings": ("train.max_grad_norm=null",),
    "memory=optimizer_in_backward": ("train.max_grad_norm=null",),
    "offload=optimizer_cpu": ("distributed=zero2",),
    "offload=params_cpu": ("distributed=zero3",),
    "task=masked_lm": ("model=tiny_bert",),
    "task=seq2seq_lm": ("model=tiny_t5",),
    "model=tiny_bert": ("task=masked_lm",),
    "model=tiny_t5": ("task=seq2seq_lm",),
}
"""Option -> what it is planned with."""


def plan_of(*overrides):
    return plan_for(compose(list(last_wins(*SMALL, *overrides))), planning=True)


def options() -> list[str]:
    """Of models one of each family: sizes are given here."""
    folders = [p for p in conf_folder().iterdir() if p.name not in ELSEWHERE | UNPLANNED]
    found = {f"{path.parent.name}={path.stem}" for each in folders for path in each.glob("*.yaml")}
    sizes = {f"model={path.stem}" for path in (conf_folder() / "model").glob("*.yaml")}
    tiny = {option for option in sizes if option.startswith("model=tiny")}
    found = {option for option in found if not option.endswith("=custom")}  # needs a target
    return sorted(found - (sizes - tiny) - set(UNPLANNED) - set(NOT_TRACED))


@pytest.mark.slow
@pytest.mark.parametrize("option", options())
def test_every_option_is_traced(option) -> None:
    batch = () if option == "batch=auto" else ("batch.per_device=2",)
    assert trace(plan_of(*batch, option, *NEEDS.get(option, ()))).components["weights"] > 0


@pytest.mark.parametrize("option", NOT_TRACED)
def test_untraceable_option_has_a_reason(option) -> None:
    with pytest.raises(Untraceable, match=NOT_TRACED[option]):
        trace(plan_of("batch.per_device=2", option))


@pytest.mark.slow
@pytest.mark.parametrize("option", ["adamw_torchao_8bit", "adamw_torchao_4bit", "adamw_bf16_sr"])
def test_compiled_optimizer_state_bytes_match_formulas(option) -> None:
    plan = plan_of("batch.per_device=2", "precision=bf16_pure", f"optimizer={option}")
    counters = 1024  # float32 numbers of steps, and learning rates
    found = trace(plan).components["optimizer"]
    expected = shared_state_bytes(plan.config, plan.size).optimizer
    assert expected <= found <= expected + counters


def test_apollo_projections_are_traced_without_a_generator() -> None:
    assert trace(plan_of("batch.per_device=2", "optimizer=apollo")).components["optimizer"] > 0


def test_paged_moments_are_excluded_from_device_memory() -> None:
    """By hand: two bytes a number, or eight, of tensors with 100,000 numbers and more."""
    wide = ("batch.per_device=2", "model.hidden_size=512")
    paged, kept = (plan_of(*wide, f"optimizer={name}adamw_8bit") for name in ("paged_", ""))
    there, whole = (shared_state_bytes(p.config, p.size).optimizer for p in (paged, kept))
    large = [p for p in shapes(paged) if p[1] >= 100_000]
    assert whole - there == sum((8 if embedding else 2) * number for embedding, number in large)
    assert shared_state_bytes(paged.config, paged.size, host=True).optimizer == whole
    traced = trace(kept).components["optimizer"] - trace(paged).components["optimizer"]
    assert traced == whole - there


@pytest.mark.slow
def test_first_trace_of_a_process_supports_paging() -> None:
    """bitsandbytes is imported by nothing before it there."""
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]; from test_every_option import *\n"
        "plan = plan_of('batch.per_device=2', 'model.hidden_size=512', "
        "'optimizer=paged_adamw_8bit')\n"
        "assert 'bitsandbytes' not in sys.modules; print(trace(plan).components['optimizer'])"
    )
    here = Path(__file__).parent
    command = [sys.executable, "-c", code, str(here), str(REPO / "tests")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def shapes(plan) -> list[tuple[bool, int]]:
    """Of each weight: whether it is an embedding, and how many numbers it has."""
    import torch

    from eke.training.model.save_model import build_trainable

    with torch.device("meta"):
        model, _ = build_trainable(plan, torch.device("meta"))
    return [("embed" in name, p.numel()) for name, p in model.named_parameters()]
