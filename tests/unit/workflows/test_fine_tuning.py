"""What fine-tuning takes where nothing was set, and that whatever was set stays."""

import pytest
from checkpoints import save_checkpoint
from prepared import write_jsonl
from support import last_wins

from eke.config.compose import compose
from eke.config.sweep import expand
from eke.plan.planner.plan import render_plan
from eke.workflows.planning import plan_for


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fine_tuning")
    path = save_checkpoint(folder / "model", "llama")
    rows = write_jsonl(folder / "rows.jsonl", [{"text": f"row {n}"} for n in range(40)])
    return (
        "model=pretrained", f"model.name_or_path={path}", "data=jsonl", f"data.path={rows}",
        "data.tokenizer=bytes", "data.seq_len=16", "tracker=none", "hardware=cpu",
    )  # fmt: skip


def planned(files, *more, config_dir=None):
    return plan_for(compose(last_wins(*files, *more), config_dir), planning=True)


USUAL = (
    "optimizer.lr=5e-5", "train.epochs=3", "optimizer.weight_decay=0.1", "train.max_grad_norm=1",
    "schedule.warmup_frac=0.03", "batch.per_device=8",
)  # fmt: skip
UNCLIPPED = "train.max_grad_norm=null"


def set_values(plan) -> tuple:
    """Samples per step, decay, clipping and warm-up."""
    config = plan.config
    return (
        plan.batch.samples_per_step, config.optimizer.weight_decay, config.train.max_grad_norm,
        config.schedule.warmup_frac,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("typed", "lr", "others"),
    [
        ("", 5e-5, (8, 0.1, 1.0, 0.03)),
        ("peft=lora", 2e-4, (16, 0.0, 0.3, 0.03)),
        ("peft=dora data.num_samples=15", 2e-4, (8, 0.0, 0.3, 0.03)),
        ("peft=ia3", 3e-3, (8, 0.01, 1.0, 0.06)),
        ("peft=qlora hardware=a100_80 batch=auto", 2e-4, (16, 0.0, 0.3, 0.03)),
        ("peft=lora batch=guide", 2e-4, (4, 0.0, 0.3, 0.03)),
        ("peft=lora recipe=fastest", 2e-4, (16, 0.0, 0.3, 0.03)),
        (f"peft=lora {UNCLIPPED} distributed=ddp distributed.num_processes=2", 2e-4,
         (16, 0.0, None, 0.03)),
        (f"peft=lora {UNCLIPPED} memory=optimizer_in_backward train.record_grad_norm=false", 2e-4,
         (8, 0.0, None, 0.03)),
        (f"peft=lora {' '.join(USUAL)}", 5e-5, (8, 0.1, 1.0, 0.03)),
        ("optimizer=adafactor", 5e-5, (8, 0.1, 1.0, 0.03)),
        ("optimizer=muon", 5e-5, (8, 0.1, 1.0, 0.03)),
        ("optimizer=muon optimizer.adjust_lr=original", 1e-3, (8, 0.01, 1.0, 0.03)),
        ("optimizer=sgd", 0.1, (8, 0.01, 1.0, 0.03)),
        ("optimizer=lion peft=lora", 3e-4, (16, 0.03, 1.0, 0.03)),
        ("optimizer=galore", 1e-2, (8, 0.01, 1.0, 0.03)),
        ("optimizer=galore optimizer.lr=5e-3", 5e-3, (8, 0.01, 1.0, 0.03)),
    ],
)  # fmt: skip
def test_fine_tuning_defaults_are_applied(files, typed, lr, others) -> None:
    plan = planned(files, *typed.split())
    assert plan.config.optimizer.lr == pytest.approx(lr)
    assert set_values(plan) == others
    (row,) = [d for d in plan.decisions if d.key == "learning rate"]
    assert float(row.value) == pytest.approx(lr)
    assert "optimizer.lr" not in [d.key for d in plan.decisions]
    warned = any("fine-tuning usually takes less" in text for text in plan.warnings)
    assert warned is (lr not in (5e-5, 2e-4, 3e-3) and "optimizer.lr=" not in typed)


def test_rows_are_trained_for_three_epochs(files) -> None:
    plan = planned(files)
    assert plan.config.train.epochs == 3
    assert plan.steps.total == 3 * plan.steps.per_epoch
    assert planned(files, "train.steps=7").steps.total == 7
    assert planned(files, "train.epochs=1").steps.total == plan.steps.per_epoch


def test_plan_describes_the_schedule_once(files) -> None:
    plan = planned(files, "optimizer.weight_decay=0.25", "schedule=linear", "train.steps=40")
    assert plan.steps.warmup == 1, "3 %"
    rows = [line for line in render_plan(plan).splitlines() if "5e-05" in line]
    assert len(rows) == 1
    (reason,) = [d.reason for d in plan.decisions if d.key == "learning rate"]
    for part in ("fine-tuning", "schedule=linear", "from 1/1", "decay 0.25", "norm 1"):
        assert part in reason
    unclipped = planned(files, "train.max_grad_norm=null").decisions
    assert any(d.key == "learning rate" and "not clipped" in d.reason for d in unclipped)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fixed", "rates"),
    [("optimizer: {lr: 1.0e-3}\n", [1e-3, 2e-3, 1e-3]), ("", [5e-5, 2e-3, 5e-5])],
    ids=["fixed", "free"],
)
def test_sweep_values_override_fine_tuning_defaults(files, tmp_path, fixed, rates) -> None:
    (tmp_path / "sweep").mkdir()
    rows = "{a: {precision: fp32}, b: {optimizer.lr: 2.0e-3}, c: {optimizer: adafactor}}"
    (tmp_path / "sweep/mine.yaml").write_text(
        f"# @package _global_\n{fixed}sweep: {{repeats: 1, rows: {rows}}}\n"
    )
    cells = expand([*files, "sweep=mine"], tmp_path).cells
    found = [plan_for(cell.composed, planning=True).config.optimizer.lr for cell in cells]
    assert found == rates


def test_explicit_defaults_are_the_same_run(files) -> None:
    typed = planned(files, *USUAL)
    assert typed.run_id == planned(files).run_id
    assert planned(files, "optimizer.lr=1e-3").run_id != typed.run_id


def test_plan_names_sources(files) -> None:
    reasons = {d.key: d.reason for d in planned(files, "peft=lora").decisions}
    for row in ("samples per step", "learning rate", "optimizer.weight_decay",
                "train.max_grad_norm", "schedule.warmup_frac"):  # fmt: skip
        assert reasons[row].count("usual for LoRA (QLoRA, ") == 1, row
    assert "8 per device x 2 accumulated" in reasons["samples per step"]


def test_defaults_of_encoders_and_encoder_decoders(files, tmp_path) -> None:
    bert = save_checkpoint(tmp_path / "bert", "bert")
    plan = planned(files, f"model.name_or_path={bert}", "task=masked_lm")
    assert set_values(plan) == (16, 0.01, 1.0, 0.06)
    t5 = save_checkpoint(tmp_path / "t5", "t5")
    typed = ["model=pretrained", f"model.name_or_path={t5}", "task=seq2seq_lm", "data=synthetic"]
    plan = plan_for(compose([*typed, "hardware=cpu"]), planning=True)
    assert set_values(plan) == (8, 0.01, 1.0, 0.05)


def test_deepspeed_file_overrides_defaults(files, tmp_path) -> None:
    (tmp_path / "own.json").write_text('{"gradient_clipping": 1.0, "train_batch_size": 8}')
    own = f"distributed.deepspeed_config={tmp_path / 'own.json'}"
    one = ("distributed=zero2", "distributed.num_processes=1", "peft=lora")
    assert set_values(planned(files, *one, own, "hardware=h100")) == (8, 0.01, 1.0, 0.05)


def far_off(plan) -> list[str]:
    return [text.partition(":")[0] for text in plan.warnings if "more than 10 times" in text]


@pytest.mark.parametrize(
    "typed",
    [
        "optimizer.lr=2e-5 optimizer.weight_decay=0.1 batch.target=32",
        "peft=lora optimizer.lr=1e-4 optimizer.weight_decay=0 batch.target=32"
        " train.max_grad_norm=0.3 schedule.warmup_frac=0.03",
        "peft=ia3 optimizer=adafactor optimizer.lr=3e-3 schedule.warmup_steps=60 train.steps=1000",
        f"optimizer=sgd optimizer.lr=1 optimizer.weight_decay=0 schedule.warmup_frac=0 {UNCLIPPED}",
        "optimizer=lion optimizer.lr=1e-7",
        "optimizer=muon optimizer.adjust_lr=original optimizer.lr=0.02",
        "peft=lora batch.per_device=1 batch.accumulation=2",
    ],
)
def test_published_values_give_no_warning(files, typed) -> None:
    assert far_off(planned(files, *typed.split())) == []


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (
            "optimizer.lr=1e-3 optimizer.weight_decay=2 train.max_grad_norm=20"
            " schedule.warmup_frac=0.5",
            ["optimizer.lr = 0.001", "optimizer.weight_decay = 2", "schedule.warmup_frac = 0.5",
             "train.max_grad_norm = 20"],
        ),
        ("peft=lora optimizer.lr=1e-6 batch.per_device=1",
         ["batch = 1 samples per step", "optimizer.lr = 1e-06"]),
        ("optimizer=muon optimizer.lr=0.02", ["optimizer.lr = 0.02"]),
    ],
)  # fmt: skip
def test_unusual_value_is_warned_about(files, typed, told) -> None:
    plan = planned(files, *typed.split())
    assert sorted(far_off(plan)) == told
    for text in plan.warnings:
        if "more than 10 times" in text:
            assert "arXiv" in text or "transformers" in text or "github.com" in text


@pytest.mark.slow
def test_user_options_override_fine_tuning_defaults(files, tmp_path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text(
        "# @package _global_\noptimizer:\n  lr: 1.0e-3\ntrain:\n  steps: 5\n"
    )
    (tmp_path / "optimizer/mine.yaml").write_text(
        "defaults:\n  - /schema/optimizer/adamw@_here_\n  - _self_\noption: mine\nlr: 1.0e-3\n"
    )
    plan = planned(files, "experiment=mine", config_dir=tmp_path)
    assert (plan.config.optimizer.lr, plan.steps.total) == (1e-3, 5)
    content = (
        (tmp_path / "optimizer/mine.yaml").read_text().replace("option: mine", "option: adamw")
    )
    (tmp_path / "optimizer/mine.yaml").write_text(content)
    assert planned(files, "optimizer=mine", config_dir=tmp_path).config.optimizer.lr == 1e-3


def test_random_weights_keep_option_defaults() -> None:
    plan = plan_for(compose(["model=tiny", "data=synthetic", "hardware=cpu"]), planning=True)
    assert (plan.config.optimizer.lr, plan.steps.total) == (1e-3, 300)
    assert set_values(plan) == (8, 0.01, 1.0, 0.05)
    odd = ["model=tiny", "data=synthetic", "hardware=cpu", "optimizer.lr=1", "batch.per_device=500"]
    assert far_off(plan_for(compose(odd), planning=True)) == []
