"""Composition: values, choices, Hydra's global state, imports, and garbage."""

import subprocess
import sys

import hydra
import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from eke.common.errors import ConfigError, Problem
from eke.common.paths import conf_folder
from eke.config.compose import Composed, compose, split_arguments
from eke.config.compose.catalogue import make_catalogue
from eke.config.compose.compose_cache import hydra_base, hydra_state
from eke.config.schema import SGD, AutoBool, BertModel, Config


def test_defaults_compose() -> None:
    composed = compose([])
    assert isinstance(composed.config, Config)
    assert composed.config.seed == 0
    assert composed.choices == {**make_catalogue().defaults, "attention": "sdpa"}
    assert composed.overrides == ()


def test_values_have_their_types() -> None:
    typed = ["optimizer=sgd", "optimizer.momentum=0.5", "precision.tf32=off", "train.steps=7"]
    config = compose(typed).config
    assert isinstance(config.optimizer, SGD)
    assert config.optimizer.momentum == 0.5
    assert config.precision.tf32 is AutoBool.off
    assert config.train.steps == 7


def test_experiment_changes_choices_and_overrides_are_applied_last() -> None:
    composed = compose(["experiment=guide_single_gpu", "schedule=cosine"])
    assert isinstance(composed.config.model, BertModel)
    assert composed.choices["model"] == "bert_large"
    assert composed.choices["experiment"] == "guide_single_gpu"
    assert composed.choices["schedule"] == "cosine"


def test_overrides_are_stored_unchanged() -> None:
    assert compose(["++seed=1", "optimizer=sgd"]).overrides == ("++seed=1", "optimizer=sgd")


TWICE = [
    "seed=1 seed=2",
    "seed=1 ++seed=2",
    "++seed=1 seed=2",
    "optimizer=adamw optimizer=sgd",
    "optimizer=nosuch optimizer=sgd",
    "optimizer=adamw optimizer.lr=0.3 optimizer=sgd",
    "optimizer.lr=0.1 optimizer=sgd optimizer.lr=0.2",
    "recipe=guide_best recipe=none",
    "experiment=smoke experiment=none",
    "+trainer.extra.debug=1 trainer.extra.debug=2",
    "+trainer.extra.debug=1 ++trainer.extra.debug=2",
    "++trainer.extra={a:1} ++trainer.extra={b:2}",
    "data=synthetic data.seq_len=64 data.seq_len=32",
]


@pytest.mark.parametrize("typed", TWICE)
def test_last_value_of_a_repeated_key_is_used(typed) -> None:
    with hydra_state():
        hydras = OmegaConf.to_object(hydra.compose("config", typed.split()))
    mine = compose(typed.split()).config
    for section in ("optimizer", "seed", "train", "data", "precision", "memory", "trainer"):
        assert getattr(mine, section) == getattr(hydras, section)


@pytest.mark.parametrize("typed", ["+seed=1 seed=2", "seed=1 +seed=2", "~seed seed=2"])
def test_override_rejected_by_hydra_is_rejected(typed) -> None:
    with hydra_state(), pytest.raises(hydra.errors.HydraException):
        hydra.compose("config", typed.split())
    with pytest.raises(ConfigError):
        compose(typed.split())


@pytest.mark.parametrize(
    ("typed", "kept", "warned"),
    [
        ("seed=1 seed=2", "seed=2", ["seed=1", "seed=2"]),
        ("seed=1,2 seed=3", "seed=3", ["seed=1,2", "seed=3"]),
        ("seed=3 optimizer=sgd seed=1,2", "optimizer=sgd seed=1,2", ["seed=3", "seed=1,2"]),
        ("hydra/launcher=slurm hydra/launcher=local", "hydra/launcher=local", ["slurm", "local"]),
        ("sweep.repeats=2 sweep.repeats=3", "sweep.repeats=3", ["repeats=2", "repeats=3"]),
        ("seed=1 ++seed=1", "++seed=1", []),
        ("optimizer=sgd optimizer.lr=1", "optimizer=sgd optimizer.lr=1", []),
        ("trainer.extra={a:1} trainer.extra={b:1}", "trainer.extra={a:1} trainer.extra={b:1}", []),
    ],
)
def test_repeated_key_warning_names_both_values(typed, kept, warned) -> None:
    found = split_arguments(typed.split())
    assert found.overrides == tuple(kept.split())
    assert len(found.warnings) == bool(warned)
    assert all(word in found.warnings[0] for word in warned)


@pytest.mark.parametrize(
    ("typed", "loggers"),
    [("true", "root"), ("True", "root"), ("false", ""), ("[eke,filelock]", "eke,filelock"),
     ("[eke.common, filelock]", "eke.common,filelock"), ("filelock", "filelock")],
)  # fmt: skip
def test_verbose_setting_is_not_part_of_the_configuration(typed, loggers) -> None:
    found = split_arguments([f"hydra.verbose={typed}", "seed=1"])
    assert (found.verbose, found.overrides) == (loggers, ("seed=1",))


@pytest.mark.parametrize("typed", ["3", "{a:1}", "true,false", ""])
def test_unknown_loggers_are_rejected(typed) -> None:
    with pytest.raises(ConfigError) as caught:
        split_arguments([f"hydra.verbose={typed}"])
    assert caught.value.problems[0].overrides == ("hydra.verbose=true",)


def test_explicit_single_run_mode_is_accepted() -> None:
    assert split_arguments(["--run", "seed=1"]) == split_arguments(["seed=1"])


def test_last_value_of_a_key_sets_the_run_id() -> None:
    assert compose(["seed=1", "seed=2"]).overrides == compose(["seed=2"]).overrides


def test_interpolations_resolve() -> None:
    assert compose(["seed=${train.log_every}", "train.log_every=4"]).config.seed == 4


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        pytest.param('tracker.group="a, b"', "a, b", id="comma"),
        pytest.param('tracker.group="\u00e4 (\u6587)"', "\u00e4 (\u6587)", id="unicode"),
        pytest.param(r'tracker.group="a\"b"', 'a"b', id="quote"),
    ],
)
def test_unusual_texts_compose(typed: str, value: str) -> None:
    assert compose([typed]).config.tracker.group == value


def test_global_state_of_hydra_is_restored() -> None:
    before = GlobalHydra.instance().hydra
    compose([])
    with pytest.raises(ConfigError):
        compose(["seed=x"])
    with pytest.raises(ConfigError):
        compose(["data=text"])
    assert GlobalHydra.instance().hydra is before


def test_composition_inside_a_hydra_application() -> None:
    with initialize_config_dir(str(conf_folder()), **hydra_base()):
        outer = GlobalHydra.instance().hydra
        assert compose(["seed=2"]).config.seed == 2
        with pytest.raises(ConfigError):
            compose(["optimizer.momentum=1", "data=text"])
        assert GlobalHydra.instance().hydra is outer


@pytest.mark.slow
def test_no_training_library_is_imported() -> None:
    code = (
        "import sys; from eke.config.compose import compose, help_text; compose([]); help_text();"
        "print(sorted({'torch', 'transformers', 'accelerate', 'wandb'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


KEYS = [*make_catalogue().options, *make_catalogue().keys, "hydra.x", "hydra/launcher", "fp16"]
VALUES = [
    "bf16", "1,2", "null", "${a}", "[", "{a:1}", "'", "off", "1e999", "-1", "", "???", "glob(*)",
]  # fmt: skip
KEY = st.sampled_from(KEYS)
VALUE = st.one_of(st.sampled_from(VALUES), st.text(max_size=8))
TYPED = st.builds(
    "{}{}{}{}".format, st.sampled_from(["", "+", "++", "~"]), KEY, st.just("="), VALUE
)
GARBAGE = st.text(alphabet=st.characters(codec="utf-8"), max_size=20)


@pytest.mark.slow
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.one_of(TYPED, GARBAGE, st.text("=+~@/.,[]{}()$'\"\\ :-a1", max_size=12)), max_size=3
    )
)
@example(["seed=" + "[" * 3000])
@example(["precision=\x00"])
@example(["tracker.group='${'"])
@example(["hydra.run.dir=${seed"])
@example(["data=../data/text"])
@example(["hydra/job_logging=nope"])
@example(["hydra=1"])
@example(["model=bf16", "~"])
@example(["++"])
@example(["hydra.run=1"])
@example(["seed=" + "9" * 400])
def test_random_text_composes_or_is_a_config_error(typed: list[str]) -> None:
    try:
        composed: Composed | None = compose(typed)
        problems: list[Problem] = []
    except ConfigError as error:  # anything else fails the test
        composed, problems = None, error.problems
    assert composed is None or isinstance(composed.config, Config)
    assert composed or problems
    assert all(problem.key for problem in problems)
