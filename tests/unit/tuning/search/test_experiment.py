"""The option that a search writes is the configuration that it found, whatever was typed."""

import pytest

from eke.common.errors import ConfigError
from eke.config.compose import compose
from eke.tuning.search.result import free_path, write_experiment
from eke.workflows.planning import plan_for

SMALL = ("data.num_samples=64", "tracker=none")

TYPED = [
    pytest.param(("model=tiny",), id="little"),
    pytest.param(("model=tiny", "memory=checkpointing", "memory.every_n=2", "seed=7"), id="values"),
    pytest.param(
        ("recipe=guide_best", "model=tiny_bert", "task=masked_lm", "precision=bf16"), id="a recipe"
    ),
    pytest.param(("experiment=smoke", "optimizer=lion", "optimizer.lr=3e-5"), id="an experiment"),
    pytest.param(
        ("model=tiny", "batch.per_device=4", "batch.target=16", "batch.accumulation=null",
         "compile=inductor", "compile.regional=true", "train.max_grad_norm=null"),
        id="a winner",
    ),
    pytest.param(("peft=lora", "peft.target_modules=[q_proj,v_proj]"), id="a list"),
    pytest.param(("data=synthetic", "data.lengths=lognormal", "data.seq_len=64"), id="an enum"),
]  # fmt: skip


@pytest.mark.parametrize("typed", TYPED)
def test_written_experiment_is_the_same_run(tmp_path, typed):
    wanted = compose([*typed, *SMALL])
    path = write_experiment(wanted, "found", tmp_path, tmp_path, ["2x as fast", ""])
    assert path == tmp_path / "experiment" / "found.yaml"
    again = compose(["experiment=found", "tracker=none"], tmp_path)
    before, after = (plan_for(each, planning=True, reject=False) for each in (wanted, again))
    assert after.run_id == before.run_id


@pytest.mark.slow
def test_written_experiment_includes_keys_without_default(tmp_path):
    (tmp_path / "a b.txt").write_text("words and 'words'\n" * 400)
    typed = ["data=text", f"data.path='{tmp_path}/a b.txt'", "data.seq_len=16", "tracker=none"]
    wanted = compose(typed)
    write_experiment(wanted, "found", tmp_path, tmp_path, [])
    again = compose(["experiment=found", "tracker=none"], tmp_path)
    assert again.config.data == wanted.config.data


def test_experiment_header_has_command_and_result(tmp_path):
    path = write_experiment(compose([]), "found", tmp_path, tmp_path, ["best: a: 2.00x", "", "b"])
    head = path.read_text().splitlines()[:5]
    assert head[0] == "# @package _global_"
    assert head[1].startswith("# python train.py experiment=found -- ")
    assert head[2:] == ["# best: a: 2.00x", "#", "# b"]


def test_experiment_excludes_device_and_paths(tmp_path):
    wanted = compose(["hardware=cpu", f"paths.runs={tmp_path}/r", "resources.gpus=2"])
    text = write_experiment(wanted, "found", tmp_path, tmp_path, []).read_text()
    assert not [key for key in ("hardware", "paths", "resources") if key in text]


def test_only_own_experiment_files_are_replaced(tmp_path):
    write_experiment(compose([]), "found", tmp_path, tmp_path, [])
    write_experiment(compose(["seed=3"]), "found", tmp_path, tmp_path, [])
    assert "seed: 3" in (tmp_path / "experiment/found.yaml").read_text()
    (tmp_path / "experiment/mine.yaml").write_text("# @package _global_\nseed: 4\n")
    with pytest.raises(ConfigError, match="not written by eke fit"):
        free_path(tmp_path, "mine")


@pytest.mark.parametrize("name", ["smoke", "none"])
def test_name_of_an_existing_option_is_rejected(tmp_path, name):
    """A folder of one's own with such an option is refused by every later command."""
    with pytest.raises(ConfigError, match=f"--name {name}_fit"):
        free_path(tmp_path, name)


@pytest.mark.parametrize("name", ["a b", "../up", "", "1st", "x.yaml"])
def test_invalid_experiment_name_is_rejected(tmp_path, name):
    with pytest.raises(ConfigError, match="letters, digits"):
        free_path(tmp_path, name)


def test_unwritable_folder_is_rejected_before_the_first_trial(tmp_path, monkeypatch):
    """root may write anywhere: the system's answer is made up."""
    monkeypatch.setattr("eke.tuning.search.result.os.access", lambda place, _: place != tmp_path)
    with pytest.raises(ConfigError, match=r"is not writable[^>]+-> --config-dir my_conf"):
        free_path(tmp_path, "found")
    (tmp_path / "experiment").mkdir()
    assert free_path(tmp_path, "found").parent == tmp_path / "experiment"
