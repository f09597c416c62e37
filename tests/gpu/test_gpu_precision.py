"""Number formats are real on the device, and each stays within its own rounding."""

import pytest
from on_device import sized

pytestmark = pytest.mark.gpu

FORMATS = {
    "tf32": ("float32", 2**-10),
    "fp16": ("float16", 2**-10),
    "bf16": ("bfloat16", 2**-8),
    "bf16_pure": ("bfloat16", 2**-5),
    "fp8": (sized("float8_e4m3fn", "float32"), 2**-3),
}
"""Option -> format of the products' operands, and how far six losses may be from float32's: a few
roundings of the operands, or of bf16_pure's weights. A CPU rounds to float8 and multiplies in
float32."""


@pytest.mark.parametrize("option", FORMATS)
def test_format_is_applied_and_near_float32(option, trained) -> None:
    dtype, bound = FORMATS[option]
    plain, narrow = trained("precision=fp32"), trained(f"precision={option}")
    assert dtype in narrow.effective["matmul_dtypes"]
    differences = [abs(a - b) / a for a, b in zip(plain.losses, narrow.losses, strict=True)]
    assert 0 < max(differences) < bound


def test_float8_compiles(trained) -> None:
    """Without it float8 saves nothing; what is fused must still be float8."""
    short = ("train.steps=4", "precision=fp8", "model.num_hidden_layers=2")
    plain, compiled = (trained(*short, f"compile={how}") for how in ("none", "inductor"))
    assert compiled.effective["float8_layers"] == plain.effective["float8_layers"] > 0
    assert compiled.losses[-1] == pytest.approx(plain.losses[-1], rel=2**-4)


def test_float16_keeps_its_loss_scale(trained) -> None:
    narrow = trained("precision=fp16")
    assert narrow.effective["loss_scale"] > 1
    assert narrow.effective["skipped_steps"] <= len(narrow.curve) / 2
