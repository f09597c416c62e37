"""Two options of two groups together: each pair is refused with a fix, or really trains.

One configuration of a few groups is tried. All pairs take two hours on a busy core:
`EKE_PAIRS=10000 EKE_RANDOM_SEED=7 pytest -m "" -s tests/e2e/test_option_pairs.py -k every_pair`;
EKE_PAIRS_DONE=60 goes on after the first sixty.
"""

import os
import shlex
import shutil
import time
from collections import Counter
from random import Random

import pytest
from option_pairs import FACTORS, Covering, typed
from typed_fixes import complaint, mended

from eke.common.paths import RunPaths
from eke.plan.record import metrics, read_record
from eke.training.distributed.build_operators import build_folder

COUNT = int(os.environ.get("EKE_PAIRS", "0"))
DONE = int(os.environ.get("EKE_PAIRS_DONE", "0"))
"""Configurations that an earlier run of the same seed has tried."""
SHORT = ("model", "memory", "distributed", "packing", "processes", "accumulation", "dropout")
"""The factors of the one configuration that is tried where no number is asked for."""
SEED = int(os.environ.get("EKE_RANDOM_SEED", "4"))


@pytest.fixture
def operators(tmp_path_factory, monkeypatch) -> None:
    """A cache of its own, but for DeepSpeed's C++, which takes minutes."""
    cache = tmp_path_factory.mktemp("cache")
    compiled = build_folder().parent
    compiled.mkdir(parents=True, exist_ok=True)
    (cache / "eke").mkdir()
    (cache / "eke" / compiled.name).symlink_to(compiled)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


@pytest.mark.slow
@pytest.mark.timeout(max(1800, 120 * COUNT))
def test_every_pair_of_options_trains_or_is_rejected_with_a_fix(
    make_plan, train_ranks, tmp_path, operators
) -> None:
    factors = FACTORS if COUNT else {name: FACTORS[name] for name in SHORT}
    covering = Covering(lambda command: mended(command, make_plan), Random(SEED), factors)
    failures: list[str] = []
    warnings: Counter[str] = Counter()
    began, count = time.monotonic(), 0
    for count, command in enumerate(covering, 1):
        if count <= DONE:
            continue
        try:
            folder = train_ranks(*command)
            rows, _ = metrics.read_rows(RunPaths(folder).metrics)
            steps = metrics.latest(rows, metrics.LOSS)
            wrong = complaint(command, [(r[metrics.LOSS], r[metrics.GRAD_NORM]) for r in steps])
            warnings.update(read_record(RunPaths(folder)).warnings)
        except Exception as error:  # whatever a library raises at what no rule refused
            wrong = f"{type(error).__name__}: {str(error)[-600:]}"
        if wrong:
            failures.append(f"{wrong}\n  python train.py {shlex.join(command)}")
            print(failures[-1], flush=True)
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        print(f"{count}: {'failed' if wrong else 'trained'}", flush=True)
        if count >= COUNT:
            break
    assert count > DONE, "nothing was left to try"
    spent = time.monotonic() - began
    print(f"{count} configurations, seed {SEED}, {spent:.0f} s: {len(covering.covered)} pairs")
    print(f"{len(covering.alone)} values for other machines: {covering.alone}")
    print(f"{len(covering.refused)} pairs refused whatever else")
    print("".join(f"{n:5} {text}\n" for text, n in warnings.most_common()))
    assert not failures, f"{len(failures)} failed:\n" + "\n".join(failures)


def test_few_configurations_cover_every_pair() -> None:
    """Four factors of three values: 54 pairs, which nine configurations can just hold."""
    factors = {name: tuple((f"{name}={v}",) for v in "abc") for name in "wxyz"}
    covering = Covering(lambda command: command, Random(0), factors)
    commands = list(covering)
    assert len(covering.covered) == 54
    assert len(commands) <= 16


def test_rejected_pairs_are_not_counted_as_covered() -> None:
    factors = {name: tuple((f"{name}={v}",) for v in "ab") for name in "xyz"}

    def mend(command):
        """x=b never; y=b needs z=b."""
        command = typed(command, ("x=a",))
        return typed(command, ("z=b",)) if "y=b" in command else command

    covering = Covering(mend, Random(0), factors)
    commands = list(covering)
    assert covering.alone == [("x=b",)]
    assert covering.refused == [frozenset({("y=b",), ("z=a",)})]
    assert all("z=b" in command for command in commands if "y=b" in command)
