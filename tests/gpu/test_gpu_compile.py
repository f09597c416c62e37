"""Compiled code gives the same loss and gradient norm at every step, whatever replays it."""

import pytest
from equivalence_compare import largest_difference

pytestmark = pytest.mark.gpu

SHORT = "train.max_grad_norm=null"
"""No clipping: max_savings takes none."""

CASES = {
    "aot_eager": ("compile=aot_eager",),
    "cudagraphs": ("compile=cudagraphs",),
    "inductor": ("compile=inductor",),
    "regions": ("compile=inductor", "compile.regional=true"),
    "replayed": ("compile=inductor", "compile.mode=reduce_overhead"),
    "replayed regions": (
        "compile=inductor",
        "compile.mode=reduce_overhead",
        "compile.regional=true",
    ),
    "regions, max_savings": ("compile=inductor", "compile.regional=true", "memory=max_savings"),
}


@pytest.mark.parametrize("overrides", CASES.values(), ids=CASES.keys())
def test_compiled_code_is_the_same_step(overrides, trained) -> None:
    plain, compiled = trained(SHORT), trained(SHORT, *overrides)
    assert largest_difference(plain.curve, compiled.curve) < 1e-4
    assert compiled.effective["compile"]["graphs"] > 0


def test_compiled_16_bits_stay_within_their_rounding(trained) -> None:
    plain, compiled = (
        trained(SHORT, "precision=bf16", f"compile={how}") for how in ("none", "inductor")
    )
    assert "bfloat16" in compiled.effective["matmul_dtypes"]
    assert largest_difference([(x, x) for x in plain.losses], [(x, x) for x in compiled.losses]) < (
        10 * 2**-9
    )
