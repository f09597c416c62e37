"""Plans with own code of tests/strangers, whose folders are on the import path."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from support import REPO

from eke.config import schema
from eke.config.parts import own_parts
from eke.plan.own_code import call_part, find_code, freeze_code, store_code
from eke.plan.planner import Plan

STRANGERS = [REPO / "tests" / "strangers" / name for name in ("chars", "shapes/src", "pairs")]

STEPS = ("data=synthetic", "tracker=none", "train.steps=6", "schedule=constant",
         "optimizer.lr=0.01", "optimizer.weight_decay=0.1", "train.timing_warmup_steps=2",
         "train.log_every=1", "train.checkpoint_every=null", "train.save_final=false")  # fmt: skip


def on_path() -> None:
    """Make the strangers importable in this process."""
    sys.path[:0] = [str(each) for each in STRANGERS if str(each) not in sys.path]


def own_plan(
    make_plan: Callable[..., Plan], *overrides: str, samples: int = 24, eval_samples: int = 6,
    **groups: Any,
) -> Plan:  # fmt: skip
    """A plan with these groups of own code in place of the planned ones."""
    on_path()
    plan = make_plan(*STEPS, f"data.num_samples={samples}", *overrides)
    groups = {"task": schema.CustomTask(), **groups} if "data" in groups else groups
    steps = replace(plan.steps, num_eval_samples=eval_samples)
    run = f"{plan.run_id[:8]}{abs(hash(repr(groups))) % 10**8:08d}"
    config = replace(plan.config, **groups)
    code = find_code(own_parts(config))
    model = next((part for part in own_parts(config) if part.key == "model"), None)
    if model is not None:
        shapes = [list(p.shape) for p in call_part(model).parameters()]
        config = replace(config, model=replace(config.model, shapes=shapes))
    assert code is not None
    return replace(plan, run_id=run, config=config, steps=steps, code=code)


def frozen(plan: Plan, runs: Path) -> Plan:
    """The plan, whose code lies in the folder of its run, as a worker expects it."""
    assert plan.code is not None
    store_code(plan.code)
    freeze_code(plan.code, runs / plan.run_id)
    return plan


def chars(ragged: bool = True, per: str | None = "y", **config: Any) -> dict[str, Any]:
    """The decoder that returns (logits, loss)."""
    return {
        "model": schema.CustomModel(target="chars.model.Decoder", args={"config": config}),
        "data": schema.CustomData(target="chars.data.Rows", args={"ragged": ragged}),
        "loss": schema.LossGroup(per=per),
    }


def shapes(rate: float = 0.0, augment: bool = True, width: int = 16) -> dict[str, Any]:
    """The classifier with a loss function and augmentation."""
    return {
        "model": schema.CustomModel(target="shapes.net.ViT", args={"rate": rate, "width": width}),
        "data": schema.CustomData(
            target="shapes.data.Images", args={"augment": augment},
            eval_args={"root": "test", "augment": False, "count": 8}, keys=["image", "label"],
        ),
        "loss": schema.CustomLoss(target="shapes.net:smooth", args={"epsilon": 0.2}),
    }  # fmt: skip


def pairs(couples: bool = True, width: int = 16) -> dict[str, Any]:
    """The two towers with negatives of the batch."""
    return {
        "model": schema.CustomModel(target="pairs.model.TwoTowers", args={"width": width}),
        "data": schema.CustomData(target="pairs.data.Pairs", collate="pairs.data.collate"),
        "loss": schema.LossGroup(couples_batch=couples),
    }


def run_folder(tmp_path: Path, plan: Plan) -> Path:
    """A folder for a run of this plan."""
    folder = tmp_path / f"{len(list(tmp_path.iterdir()))}-{plan.run_id}"
    folder.mkdir()
    return folder
