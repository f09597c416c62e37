"""A search before its first trial: what it starts from, and what it refuses."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from eke.cli import main as cli
from eke.common.errors import ConfigError, EkeError
from eke.config.compose import compose, split_arguments
from eke.plan.record import Outcome
from eke.rules.techniques import Numerics
from eke.tuning.search.result import MADE_BY, Fit
from eke.tuning.search.search import Measured, trial_overrides
from eke.tuning.search.search_space import Objective, Trial
from eke.workflows.autotune import TuneRequest, keep_result, prepare
from eke.workflows.planning import plan_for

pytestmark = pytest.mark.usefixtures("own_machine")

WORK = ("model=tiny", "data=synthetic", "data.seq_len=32", "data.num_samples=64",
        "train.steps=20", "tracker=none")  # fmt: skip


FEW = ("compile=none", "memory=none", "kernels=none")
"""With these a search has few candidates."""


def wish(*typed: str, numerics: Numerics = Numerics.same) -> TuneRequest:
    return TuneRequest(typed, split_arguments([*WORK, *typed]), Objective.speed, numerics, 8)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fastest", "low_memory", "guide_best", "baseline"])
def test_first_trial_equals_the_starting_configuration_with_a_recipe(recipe, capsys) -> None:
    fitting = prepare(wish(f"recipe={recipe}", "batch.target=8", "precision=bf16"))
    first = fitting.candidates.found[fitting.candidates.first]
    trial = trial_overrides(fitting.typed, first.overrides, 0)
    tried = plan_for(compose(trial, in_sweep=True), planning=True, reject=False)
    typed = plan_for(
        compose([*WORK, f"recipe={recipe}", "batch.target=8", "precision=bf16"]),
        planning=True, reject=False,
    )  # fmt: skip
    assert tried.batch == typed.batch
    assert tried.compute == typed.compute
    for section in ("attention", "compile", "kernels", "memory", "optimizer", "precision"):
        assert getattr(tried.config, section) == getattr(typed.config, section), section


@pytest.mark.slow
def test_search_id_is_independent_of_the_launcher(capsys) -> None:
    one, same, other = (
        prepare(wish(*FEW, *typed)).paths
        for typed in (("seed=1",), ("seed=1", "launcher.cpu_slots=2"), ("seed=2",))
    )
    assert one == same
    assert one != other


@pytest.mark.slow
def test_search_without_a_fitting_configuration_is_rejected(own_machine, capsys) -> None:
    own_machine(700 * 2**20)
    with pytest.raises(ConfigError, match="eke plan --why"):
        prepare(wish("model.hidden_size=8192", "model.num_hidden_layers=40"))


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ((), "fit_tiny"),
        pytest.param(("--objective", "memory"), "fit_tiny_memory", marks=pytest.mark.slow),
        (("--objective", "cost", "--numerics", "reduced"), "fit_tiny_cost_reduced"),
        pytest.param(("--objective", "memory", "--name", "mine"), "mine", marks=pytest.mark.slow),
    ],
)
def test_different_objectives_are_separate_options(flags, name, capsys, tmp_path) -> None:
    """Found out where the name is taken: also before anything runs."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / f"{name}.yaml").write_text("seed: 1\n")
    folder = ("--config-dir", str(tmp_path))
    assert cli(["fit", *folder, *flags, *WORK, "plan_only=true"]) == 2
    told = capsys.readouterr().err
    assert f"--name = {name}" in told
    assert f"--name {name}_fit" in told


@pytest.mark.parametrize(
    ("key", "value", "usual"),
    [
        ("rerun", "TRUE", "false"),
        ("repeat", "2", "0"),
        ("ignore_forecast", "TRUE", "false"),
        ("launcher.detach", "TRUE", "false"),
    ],
)
def test_key_without_meaning_for_a_search_is_rejected(key, value, usual) -> None:
    with pytest.raises(ConfigError) as refused:
        prepare(wish(f"{key}={value}"))
    (problem,) = refused.value.problems
    assert (problem.key, problem.value) == (key, value.lower())
    assert str(problem.fix) == f"{key}={usual}"


def values_of(fitting, axis: str) -> list[tuple[str, ...]]:
    """Overrides of each value of an axis that is a candidate's."""
    found = [v for each in fitting.candidates.found for v in each.values]
    return [v.overrides for v in dict.fromkeys(found) if v.name.startswith(f"{axis}=")]


@pytest.mark.slow
def test_techniques_override_the_values_of_an_experiment(tmp_path, capsys) -> None:
    """And none of them is what was typed once more, which would be one run tried as two."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\n# mine -- an earlier find.\ndefaults:\n"
        "- override /memory: checkpointing\nmemory:\n  every_n: 2\n"
    )
    typed = ("experiment=mine", "attention=sdpa", "compile=none", "kernels=none")
    folder = ["--config-dir", str(tmp_path)]
    asked = replace(wish(*typed), arguments=split_arguments([*folder, *WORK, *typed]))
    fitting = prepare(asked)
    plans = [each.plan for each in fitting.candidates.found]
    configs = [(plan.config.memory, plan.batch.per_device) for plan in plans]
    assert len({repr(each) for each in configs}) == len(configs)
    assert ("memory=checkpointing", "memory.every_n=1") in values_of(fitting, "memory")
    assert () in values_of(fitting, "memory")
    selective = [m for m, _ in configs if m.option == "checkpointing_selective"]
    assert {each.every_n for each in selective} == {1}


@pytest.mark.slow
def test_hyperparameters_of_an_experiment_are_kept(tmp_path, capsys) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\n# mine -- one.\noptimizer:\n  lr: 0.5\n"
    )
    typed = ("experiment=mine", "precision=fp32", *ALL_TYPED)
    folder = ["--config-dir", str(tmp_path)]
    asked = wish(*typed, numerics=Numerics.reduced)
    fitting = prepare(replace(asked, arguments=split_arguments([*folder, *WORK, *typed])))
    rates = {each.plan.config.optimizer.lr for each in fitting.candidates.found}
    assert rates == {0.5}
    assert ("optimizer=adamw_8bit",) in values_of(fitting, "optimizer")


@pytest.mark.slow
def test_techniques_override_the_values_of_a_recipe(capsys) -> None:
    """It types keys of groups that a search may change."""
    mlm = (
        "model=tiny_bert", "task=masked_lm", "data=synthetic", "data.seq_len=32",
        "data.num_samples=4096", "batch.per_device=4096", "train.steps=20", "tracker=none",
        "model.vocab_size=30522", "compile=none",
    )  # fmt: skip
    asked = replace(wish(), arguments=split_arguments([*mlm, "recipe=low_memory"]))
    fitting = prepare(asked)
    assert "kernels=sparse_prediction" in fitting.typed
    assert "kernels.fused_linear_cross_entropy=true" in fitting.typed
    kernels = {
        (each.plan.config.kernels.sparse_prediction,
         each.plan.config.kernels.fused_linear_cross_entropy): v.name
        for each in fitting.candidates.found for v in each.values if v.name.startswith("kernels=")
    }  # fmt: skip
    assert (False, False) in kernels
    assert kernels[False, True] == "kernels=fused_linear_cross_entropy"


ALL_TYPED = ("attention=sdpa", "compile=none", "kernels=none", "memory=none")


def test_search_without_choices_is_rejected() -> None:
    with pytest.raises(ConfigError) as refused:
        prepare(wish(*ALL_TYPED, "batch.per_device=1"))
    (problem,) = refused.value.problems
    assert problem.fix.remark.startswith("python train.py ")
    assert prepare(wish(*ALL_TYPED, "batch.per_device=2")).candidates.found[1:], "two micro-batches"


class Started:
    """Trials that end at once; some may not have been taken."""

    def __init__(self, stopped: bool = False) -> None:
        self.stopped = stopped

    def wait(self) -> bool:
        """Whether a signal asked to stop."""
        return self.stopped


def launcher_that(started) -> SimpleNamespace:
    """A launcher with trials of the test's own."""
    return SimpleNamespace(start=started, place_of=None, trials_at_once=3)


def test_stop_request_ends_the_search(tmp_path) -> None:
    """Also where the trial at hand has come to its own end before it could save and stop."""
    fitting = prepare(wish(*FEW, f"paths.runs={tmp_path}"))
    job = SimpleNamespace(outcome=Outcome.ok, kind="cpu")
    for stopped in (False, True):
        fitting.launcher = launcher_that(lambda *_, stopped=stopped: Started(stopped))
        with pytest.raises(KeyboardInterrupt) if stopped else nullcontext():
            fitting._run([job])


@pytest.mark.slow
def test_launcher_that_rejects_every_trial_ends_the_search(tmp_path) -> None:
    fitting = prepare(wish(*FEW, f"paths.runs={tmp_path}"))

    def start(books, *_) -> Started:
        for job in books.jobs[taken:]:
            job.outcome, job.reason = Outcome.crashed, "sbatch: no such partition"
        return Started()

    def jobs() -> list[SimpleNamespace]:
        return [SimpleNamespace(outcome=Outcome.ok, record=None) for _ in range(2)]

    fitting.launcher = launcher_that(start)
    taken = 1
    fitting._run(jobs())
    taken = 0
    fitting._run([])  # a rule refused them all: nothing was to be submitted
    with pytest.raises(EkeError, match="sbatch: no such partition"):
        fitting._run(jobs())
    fitting.trials.append(Measured(0, 0, Trial(1.0), "ok"))
    fitting._run(jobs())  # the cluster does take trials: it is about these


def test_missing_package_is_reported_before_the_first_trial(monkeypatch) -> None:
    """Of what was typed; candidates that lack theirs are left out."""
    monkeypatch.setattr(
        "eke.rules.requirements._is_importable", lambda name: name != "bitsandbytes"
    )
    typed = ("optimizer=adamw_8bit", *FEW)
    with pytest.raises(ConfigError) as refused:
        prepare(wish(*typed))
    (problem,) = refused.value.problems
    assert (problem.key, problem.id) == ("optimizer", "package_missing")
    assert prepare(wish(*typed, "plan_only=true")).candidates.first is not None, "for elsewhere"


@pytest.mark.parametrize("record", [None, object()], ids=["no record", "a record"])
def test_full_disk_stops_only_an_unfinished_search(record, monkeypatch) -> None:
    """A search that is over needs no room to be typed again."""
    monkeypatch.setattr("eke.rules.training._free_bytes", lambda facts: 0)
    monkeypatch.setattr(
        "eke.launch.local.LocalLauncher.place_of", lambda *_: SimpleNamespace(record=record)
    )
    refused = pytest.raises(ConfigError, match=" 0 MiB")
    with refused if record is None else nullcontext():
        prepare(wish(*FEW))


def test_planned_search_needs_no_writable_folder(tmp_path, monkeypatch) -> None:
    taken = tmp_path / "experiment" / "mine.yaml"
    taken.parent.mkdir()
    taken.write_text("my own")
    monkeypatch.setattr("eke.workflows.autotune.conf_folder", lambda: tmp_path)
    named = replace(wish(*FEW), name="mine")
    with pytest.raises(ConfigError, match="eke fit"):
        prepare(named)
    monkeypatch.setattr("eke.tuning.search.result.os.access", lambda *_: False)
    assert prepare(replace(wish(*FEW, "plan_only=true"), name="free")).option == "free"
    with pytest.raises(ConfigError, match="is not writable"):
        prepare(replace(wish(*FEW), name="free"))
    with pytest.raises(ConfigError, match="letters, digits"):
        prepare(replace(wish(*FEW, "plan_only=true"), name="no name"))


@pytest.mark.parametrize("is_found", [True, False])
def test_only_a_significant_result_is_written(is_found, tmp_path, monkeypatch, capsys) -> None:
    fitting = prepare(replace(wish(*FEW, f"paths.runs={tmp_path}"), name="mine"))
    fitting.paths.folder.mkdir()
    own = tmp_path / "own"
    monkeypatch.setattr("eke.workflows.autotune.conf_folder", lambda: own)
    first = fitting.candidates.first
    other = next(n for n, _ in enumerate(fitting.candidates.found) if n != first)
    faster = 0.5 if is_found else 0.999
    for number, step_s in ((first, 1.0), (other, faster), (other, faster)):
        trial = Trial(step_s, 0.01)
        fitting.trials.append(Measured(number, 0, trial, "ok"))
        fitting.search.tell(number, trial)
    keep_result(fitting, Fit(fitting.search, fitting.candidates, fitting.trials, Numerics.same))
    out = capsys.readouterr().out
    assert (own / "experiment" / "mine.yaml").exists() is is_found
    assert ("experiment=mine" in out) is is_found
    assert ("no option is written: your configuration may be as good" in out) is not is_found
    # Either way the reader can run it.
    winner = " ".join(fitting.candidates.found[other].overrides)
    assert is_found or winner in out


def test_option_of_an_earlier_search_is_named(tmp_path, monkeypatch, capsys) -> None:
    older = tmp_path / "experiment" / "mine.yaml"
    older.parent.mkdir()
    older.write_text(f"# found by {MADE_BY}.\n")
    monkeypatch.setattr("eke.workflows.autotune.conf_folder", lambda: tmp_path)
    fitting = prepare(replace(wish(*FEW, f"paths.runs={tmp_path}"), name="mine"))
    fitting.paths.folder.mkdir()
    keep_result(fitting, Fit(fitting.search, fitting.candidates, [], Numerics.same))
    assert str(older) in capsys.readouterr().out
