"""Random configurations: each is refused with a fix, or really trains; what fixes mend trains, too.

More of them, and the counts: `EKE_RANDOM=2000 EKE_RANDOM_SEED=7 pytest -rP --show-capture=stdout
tests/e2e/test_random_configurations.py`.
"""

import json
import logging
import os
import shlex
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pyarrow
import pyarrow.parquet
import pytest
from equivalence_compare import Curve
from random_configurations import draw_command, undrawn_keys
from support import last_wins
from typed_fixes import MAX_MENDINGS, complaint, typed_fixes

from eke.build.operators import build_folder
from eke.errors import ConfigError, Problem
from eke.record import metrics

COUNT = int(os.environ.get("EKE_RANDOM", "100"))
SEED = int(os.environ.get("EKE_RANDOM_SEED", "4"))
"""By default one with little of inductor, which compiles for half a minute, in its first 300."""

TASK_RULE = "task_needs_other_model"


@dataclass
class Tally:
    """What became of the commands."""

    trained: int = 0
    mended: int = 0
    """Refused commands that trained once their fixes were typed."""
    refused: Counter[str] = field(default_factory=Counter)
    """By rule; a command may break several."""
    mismatched: int = 0
    """Refused because the model has no head for the task, among other reasons perhaps."""
    failures: list[str] = field(default_factory=list)

    def render(self, count: int) -> str:
        """The counts as a table."""
        lines = [f"{count} random configurations, seed {SEED}"]
        lines += [f"{self.trained:6} trained", f"{self.mended:6} trained after their fixes"]
        share = self.trained / max(1, count - self.mismatched)
        lines += [f"{share:6.1%} trained of those whose model fits the task"]
        lines += [f"{n / count:6.1%} refused by {rule}" for rule, n in self.refused.most_common()]
        return "\n".join(lines)


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
        if missing := [p.path for p in problems if not p.fix]:
            return f"no fix for {missing}"
        command = typed_fixes(command, problems)
        result = attempt(command, curve_of)
        if not result or not isinstance(result[0], Problem):
            return complaint(command, result)
        problems = result
    return f"its fixes never mend it: {[p.render() for p in problems]}"


def try_command(command: tuple[str, ...], curve_of: Callable[..., Curve], tally: Tally) -> None:
    """One command, into the tally."""
    result = attempt(command, curve_of)
    if result and isinstance(result[0], Problem):
        rules = {p.rule or p.path for p in result}
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
def test_every_configuration_trains_or_is_refused_with_a_fix(
    any_curve_of, tmp_path, tmp_path_factory, caplog, monkeypatch
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
    rng, tally = Random(SEED), Tally()
    for _ in range(COUNT):
        command = last_wins(*draw_command(rng, str(text)))
        try:
            try_command(command, any_curve_of, tally)
        except Exception as error:  # whatever a library raises at what no rule refused
            crash = f"{type(error).__name__}: {str(error)[:300]}"
            tally.failures.append(f"{crash}\n  python train.py {shlex.join(command)}")
        for folder in tmp_path.iterdir():
            if folder != text:
                shutil.rmtree(folder)
    print(tally.render(COUNT))
    assert not tally.failures, f"{len(tally.failures)} failed:\n" + "\n".join(tally.failures)
    assert tally.trained >= 0.6 * (COUNT - tally.mismatched), tally.render(COUNT)


def test_no_key_is_forgotten_by_the_generator() -> None:
    assert undrawn_keys() == set(), "add them to tests/random_configurations.py"


@pytest.mark.parametrize(
    ("command", "trains"),
    [
        pytest.param(("model=tiny",), True, id="runs"),
        pytest.param(("model=tiny", "model.num_attention_heads=3"), False, id="refused"),
    ],
)
def test_the_tally_tells_one_from_the_other(command, trains, curve_of) -> None:
    tally = Tally()
    short = ("data.num_samples=8", "data.num_eval_samples=2", "data.seq_len=8", "tracker=none")
    try_command((*short, "train.steps=2", *command), curve_of, tally)
    assert (tally.trained, tally.mended, tally.failures) == (int(trains), int(not trains), [])
    assert set(tally.refused) == (set() if trains else {"heads_divide_width"})
