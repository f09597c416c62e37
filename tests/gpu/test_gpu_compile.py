"""Compiled code gives the same loss and gradient norm at every step, whatever replays it."""

import pytest
from equivalence_compare import largest_difference
from on_device import ON, plan_here

from eke.common.errors import ConfigError

pytestmark = pytest.mark.gpu

SHORT = "train.max_grad_norm=null"
"""No clipping: max_savings takes none."""

CASES = {
    "aot_eager": ("compile=aot_eager",),
    "cudagraphs": ("compile=cudagraphs",),
    "inductor": ("compile=inductor",),
    "regions": ("compile=inductor", "compile.regional=true"),
    "replayed": ("compile=inductor", "compile.mode=reduce_overhead"),
    "regions, max_savings": ("compile=inductor", "compile.regional=true", "memory=max_savings"),
}


REPLAYED = ("compile=inductor", "compile.mode=reduce_overhead")
REFUSED = {
    "graphs_take_the_whole_model": (*REPLAYED, "compile.regional=true"),
    "graphs_take_one_micro_batch": (*REPLAYED, "batch.accumulation=2"),
}
"""Rule -> what it refuses; that PyTorch fails there is in test_gpu_refusals.py."""


@pytest.mark.skipif(ON == "cpu", reason="a CPU replays no graphs")
@pytest.mark.parametrize(("rule", "overrides"), REFUSED.items(), ids=REFUSED.keys())
def test_configuration_without_cuda_graphs_is_rejected(rule, overrides) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_here(SHORT, *overrides)
    assert [problem.id for problem in caught.value.problems] == [rule]


@pytest.mark.parametrize("overrides", CASES.values(), ids=CASES.keys())
def test_compiled_model_computes_the_same_step(overrides, trained) -> None:
    plain, compiled = trained(SHORT), trained(SHORT, *overrides)
    assert largest_difference(plain.curve, compiled.curve) < 1e-4
    assert compiled.effective["compile"]["graphs"] > 0


def test_compiled_16_bit_step_is_within_rounding(trained) -> None:
    plain, compiled = (
        trained(SHORT, "precision=bf16", f"compile={how}") for how in ("none", "inductor")
    )
    assert "bfloat16" in compiled.effective["matmul_dtypes"]
    assert largest_difference([(x, x) for x in plain.losses], [(x, x) for x in compiled.losses]) < (
        10 * 2**-9
    )
