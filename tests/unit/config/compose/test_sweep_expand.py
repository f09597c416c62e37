"""From the command line of -m to cells."""

from pathlib import Path

import pytest

from eke.common.errors import ConfigError
from eke.config.compose import compose, split_arguments
from eke.config.sweep import expand


@pytest.fixture
def own(tmp_path: Path):
    """A folder with one named sweep, `mine`."""

    def write(text: str) -> Path:
        (tmp_path / "sweep").mkdir(exist_ok=True)
        (tmp_path / "sweep" / "mine.yaml").write_text(f"# @package _global_\n# mine.\n{text}")
        return tmp_path

    return write


def varied(expanded, *keys):
    return [
        tuple(o.partition("=")[2] for o in cell.overrides if o.partition("=")[0] in keys)
        for cell in expanded.cells
    ]


def problems(*overrides, config_dir=None):
    with pytest.raises(ConfigError) as caught:
        expand(overrides, config_dir)
    return caught.value.problems


@pytest.mark.slow
def test_runs_match_composition_by_hydra() -> None:
    """Put together from shared trees, or composed whole: the same configuration."""
    typed = ["optimizer=sgd,adafactor", "memory=none,checkpointing", "optimizer.lr=0.1", "seed=5"]
    for cell in expand(typed).cells:
        whole = compose(cell.overrides, in_sweep=True)
        assert cell.composed == whole
        assert list(cell.composed.choices) == list(whole.choices)


@pytest.mark.slow
def test_option_that_writes_other_sections_in_a_sweep(tmp_path) -> None:
    (tmp_path / "memory").mkdir()
    text = "# @package _global_\n# both.\nmemory: {option: both}\nseed: 7\n"
    (tmp_path / "memory" / "both.yaml").write_text(text)
    typed = ["memory=none,both", "precision=bf16,fp32"]
    found = [cell.composed.config.seed for cell in expand(typed, tmp_path).cells]
    assert found == [0, 0, 7, 7]


@pytest.mark.slow
def test_rows_zip_and_product_are_expanded(own) -> None:
    folder = own(
        "sweep:\n"
        "  rows: {plain: {}, small: {batch.per_device: 2}}\n"
        "  zip: {seed: [1, 2], optimizer.lr: [0.1, 1e-2]}\n"
        "  product: {precision: [fp32, bf16]}\n"
    )
    expanded = expand(["sweep=mine"], folder)
    assert [cell.row for cell in expanded.cells] == ["plain"] * 4 + ["small"] * 4
    rates = [cell.composed.config.optimizer.lr for cell in expanded.cells]
    assert rates == [0.1, 0.1, 0.01, 0.01] * 2
    assert [c.composed.config.batch.per_device for c in expanded.cells][-1] == 2
    assert expanded.cells[-1].name.startswith("small: ")


def test_override_replaces_a_key_of_the_sweep_file(own) -> None:
    folder = own("sweep: {product: {precision: [fp32, bf16], seed: [1, 2]}, repeats: 4}\n")
    expanded = expand(["sweep=mine", "precision=fp16", "sweep.repeats=1"], folder)
    assert varied(expanded, "seed", "precision") == [("fp16", "1"), ("fp16", "2")]


def test_repeats_alternate_the_order_of_runs() -> None:
    expanded = expand(["seed=1,2", "sweep.repeats=3"])
    assert varied(expanded, "seed", "repeat") == [
        ("1", "0"), ("2", "0"), ("2", "1"), ("1", "1"), ("1", "2"), ("2", "2"),
    ]  # fmt: skip
    assert expanded.cells[-1].composed.config.repeat == 2


@pytest.mark.slow
def test_every_repeat_has_its_own_seed_on_request() -> None:
    expanded = expand(["precision=fp32,bf16", "sweep.repeats=3", "sweep.seeds=per_repeat"])
    found = [(c.composed.config.repeat, c.composed.config.seed) for c in expanded.cells]
    assert found == [(k, k) for k in range(3) for _ in range(2)]
    (problem,) = problems("seed=7", "sweep.repeats=3", "sweep.seeds=per_repeat")
    assert problem.value == "seed"


def test_auto_repeats_share_the_sweep_id_of_the_first_round() -> None:
    expanded = expand(["seed=1,2", "sweep.repeats=auto", "sweep.max_repeats=4"])
    assert [c.composed.config.repeat for c in expanded.cells] == [0, 0, 1, 1, 2, 2, 3, 3]
    first = expanded.first_round()
    assert varied(first, "seed", "repeat") == [("1", "0"), ("2", "0")]
    assert expand(["seed=1,2"]).settings.rule == ()
    rules = [
        expand(["seed=1,2", "sweep.repeats=auto", *more]).settings.rule
        for more in ([], ["sweep.max_repeats=20"], ["sweep.budget=3"], ["sweep.resolve=0.02"])
    ]
    assert rules[0] == rules[1] == rules[2] != rules[3], "more repeats go on with the same sweep"


def test_auto_repeat_keys_require_auto() -> None:
    typed = ["seed=1,2", "sweep.max_repeats=20", "sweep.budget=2"]
    assert len(expand([*typed, "sweep.repeats=2"]).warnings) == 2
    assert not expand([*typed, "sweep.repeats=auto"]).warnings


@pytest.mark.slow
def test_exclusion_uses_composed_values() -> None:
    clauses = "sweep.exclude=[precision=fp16 and seed=2, optimizer.lr<=1e-9]"
    expanded = expand(["precision=bf16,fp16", "seed=1,2", clauses, "sweep.strict=true"])
    assert varied(expanded, "precision", "seed") == [("bf16", "1"), ("bf16", "2"), ("fp16", "1")]
    assert list(expanded.excluded.items()) == [
        ("precision=fp16 and seed=2", 1),
        ("optimizer.lr<=1e-9", 0),
    ]
    assert expanded.warnings == ("sweep.exclude: optimizer.lr<=1e-9 excludes no run",)
    assert expanded.settings.strict


def test_exclusion_accepts_large_numbers() -> None:
    assert len(expand(["train.steps=1,3000000", "sweep.exclude=[train.steps>2000000]"]).cells) == 1


@pytest.mark.parametrize(
    ("clause", "kind"),
    [
        pytest.param("precison=fp16", "wrong_clause", id="key"),
        pytest.param("precision=fp17", "wrong_clause", id="option"),
        pytest.param("seed=abc", "wrong_clause", id="a text for a number"),
        pytest.param("row=x", "wrong_clause", id="row"),
        pytest.param("seed=1 seed=2", "wrong_clause", id="grammar"),
        pytest.param("seed in (1, 2)", "empty_sweep", id="everything"),
    ],
)
def test_invalid_exclusion_is_rejected(clause, kind) -> None:
    (problem,) = problems("seed=1,2", f"sweep.exclude=[{clause}]")
    assert (problem.key, problem.id) == ("sweep.exclude", kind)


def test_only_conditions_that_exclude_all_runs_are_named() -> None:
    (problem,) = problems("seed=1,2", "sweep.exclude=[seed=1,seed=2,seed=3]")
    assert (problem.value, bool(problem.fix)) == ("seed=1, seed=2", True)


def test_zip_of_unequal_lengths_is_rejected() -> None:
    (problem,) = problems("sweep.zip={seed:[1,2,3],optimizer.lr:[0.1,0.2]}")
    assert (problem.value, problem.id) == ("optimizer.lr", "unequal_lengths")


def test_mistake_shared_by_many_runs_is_reported_once() -> None:
    (problem,) = problems("precison=bf16", "seed=range(0,50)")
    assert problem.key == "precison"
    (problem,) = problems("precision=bf16,fp61", "seed=range(0,50)")
    assert problem.value == "fp61"


@pytest.mark.slow
def test_value_invalid_for_some_runs_is_reported() -> None:
    (problem,) = problems("optimizer=adamw,sgd", "optimizer.momentum=0.5", "seed=1,2,3")
    assert problem.id == "other_options_key"
    assert problem.why.endswith("(in 3 of 6 runs)")


@pytest.mark.slow
def test_key_set_twice_in_a_sweep_is_rejected(own) -> None:
    folder = own("sweep: {product: {seed: [1, 2]}, rows: {a: {seed: 3}}}\n")
    (problem,) = problems("sweep=mine", config_dir=folder)
    assert (problem.key, problem.value) == ("sweep.rows.a", "seed")
    folder = own("sweep: {rows: {a: {}, b: {seed: 1, ++seed: 1}}}\n")
    (problem,) = problems("sweep=mine", config_dir=folder)
    assert (problem.key, problem.value) == ("sweep.rows.b", "seed")
    (problem,) = problems("repeat=1,2", "sweep.repeats=2")
    assert problem.value == "repeat"


@pytest.mark.parametrize(
    ("typed", "path"),
    [
        pytest.param("sweep=guide_tabel", "sweep", id="sweep"),
        pytest.param("sweep=none,guide_table", "sweep", id="two sweeps"),
        pytest.param("sweep.repeats=0", "sweep.repeats", id="no repeat"),
        pytest.param("sweep.repeats=many", "sweep.repeats", id="neither a number nor auto"),
        pytest.param("sweep.repeats=2.5", "sweep.repeats", id="a part of a repeat"),
        pytest.param("sweep.max_repeats=2", "sweep.max_repeats", id="too few for a look"),
        pytest.param("sweep.resolve=0", "sweep.resolve", id="resolve nothing"),
        pytest.param("sweep.budget=0", "sweep.budget", id="no time"),
        pytest.param("sweep.seeds=mine", "sweep.seeds", id="seeds"),
        pytest.param("sweep.rounds=2", "sweep.rounds", id="key"),
        pytest.param("optimizer.lr=interval(0,1)", "optimizer.lr", id="interval"),
        pytest.param("seed=range(0,1000000)", "seed", id="too many"),
    ],
)
def test_invalid_sweeps_are_rejected(typed, path) -> None:
    assert problems(typed)[0].key == path


SEEDS = [
    pytest.param("seed=range(3),7", [0, 1, 2, 7], id="range and value"),
    pytest.param("seed=range(2),range(5,1,-2)", [0, 1, 5, 3], id="two ranges"),
    pytest.param("seed=choice(1,2),5", [1, 2, 5], id="choice and value"),
    pytest.param("seed=tag(x,choice(1,2)),range(4,5)", [1, 2, 4], id="tagged"),
    pytest.param("seed=range(0),9", [9], id="an empty range"),
    pytest.param("sweep.product={seed:'range(2),7'}", [0, 1, 7], id="product of a file"),
]


@pytest.mark.parametrize(("typed", "seeds"), SEEDS)
def test_nested_lists_are_expanded(typed, seeds) -> None:
    assert [cell.composed.config.seed for cell in expand([typed]).cells] == seeds


EMPTY = [
    ("seed=range(0,3,0)", "seed=0"),
    ("seed=range(3,0)", "seed=0"),
    ("seed=1,range(0,3,0)", "seed=0"),
    ("seed=sort(range(0,3,0))", "seed=0"),
    ("seed=shuffle(range(0,inf))", "seed=0"),
    ("seed=int(range(0,3,0))", "seed=0"),
    ("seed=tag(x,range(0,3,0))", "seed=0"),
    ("optimizer.lr=range(0.1,0.3,0.0)", "optimizer.lr=0.001"),
    ("seed=range(nan,3)", "seed=0"),
    ("seed=choice()", "seed=0"),
    ("seed=sort(1,a)", "seed=0"),
    ("seed=int(1,x)", "seed=0"),
    ("optimizer=range(0,3,0)", "optimizer=adamw"),
    ("model=glob(nosuch*)", "model=tiny"),
    ("trainer.extra.debug=range(0,3,0)", 'trainer.extra.debug="range(0,3,0)"'),
    ("sweep.zip={seed:'range(0,3,0)'}", "seed=0"),
    ("sweep.product={seed:range(0,3)}", "sweep.product={seed:'range(0,3)'}"),
    ("sweep.product.seed=range(0,3)", 'sweep.product.seed="range(0,3)"'),
    ("sweep.repeats=2,3", "sweep.repeats=1"),
]


@pytest.mark.parametrize(("typed", "fix"), EMPTY)
def test_grammatical_but_invalid_sweep_has_a_fix(typed, fix) -> None:
    with pytest.raises(ConfigError) as caught:
        expand([typed])
    (problem,) = caught.value.problems
    assert problem.fix.words == (fix,)
    assert expand([*problem.fix.words]).cells


@pytest.mark.slow
def test_shuffled_values_have_a_fixed_order() -> None:
    found = [varied(expand(["seed=shuffle(range(9)),99"]), "seed") for _ in range(3)]
    assert found[0] == found[1] == found[2]
    assert found[0][-1] == ("99",)
    assert sorted(found[0][:-1]) == [(str(seed),) for seed in range(9)]
    assert found[0][:-1] != sorted(found[0][:-1])


@pytest.mark.slow
def test_glob_and_options_are_combined() -> None:
    cells = expand(["model=glob(tiny_g*),gpt2,glob(tiny_b*)"]).cells
    assert [cell.composed.choices["model"] for cell in cells] == ["tiny_gpt2", "gpt2", "tiny_bert"]
    (problem,) = problems("model=gpt2,glob(nosuch*)")
    assert (problem.key, problem.value) == ("model", "gpt2,glob(nosuch*)")


def test_unlistable_sweep_is_rejected() -> None:
    (problem,) = problems("seed=choice(range(3),7)")
    assert problem.key == "seed"
    (problem,) = problems("seed=1,interval(0,1)")
    assert str(problem.fix) == "hydra/sweeper=optuna"


def test_hydra_output_folder_is_rejected(own) -> None:
    folder = own("hydra: {sweeper: {params: {seed: '1,2'}}}\n")
    (problem,) = problems("sweep=mine", config_dir=folder)
    assert problem.key == f"{folder / 'sweep' / 'mine.yaml'}:3"
    assert "sweep.product=" in str(problem.fix)


def test_double_plus_overrides_of_a_wandb_agent_compose() -> None:
    composed = compose(["++optimizer.lr=0.01", "++precision=bf16"])
    assert composed.choices["precision"] == "bf16"
    assert composed.config.optimizer.lr == 0.01


@pytest.mark.parametrize("dashes", ["--", ""])
def test_restarted_wandb_agent_run_names_the_command(dashes) -> None:
    """It passes the whole logged configuration (https://github.com/wandb/wandb/issues/9143)."""
    logged = ["cfg={'seed': 1}", "model=tiny", "device=cpu", "seed=1"]
    with pytest.raises(ConfigError) as refused:
        split_arguments([dashes + word for word in logged])
    (problem,) = refused.value.problems
    assert problem.remark.endswith("model=tiny seed=1")
