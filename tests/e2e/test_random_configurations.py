"""Random configurations: each is refused with a fix, or really trains; what fixes mend trains, too.

More of them, and the share that each rule refuses: `RANDOM_COUNT=2000 make test-random`.
"""

import json
import logging
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
from equivalence_compare import Curve
from random_configurations import draw_command, undrawn_keys
from random_tally import PROPERTY, SHARE_TRAINED, Tally, of_reports, together
from support import last_wins
from typed_fixes import MAX_MENDINGS, complaint, typed_fixes

from eke.common.errors import ConfigError, Problem
from eke.plan.record import metrics
from eke.training.distributed.build_operators import build_folder

COUNT = int(os.environ.get("EKE_RANDOM", "60"))
SEED = int(os.environ.get("EKE_RANDOM_SEED", "4"))
"""By default one with little of inductor, which compiles for half a minute, in its first 300."""
PARTS = 2
"""Tests that share the commands, so that two processes do."""

TASK_RULE = "task_needs_other_model"


def attempt(command: tuple[str, ...], curve_of: Callable[..., Curve]) -> Curve | list[Problem]:
    """The curve, or why there is none."""
    try:
        return curve_of(*command)
    except ConfigError as error:
        return error.problems


@pytest.fixture
def any_curve_of(curve_of, make_plan, train_ranks) -> Callable[..., Curve]:
    """Overrides -> curve; what joins a group of processes does so in processes of its own.

    DeepSpeed wants a group even of one, and what comes later in that process would be in it.
    """

    def run(*overrides: str) -> Curve:
        if make_plan(*last_wins(*overrides)).deepspeed is None:
            return curve_of(*overrides)
        rows, _ = metrics.read_rows(train_ranks(*overrides) / "metrics.jsonl")
        steps = metrics.latest(rows, metrics.LOSS)
        return [(row[metrics.LOSS], row[metrics.GRAD_NORM]) for row in steps]

    return run


def mend(command: tuple[str, ...], problems: list[Problem], curve_of: Callable[..., Curve]) -> str:
    """Type the fixes until the command trains; what is wrong when it never does, else nothing."""
    for _ in range(MAX_MENDINGS):
        if missing := [p.key for p in problems if not str(p.fix)]:
            return f"no fix for {missing}"
        command = typed_fixes(command, problems)
        result = attempt(command, curve_of)
        if not result or not isinstance(result[0], Problem):
            return complaint(command, result)
        problems = result
    return f"its fixes never mend it: {[p.render() for p in problems]}"


def try_command(command: tuple[str, ...], curve_of: Callable[..., Curve], tally: Tally) -> None:
    """One command, into the tally."""
    tally.count += 1
    result = attempt(command, curve_of)
    if result and isinstance(result[0], Problem):
        rules = {p.id or p.key for p in result}
        tally.refused.update(rules)
        tally.mismatched += TASK_RULE in rules
        wrong = mend(command, result, curve_of)
        tally.mended += not wrong
    else:
        wrong = complaint(command, result)
        tally.trained += not wrong
    if wrong:
        tally.failures.append(f"{wrong}\n  python train.py {shlex.join(command)}")


def write_rows(folder: Path) -> None:
    """The same rows in every format, for data=jsonl, csv, parquet and hub."""
    rows = [
        {"text": f"row {n} has {'some ' * (n % 9)}words", "more": f"answer {n}", "label": n % 2}
        for n in range(80)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = ["text,more,label", *(f"{r['text']},{r['more']},{r['label']}" for r in rows)]
    (folder / "rows.csv").write_text("\n".join(lines) + "\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    (folder / "hub").mkdir()
    (folder / "hub" / "train.csv").write_text("\n".join(lines) + "\n")


# torch 2.13 looks at .grad of T5's inputs while it compiles; outside pytest it warns and goes on.
# inductor imports torch's own deprecated torch.jit.
# Dynamo says that it looks through a cache of transformers 5.23's experts (moe.py).
# While it compiles, torch instantiates bitsandbytes 0.50's product with 4-bit weights.
@pytest.mark.slow
@pytest.mark.timeout(max(900, 20 * COUNT))  # on a busy machine one takes ten seconds
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a .functools.lru_cache:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.*instantiated:DeprecationWarning")
@pytest.mark.parametrize("part", range(PARTS))
def test_every_configuration_trains_or_is_rejected_with_a_fix(
    part, any_curve_of, tmp_path, tmp_path_factory, caplog, monkeypatch, record_property
) -> None:
    cache = tmp_path_factory.mktemp("cache")
    compiled = build_folder().parent  # DeepSpeed's C++, which takes minutes
    compiled.mkdir(parents=True, exist_ok=True)
    (cache / "eke").mkdir()
    (cache / "eke" / compiled.name).symlink_to(compiled)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    # torch's compiler traces all it does into any handler it finds; pytest's takes every level.
    caplog.set_level(logging.WARNING, "torch.__trace")
    text = tmp_path / "text"
    text.mkdir()
    for number in range(60):  # enough of both classes for training and evaluation
        folder = text / "ab"[number % 2]
        folder.mkdir(exist_ok=True)
        (folder / f"{number}.txt").write_text(f"the {number} quick brown foxes jump. " * 20)
    write_rows(text)
    rng, tally = Random(SEED), Tally(SEED)
    commands = [last_wins(*draw_command(rng, str(text))) for _ in range(COUNT)]
    for command in commands[part::PARTS]:
        try:
            try_command(command, any_curve_of, tally)
        except Exception as error:  # whatever a library raises at what no rule refused
            crash = f"{type(error).__name__}: {str(error)[:300]}"
            tally.failures.append(f"{crash}\n  python train.py {shlex.join(command)}")
        for folder in tmp_path.iterdir():
            if folder != text:
                shutil.rmtree(folder)
    record_property(PROPERTY, tally.plain())
    assert not tally.failures, f"{len(tally.failures)} failed:\n" + "\n".join(tally.failures)
    assert tally.share >= SHARE_TRAINED, tally.render()


def test_generator_draws_every_key() -> None:
    assert undrawn_keys() == set(), "add them to tests/random_configurations.py"


@pytest.mark.parametrize(
    ("command", "trains"),
    [
        pytest.param(("model=tiny",), True, id="runs"),
        pytest.param(("model=tiny", "model.num_attention_heads=3"), False, id="refused"),
    ],
)
def test_tally_separates_trained_from_mended(command, trains, curve_of) -> None:
    tally = Tally()
    short = ("data.num_samples=8", "data.num_eval_samples=2", "data.seq_len=8", "tracker=none")
    try_command((*short, "train.steps=2", *command), curve_of, tally)
    assert (tally.trained, tally.mended, tally.failures) == (int(trains), int(not trains), [])
    assert set(tally.refused) == (set() if trains else {"heads_divide_width"})


def test_tallies_of_two_processes_are_summed() -> None:
    one, other = Tally(4, count=3, trained=2, mismatched=1), Tally(4, count=5, mended=2)
    one.refused.update({"apex_needs_cuda": 1})
    other.refused.update({"apex_needs_cuda": 2, "heads_divide_width": 1})
    other.failures.append("a crash")
    reports = [SimpleNamespace(user_properties=[(PROPERTY, t.plain())]) for t in (one, other)]
    whole = of_reports([*reports, SimpleNamespace(user_properties=[("other", 1)]), object()])
    assert whole == together([one.plain(), other.plain()])
    assert whole is not None
    assert (whole.count, whole.trained, whole.mended, whole.failures) == (8, 2, 2, ["a crash"])
    assert whole.share == pytest.approx(2 / 7)
    assert " 37.5% refused by apex_needs_cuda" in whole.render()
    assert of_reports([object()]) is None
