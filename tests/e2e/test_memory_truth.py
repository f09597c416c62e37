"""Predicted peaks against what real trainings on this CPU take, over a seeded sample.

`benchmarks/memory_truth_cpu.py` does the same for more of them, with other seeds.
"""

import statistics

import pytest
from memory_truth import MODELS, Outcome, cases, measured_apart, plan_of, step_peak

from eke.estimate.memory.trace_client import trace_all

SEED, COUNT = 11, 20


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> list[Outcome]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("OMP_NUM_THREADS", "1")  # what kernels take depends on it: the same for both
        chosen = cases(SEED, COUNT)
        answers = trace_all([plan_of(case) for case in chosen])
        return [
            Outcome(case, answer.traced and step_peak(answer.traced.allocated), peak, answer.reason)
            for case, answer, peak in zip(chosen, answers, map(measured_apart, chosen), strict=True)
        ]


@pytest.mark.slow
def test_every_one_can_be_traced(outcomes) -> None:
    assert not [f"{o.case.overrides}: {o.reason}" for o in outcomes if o.predicted is None]
    assert {o.case.family for o in outcomes} == set(MODELS)


@pytest.mark.slow
def test_predictions_are_true(outcomes) -> None:
    known = [o for o in outcomes if o.is_known]
    assert len(known) >= 0.8 * COUNT
    errors = sorted(abs(o.error) for o in known)
    worst = max(known, key=lambda o: abs(o.error))
    told = f"{worst.error:+.3%}: {' '.join(worst.case.overrides)}"
    assert statistics.mean(errors) <= 0.003, told
    assert errors[int(0.95 * len(errors)) - 1] <= 0.01, told
