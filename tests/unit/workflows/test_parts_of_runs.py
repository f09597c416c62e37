"""`eke evaluate` and `eke generate` of sharded runs that have saved parts and no model."""

import json
import shutil

import pytest
from support import TINY, last_wins

from eke.cli import main
from eke.common.errors import EkeError
from eke.common.paths import RunPaths
from eke.plan.record import metrics
from eke.workflows.evaluate import evaluate_run

CASES = {
    "random": ("model=tiny",),
    "experts": ("model=tiny_moe",),
    "lora": ("model=tiny", "peft=lora"),
    "classes": ("model=tiny_bert", "task=sequence_classification", "task.num_labels=3"),
}


@pytest.fixture
def stopped(train_ranks, monkeypatch, tmp_path):
    """Overrides -> the folder of a run of two ranks whose only checkpoint has no model."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def run(*overrides: str):
        typed = (*TINY, "data=synthetic", "data.num_samples=16", "data.num_eval_samples=4")
        typed += ("distributed=fsdp", "distributed.num_processes=2", "train.steps=3")
        typed += ("train.save_final=false", "train.checkpoint_every=2", "train.eval_every=2")
        typed += ("tracker=none",)
        folder = train_ranks(*last_wins(*typed, *overrides))
        (made,) = (folder / "checkpoints").glob("step-*")
        assert not (made / "model").exists()
        assert not (folder / "model").exists()
        return folder

    return run


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_parts_are_evaluated_like_the_run(case, stopped, capsys) -> None:
    folder = stopped(*case)
    rows, _ = metrics.read_rows(RunPaths(folder).metrics)
    (loss,) = (r[metrics.EVAL_LOSS] for r in metrics.latest(rows, metrics.EVAL_LOSS)
               if r[metrics.STEP] == 2)  # fmt: skip
    found = evaluate_run(str(folder), [])
    assert found.step == 2
    assert found.metrics["loss"] == pytest.approx(loss, rel=1e-5)
    several = evaluate_run(str(folder), ["distributed.num_processes=2"])
    assert several.metrics == pytest.approx(found.metrics, rel=1e-6)
    assert several.num_samples == found.num_samples
    if "task=sequence_classification" not in case and "peft=lora" not in case:
        assert main(["generate", str(folder), "ab", "--max-new-tokens=4"]) == 0
        assert capsys.readouterr().out


@pytest.mark.slow
def test_a_missing_or_short_part_is_one_error_with_its_fix(stopped) -> None:
    folder = stopped()
    record = RunPaths(folder).record
    content = json.loads(record.read_text())
    record.write_text(json.dumps(content | {"outcome": "preempted"}))
    assert evaluate_run(str(folder), []).step == 2
    (part,) = folder.glob("checkpoints/step-*/part-00001-*")
    data = part.read_bytes()
    for broken in (data[:-8], None):
        part.unlink()
        if broken is not None:
            part.write_bytes(broken)
        with pytest.raises(EkeError, match=rf"(?s){part.name}.*->.*train.steps=3"):
            evaluate_run(str(folder), [])
    shutil.rmtree(part.parent)
    with pytest.raises(EkeError, match="is not finished"):
        evaluate_run(str(folder), [])
