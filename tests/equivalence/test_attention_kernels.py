"""Each attention kernel gives the loss and gradient norm of PyTorch's own choice, at every step."""

import pytest
from equivalence_cases import CASES, RAGGED
from equivalence_compare import largest_difference
from support import TINY

STEP = (*RAGGED, "batch.per_device=6", "train.steps=8")
QUICK = ("causal_lm-llama", "masked_lm-bert")
"""What `make test` looks at."""
WITHOUT_FLASH = ("seq2seq-t5",)
"""T5's learnt bias has no gradient in the flash kernel: refused by a rule."""


PAIRS = [
    pytest.param(case, backend, marks=[] if case in QUICK else [pytest.mark.slow])
    for case in CASES
    for backend in ("math", "flash")
    if not (backend == "flash" and case in WITHOUT_FLASH)
]


@pytest.mark.parametrize(("case", "backend"), PAIRS)
def test_a_pinned_kernel_is_the_same_step(case, backend, curve_of) -> None:
    base = (*CASES[case], *TINY, *STEP)
    free, pinned = (curve_of(*base, f"attention.backend={b}") for b in ("auto", backend))
    assert largest_difference(free, pinned) < 1e-5


def test_a_pinned_kernel_is_the_same_step_when_it_is_recomputed(curve_of) -> None:
    base = (*CASES["causal_lm-llama"], *TINY, *STEP, "attention.backend=math")
    kept, recomputed = (curve_of(*base, o) for o in ("memory=none", "memory=checkpointing"))
    assert largest_difference(kept, recomputed) == 0.0
