"""Own code of three strangers' projects trains as in a plain loop."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from own_plans import chars, frozen, on_path, own_plan, pairs, run_folder, shapes
from torch.utils.data import default_collate
from trained import continue_job, steps_of, train_job

from eke.plan.planner import Plan
from eke.plan.record import metrics
from eke.training.batches.batches import SampleOrder
from eke.training.custom.samples import seed_all

on_path()


def batches(plan: Plan, rows: Any, collate: Any = default_collate) -> Iterator[Any]:
    """The batches of each step, in eke's order and with its seeds."""
    order = SampleOrder(len(rows), plan.batch.samples_per_step, plan.config.seed)
    for keys in order.steps(0, plan.steps.total):
        drawn = []
        for epoch, index in keys:
            seed_all(plan.config.seed, 0, epoch, index)
            drawn.append(rows[index])
        yield collate(drawn)


def plain_loop(plan: Plan, model: torch.nn.Module, steps: Any, loss: Callable[..., Any]) -> Any:
    """Losses of a plain loop."""
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    config = plan.config.optimizer
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2))
    found = []
    for batch in steps:
        value = loss(model, batch)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), plan.config.train.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        found.append(value.item())
    return found


def eke_losses(plan: Plan, tmp_path: Any) -> list[float]:
    return [loss for loss, _ in steps_of(train_job(plan, run_folder(tmp_path, plan))).values()]


def test_decoder_that_returns_its_loss(make_plan, tmp_path) -> None:
    from chars.data import Rows
    from chars.model import Decoder, Sizes

    plan = own_plan(make_plan, "batch.per_device=8", **chars())
    torch.manual_seed(plan.config.seed)
    model = Decoder(Sizes())
    steps = batches(plan, Rows("train"))
    plain = plain_loop(plan, model, steps, lambda m, b: m(**b)[1])
    assert eke_losses(plan, tmp_path) == pytest.approx(plain, abs=1e-5)
    assert plain[0] != plain[-1]
    cut = own_plan(make_plan, "batch.per_device=4", "batch.accumulation=2", **chars())
    assert eke_losses(cut, tmp_path) == pytest.approx(plain, abs=1e-5)


def test_classifier_with_own_loss_and_augmentation(make_plan, tmp_path) -> None:
    from shapes.data import Images
    from shapes.net import ViT, smooth

    plan = own_plan(make_plan, "batch.per_device=10", samples=20, **shapes())
    torch.manual_seed(plan.config.seed)
    model = ViT()

    def loss(m: Any, b: Any) -> Any:
        return smooth(m(b[0]), {"label": b[1]}, epsilon=0.2)

    plain = plain_loop(plan, model, batches(plan, Images()), loss)
    assert eke_losses(plan, tmp_path) == pytest.approx(plain, abs=1e-5)
    cut = own_plan(
        make_plan, "batch.per_device=5", "batch.accumulation=2", "dataloader.workers=2", samples=20,
        **shapes(),
    )  # fmt: skip
    assert eke_losses(cut, tmp_path) == pytest.approx(plain, abs=1e-5)


def test_pairs_with_negatives_of_the_batch(make_plan, tmp_path) -> None:
    from pairs.data import Pairs, collate
    from pairs.model import TwoTowers

    plan = own_plan(make_plan, "batch.per_device=8", samples=16, **pairs())
    torch.manual_seed(plan.config.seed)
    model = TwoTowers()
    steps = batches(plan, Pairs("train"), collate)
    plain = plain_loop(plan, model, steps, lambda m, b: m(**b)["loss"])
    assert eke_losses(plan, tmp_path) == pytest.approx(plain, abs=1e-5)


def test_loss_with_its_own_count(make_plan, tmp_path) -> None:
    from eke.config import schema

    groups = {**shapes(), "loss": schema.CustomLoss(target="shapes.net.summed")}
    wrong = {**groups, "loss": schema.CustomLoss(target="shapes.net.summed", per="label")}
    plans = [
        own_plan(make_plan, "batch.per_device=5", "batch.accumulation=2", samples=20, **each)
        for each in (groups, wrong)
    ]
    plans[1] = own_plan(make_plan, "batch.per_device=10", samples=20, **wrong)
    right, other = (eke_losses(plan, tmp_path) for plan in plans)
    assert other == pytest.approx(right, abs=1e-5)


def test_own_model_with_data_and_loss_of_eke(make_plan, tmp_path) -> None:
    from eke.config import schema

    model = schema.CustomModel(
        target="chars.model:Decoder", args={"config": {"vocab": 320}}, inputs={"x": "input_ids"},
    )  # fmt: skip
    plan = own_plan(make_plan, "batch.per_device=8", "data.seq_len=16", model=model)
    whole = eke_losses(plan, tmp_path)
    cut = own_plan(
        make_plan, "batch.per_device=2", "batch.accumulation=4", "data.seq_len=16", model=model
    )
    assert eke_losses(cut, tmp_path) == pytest.approx(whole, abs=1e-5)
    assert whole[-1] < whole[0]


def test_own_optimizer_schedule_and_loss_of_a_model_of_eke(make_plan, tmp_path) -> None:
    from eke.config import schema

    plan = own_plan(
        make_plan, "batch.per_device=8", "data.seq_len=16", "model=tiny",
        optimizer=schema.CustomOptimizer(
            target="shapes.parts.Momentum", args={"beta": 0.8}, lr=0.1
        ),
        schedule=schema.CustomSchedule(target="shapes.parts.falling", args={"power": 2.0}),
        loss=schema.CustomLoss(target="shapes.parts.focal", args={"gamma": 1.0}, per="labels"),
    )  # fmt: skip
    job = train_job(plan, run_folder(tmp_path, plan))
    assert type(job.optimizer).__name__ == "Momentum"
    assert all("role" not in group for group in job.optimizer.param_groups)
    assert [group["weight_decay"] for group in job.optimizer.param_groups][-1] == 0.0
    assert job.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * (1 - 5 / 6) ** 2)
    losses = [loss for loss, _ in steps_of(job).values()]
    assert losses[-1] < losses[0]


def rank_losses(plan: Plan, tmp_path: Any, train_plan: Any) -> list[float]:
    folder = train_plan(frozen(plan, tmp_path / "runs"))
    rows, _ = metrics.read_rows(folder / "metrics.jsonl")
    return [row[metrics.LOSS] for row in metrics.latest(rows, metrics.LOSS)]


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
@pytest.mark.parametrize("project", ["chars", "shapes"])
def test_two_processes_match_one(how, project, make_plan, tmp_path, train_plan) -> None:
    groups = chars() if project == "chars" else shapes()
    one = own_plan(make_plan, "batch.per_device=8", samples=20, **groups)
    two = own_plan(make_plan, "batch.per_device=4", f"distributed={how}", samples=20, **groups)
    expected = eke_losses(one, tmp_path)
    assert rank_losses(two, tmp_path, train_plan) == pytest.approx(expected, abs=1e-5)


def test_coupled_pairs_are_equal_with_ddp_and_fsdp(make_plan, tmp_path, train_plan) -> None:
    ddp, fsdp = (
        own_plan(make_plan, "batch.per_device=4", f"distributed={how}", samples=16, **pairs())
        for how in ("ddp", "fsdp")
    )
    expected = rank_losses(ddp, tmp_path, train_plan)
    assert rank_losses(fsdp, tmp_path, train_plan) == pytest.approx(expected, abs=1e-5)


SAVED = ("train.checkpoint_every=2", "train.keep_checkpoints=9", "train.save_final=true")


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_is_exact_with_dropout_and_augmentation(workers, make_plan, tmp_path) -> None:
    each = (*SAVED, "batch.per_device=5", "batch.accumulation=2", f"dataloader.workers={workers}")
    for groups in (shapes(rate=0.3), chars(dropout=0.2)):
        plan = own_plan(make_plan, *each, samples=20, **groups)
        job = train_job(plan, run_folder(tmp_path, plan))
        whole = steps_of(job)
        again = steps_of(continue_job(job, 2, run_folder(tmp_path, plan) / "again"))
        assert again == {step: values for step, values in whole.items() if step > 2}


def test_export_loads_as_a_hub_mixin(make_plan, tmp_path) -> None:
    from huggingface_hub import PyTorchModelHubMixin
    from shapes.net import ViT

    class OnHub(ViT, PyTorchModelHubMixin):
        pass

    plan = own_plan(make_plan, *SAVED, "batch.per_device=10", samples=20, **shapes(rate=0.1))
    job = train_job(plan, run_folder(tmp_path, plan))
    loaded = OnHub.from_pretrained(job.paths.model)
    images = torch.randn(2, 1, 16, 16)
    job.model.eval()
    assert torch.equal(loaded(images), job.model(images))
    assert loaded.layers[1].drop.rate == pytest.approx(0.1)


def test_tied_weights_are_saved_once(make_plan, tmp_path) -> None:
    from safetensors.torch import load_file

    plan = own_plan(make_plan, *SAVED, "batch.per_device=8", **chars(hidden=16))
    job = train_job(plan, run_folder(tmp_path, plan))
    saved = load_file(job.paths.model / "model.safetensors")
    assert len({"head.weight", "table.weight"} & saved.keys()) == 1
    settings = json.loads((job.paths.model / "config.json").read_text())
    assert settings == {"target": "chars.model:Decoder", "config": {"hidden": 16}}


def test_checkpointing_repeats_layers_found_by_structure(make_plan, tmp_path) -> None:
    plan = own_plan(make_plan, "batch.per_device=8", **chars())
    whole = eke_losses(plan, tmp_path)
    for way in ("memory=checkpointing", "memory.checkpointing=selective"):
        plan = own_plan(make_plan, "batch.per_device=8", way, **chars())
        job = train_job(plan, run_folder(tmp_path, plan))
        assert job.effective["layers_recomputed"] == 2, way
        assert [loss for loss, _ in steps_of(job).values()] == pytest.approx(whole, abs=1e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    "technique",
    [("precision=bf16",), ("compile=aot_eager",), ("compile=aot_eager", "compile.regional=true"),
     ("optimizer=adafactor",), ("memory.optimizer_in_backward=true", "train.max_grad_norm=null")],
)  # fmt: skip
def test_techniques_train_own_code(technique, make_plan, tmp_path) -> None:
    plan = own_plan(make_plan, "batch.per_device=8", *technique, **chars())
    losses = eke_losses(plan, tmp_path)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_unused_parameters_on_two_processes(how, make_plan, tmp_path, train_plan) -> None:
    from eke.config import schema

    groups = {**shapes(), "model": schema.CustomModel(target="shapes.net.Partly")}
    one = own_plan(make_plan, "batch.per_device=8", samples=20, **groups)
    two = own_plan(make_plan, "batch.per_device=4", f"distributed={how}", samples=20, **groups)
    expected = eke_losses(one, tmp_path)
    assert rank_losses(two, tmp_path, train_plan) == pytest.approx(expected, abs=1e-5)
