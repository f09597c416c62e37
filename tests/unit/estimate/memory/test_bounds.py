"""Random small trainings, really run: the truth lies within the bounds.

The same as benchmarks/forecast_bounds.py does at length; four of them run with each change, twelve
more in `make test-all`.
"""

import sys
from random import Random

import pytest
from support import REPO

sys.path.insert(0, str(REPO / "benchmarks"))
import forecast_bounds

SEED = 21


@pytest.mark.parametrize("number", [pytest.param(n, marks=pytest.mark.slow if n >= 4 else ()) for n
                                    in range(16)])  # fmt: skip
def test_measured_peak_is_within_bounds(number, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = Random(SEED * 1000 + number)
    plan = None
    while plan is None:
        overrides = forecast_bounds.draw(rng)
        plan = forecast_bounds.planned(overrides)
    row = forecast_bounds.compared(plan, overrides)
    if row["measured"] is None:
        pytest.skip("the loss scaler skipped both steps: there are no optimizer states yet")
    assert forecast_bounds.is_inside(row), row
