"""benchmarks/anatomy.py takes a step apart as it should; events made up, no torch."""

import sys

import pytest
from support import REPO

sys.path.insert(0, str(REPO / "benchmarks"))
from anatomy_split import KINDS, NORM_SCOPE, PHASES, Event, kind_of, split

ENGINE = "autograd::engine::evaluate_function: "


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm", "contraction"),
        ("aten::bmm", "contraction"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "contraction"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "contraction"),
        ("aten::_softmax", "normalisation"),
        ("aten::_softmax_backward_data", "normalisation"),
        ("aten::native_layer_norm_backward", "normalisation"),
        ("aten::_fused_rms_norm", "normalisation"),
        ("aten::gelu_backward", "elementwise"),
        ("aten::add_", "elementwise"),
        ("aten::native_dropout", "elementwise"),
        ("aten::copy_", "other"),
        ("aten::embedding", "other"),
        ("mm", "other"),
    ],
)
def test_kernel_kinds_by_name(name, kind) -> None:
    assert kind_of(name) == kind


def step() -> list[Event]:
    """Linear, RMS norm and residual forward; the same backward; clipping and the update."""
    norm = Event(NORM_SCOPE, 10, 1)
    back_mul = Event(f"{ENGINE}MulBackward0", 40, 1, sequence=5)
    inside = Event("MulBackward0", 41, 1, back_mul, sequence=5)
    back_mm = Event(f"{ENGINE}MmBackward0", 50, 2, sequence=4)
    update = Event("Optimizer.step#AdamW.step", 80, 1)
    loading = Event("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 100)
    return [
        loading,
        Event("aten::stack", 1, 50, loading),
        Event("aten::mm", 5, 10, sequence=4),
        norm,
        Event("aten::mul", 11, 3, norm, sequence=5),
        Event("aten::add", 20, 2, sequence=6),
        back_mul,
        inside,
        Event("aten::mul", 42, 6, inside),
        back_mm,
        Event("aten::mm", 51, 20, back_mm),
        Event("aten::add_", 60, 4, Event(f"{ENGINE}AccumulateGrad", 59, 0)),
        Event("aten::mul_", 70, 5),
        update,
        Event("aten::_fused_adamw_", 81, 7, update),
    ]


def test_step_is_split_by_phase_and_kind() -> None:
    found = split(step())
    assert found["forward"] == {
        "contraction": 10,
        "normalisation": 3,
        "elementwise": 2,
        "other": 1,
    }
    assert found["backward"] == {
        "contraction": 20,
        "normalisation": 6,
        "elementwise": 4,
        "other": 4,
    }
    assert found["update"] == {"contraction": 0, "normalisation": 0, "elementwise": 5, "other": 8}


def test_rms_norm_without_scope_is_elementwise() -> None:
    plain = [Event(e.name, e.start_us, e.self_us, None, -1) for e in step() if e.parent is None]
    found = split([*plain, Event("aten::mul", 11, 3)])
    assert found["forward"]["normalisation"] == 0
    assert found["forward"]["elementwise"] == 5


def test_empty_trace_splits_into_zeros() -> None:
    assert split([]) == {phase: dict.fromkeys(KINDS, 0.0) for phase in PHASES}
