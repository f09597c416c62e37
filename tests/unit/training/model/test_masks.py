"""What transformers no longer asks the device, for the packages of FlashAttention."""

import pytest
import torch
from unit.training.loop.test_no_sync import ReadTrap

from eke.training.model.attention_kernels import spare_mask_checks

LENGTH = 6
POSITIONS = {
    "one sequence": torch.arange(LENGTH)[None],
    "two sequences": torch.arange(LENGTH)[None] % 3,
}


@pytest.fixture
def kernels(monkeypatch):
    """Stand-ins of the package; which of them ran."""
    from transformers import modeling_flash_attention_utils as flash

    ran = []

    def noted(name):
        return lambda query, *_, **__: ran.append(name) or query

    functions = (*map(noted, ("whole", "packed", "paged")), None, None)
    arguments = (lambda **_: {}, lambda **_: {})
    monkeypatch.setattr(
        flash, "lazy_import_flash_attention", lambda *_, **__: (functions, arguments)
    )
    yield ran
    spare_mask_checks(torch.nn.Identity(), packed=False)


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS.keys())
def test_packed_rows_are_inspected_for_masks(packed, positions, kernels) -> None:
    from transformers.modeling_flash_attention_utils import _flash_attention_forward

    spare_mask_checks(torch.nn.Identity(), packed=packed)
    heads = torch.ones(1, LENGTH, 2, 8)
    with ReadTrap() as trap:
        _flash_attention_forward(
            heads, heads, heads, None, LENGTH, is_causal=True, position_ids=positions,
            attn_implementation="flash_attention_2",
        )  # fmt: skip
    restarts = bool((positions.diff() < 0).any())
    assert kernels == ["packed" if packed and restarts else "whole"]
    assert (trap.reads > 0) is packed
