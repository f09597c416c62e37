"""What trackers are told of a whole run."""

import pytest

from eke.plan.record import Spread, Throughput, Timing
from eke.results.trackers import summary_values

from .conftest import make_record

SPEEDS = {"samples_per_s": 80.0, "tokens_per_s": 160.0, "mfu_frac": 0.25, "steady_step_s": 0.1}


@pytest.mark.parametrize("shared", [True, False, None])
def test_a_run_that_shared_its_device_claims_no_speed(shared):
    record = make_record(
        throughput=Throughput(samples_per_s=80.0, tokens_per_s=160.0, mfu_frac=0.25),
        timing=Timing(steady_step_s=Spread(0.1, 0.1, 0.1, 3)),
        shared_device=shared,
    )
    values = summary_values(record)
    assert {key: values[key] for key in SPEEDS if key in values} == ({} if shared else SPEEDS)
    assert values["eval_final"] == 0.1 + 0.2
