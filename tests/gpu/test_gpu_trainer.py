"""engine=trainer on the device: Hugging Face Trainer takes the loop's very steps."""

import pytest
from equivalence_compare import largest_difference

pytestmark = pytest.mark.gpu

CASES = {
    "fp32": ((), 1e-4),
    "fp16": (("precision=fp16",), 10 * 2**-9),
    "bf16": (("precision=bf16",), 10 * 2**-9),
    "accumulated": (("batch.per_device=1", "batch.accumulation=4"), 1e-4),
    "checkpointing": (("memory=checkpointing",), 1e-4),
    "adafactor": (("optimizer=adafactor", "optimizer.lr=1e-3"), 1e-4),
    "classification": (("model=tiny_bert", "task=sequence_classification"), 1e-4),
    "inductor": (("compile=inductor",), 1e-4),
}
"""Overrides, and how far losses may be apart: 16-bit kernels may add up in another order."""


@pytest.mark.parametrize(("overrides", "bound"), CASES.values(), ids=CASES.keys())
def test_trainer_matches_the_loop(overrides, bound, trained) -> None:
    loop, trainer = (trained(*overrides, f"engine={engine}") for engine in ("loop", "trainer"))
    assert trainer.effective["trainer"]["class"] == "transformers.trainer.Trainer"
    assert loop.effective["matmul_dtypes"] == trainer.effective["matmul_dtypes"]
    losses = [[(x, x) for x in each.losses] for each in (loop, trainer)]
    assert largest_difference(*losses) < bound
