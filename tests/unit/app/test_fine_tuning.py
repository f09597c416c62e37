"""What fine-tuning takes where nothing was set, and that whatever was set stays."""

import pytest
from checkpoints import save_checkpoint
from prepared import write_jsonl

from eke.app import plan_for
from eke.compose import compose


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
    return plan_for(compose([*files, *more], config_dir), planning=True)


@pytest.mark.parametrize(
    ("typed", "lr"),
    [
        ((), 5e-5),
        (("peft=lora",), 2e-4),
        (("peft=dora",), 2e-4),
        (("peft=ia3",), 3e-3),
        (("optimizer=adafactor",), 5e-5),
        (("optimizer=muon",), 5e-5),
        (("optimizer=sgd",), 0.1),
        (("optimizer=lion",), 3e-4),
        (("optimizer.lr=1e-3",), 1e-3),
        (("recipe=low_memory",), 5e-5),
    ],
    ids=str,
)
def test_the_learning_rate(files, typed, lr) -> None:
    plan = planned(files, *typed)
    assert plan.config.optimizer.lr == pytest.approx(lr)
    (row,) = [d for d in plan.decisions if d.key == "learning rate"]
    assert float(row.value) == pytest.approx(lr)
    assert "optimizer.lr" not in [d.key for d in plan.decisions]
    own = any("fine-tuning usually takes less" in text for text in plan.warnings)
    assert own is (typed in (("optimizer=sgd",), ("optimizer=lion",)))


def test_rows_are_trained_on_three_times(files) -> None:
    plan = planned(files)
    assert plan.config.train.epochs == 3
    assert plan.steps.total == 3 * plan.steps.per_epoch
    assert planned(files, "train.steps=7").steps.total == 7
    assert planned(files, "train.epochs=1").steps.total == plan.steps.per_epoch


def test_typing_the_usual_values_is_the_same_run(files) -> None:
    typed = planned(files, "optimizer.lr=5e-5", "train.epochs=3")
    assert typed.run_id == planned(files).run_id
    assert planned(files, "optimizer.lr=1e-3").run_id != typed.run_id


def test_an_experiment_and_an_option_of_the_user_win(files, tmp_path) -> None:
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


def test_random_weights_keep_the_options_own() -> None:
    plan = plan_for(compose(["model=tiny", "data=synthetic", "hardware=cpu"]), planning=True)
    assert (plan.config.optimizer.lr, plan.steps.total) == (1e-3, 300)
