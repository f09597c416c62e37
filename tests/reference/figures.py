"""What a run saw of its technique, in words: whatever differs from the plain run's record."""

from collections.abc import Callable
from typing import Any

Row = dict[str, Any]
MIB = 2**20


def figures(row: Row, plain: Row, always: str = "") -> list[str]:
    """Measured, never asked for; empty where nothing differs, or there is no plain run.

    Args:
        row: of the option.
        plain: of the run without it.
        always: a key of `PHRASES` that is told even if it does not differ.
    """
    if not plain:
        return []
    seen, usual = row["effective"], plain["effective"]
    found = [
        say(seen[key])
        for key, say in PHRASES.items()
        if seen.get(key) not in (None, 0, [], "") and (key == always or seen[key] != usual.get(key))
    ]
    peak, ordinary = row["peak_allocated_bytes"], plain["peak_allocated_bytes"]
    if peak and ordinary and abs(peak - ordinary) > 0.005 * ordinary:
        found.append(f"peak of tensors {mib(peak)}, of the plain run {mib(ordinary)}")
    return found


def mib(num_bytes: float) -> str:
    """`12.3 MiB`."""
    return f"{num_bytes / MIB:.1f} MiB"


def _sharding(found: Row) -> str:
    first = found["state_bytes_per_rank"][0]
    parts = [f"{name} {mib(first[name])}" for name in ("weights", "gradients", "optimizer")]
    return f"state of each of {found['mesh'][0]} processes: {', '.join(parts)}"


def _deepspeed(found: Row) -> str:
    return (
        f"each of {found['processes']} processes holds weights of {mib(found['weights_bytes'])} on "
        f"{found['weights_device']}, and float32 copies and optimizer state of "
        f"{mib(found['optimizer_bytes'])} on {found['optimizer_device']}"
    )


def _peft(found: Row) -> str:
    text = (
        f"{100 * found['trained_frac']:.2f} % of the parameters trained, in "
        f"{found['adapted_modules']} adapted modules; frozen weights "
        f"{mib(found['frozen_weight_bytes'])}"
    )
    if found["four_bit_tensors"]:
        text += f", {found['four_bit_tensors']} tensors of them in {found['four_bit_type']}"
    return text


def _compile(found: Row) -> str:
    return f"{found['graphs']} graphs compiled, {found['graph_breaks']} graph breaks"


PHRASES: dict[str, Callable[[Any], str]] = {
    "matmul_dtypes": lambda found: f"products in {', '.join(found)}",
    "weight_dtypes": lambda found: f"weights in {', '.join(found)}",
    "float8_layers": lambda found: f"{found} linear layers in float8",
    "optimizer_bytes_per_parameter": lambda found: (
        f"optimizer state of {found:.3g} bytes per trained parameter"
    ),
    "optimizer_quantised_frac": lambda found: f"{100 * found:.0f} % of them quantised",
    "optimizer_projected_frac": lambda found: f"{100 * found:.0f} % of them projected",
    "optimizer_paged_bytes": lambda found: f"{mib(found)} of it paged",
    "optimizer_implementation": lambda found: f"implementation {found}",
    "layers_recomputed": lambda found: f"{found} layers recomputed",
    "matmuls_recomputed_per_micro_batch": lambda found: f"{found:.0f} of their products repeated",
    "activation_bytes_offloaded": lambda found: f"{mib(found)} of activations moved to the host",
    "optimizer_steps_in_backward": lambda found: f"{found} updates inside a backward pass",
    "empty_cache_calls": lambda found: f"cache emptied {found} times",
    "attention_kernels": lambda found: f"attention in {', '.join(found)}",
    "loss_kernels": lambda found: f"loss in {', '.join(found)}",
    "liger_modules": lambda found: f"{found} modules replaced",
    "compile": _compile,
    "sharding": _sharding,
    "deepspeed": _deepspeed,
    "peft": _peft,
    "loader_workers": lambda found: f"{found} loader processes",
    "trainer": lambda found: f"steps taken by {found['class']}",
}
"""Key of a record's `effective` -> how it reads."""
