"""Comparing curves."""

Curve = list[tuple[float, float]]
"""Loss and gradient norm of each step."""


def largest_difference(first: Curve, second: Curve) -> float:
    """Largest relative difference in loss or gradient norm at any step."""
    assert len(first) == len(second)
    return max(
        abs(a - b) / max(abs(a), abs(b), 1e-12)
        for one, other in zip(first, second, strict=True)
        for a, b in zip(one, other, strict=True)
    )
