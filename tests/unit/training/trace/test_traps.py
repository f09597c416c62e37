"""What makes a trace on fake tensors differ from a run, and the proof that it does not here."""

import pytest
import torch
from support import last_wins
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import optimizer as optimizers

from eke.config.compose import compose
from eke.estimate.memory.components import Method
from eke.plan.planner.planner import workspace_bytes
from eke.training.trace import fake_device, operations
from eke.training.trace.fake_device import FakeKernels, fake_surroundings
from eke.training.trace.fake_gpu import FAKE_GPU, fake_gpu
from eke.training.trace.operations import Questions, Workspaces
from eke.training.trace.trace import StorageTrace
from eke.training.trace.trace_plan import Untraceable, trace, trace_history
from eke.workflows.planning import plan_for

SMALL = (
    "model.hidden_size=64", "model.num_hidden_layers=2", "model.num_attention_heads=4",
    "model.vocab_size=320", "data=synthetic", "data.min_token=8", "data.seq_len=64",
    "batch.per_device=2", "data.num_samples=64", "tracker=none",
)  # fmt: skip
GPU = ("hardware=h100", *SMALL)
ONE_LAYER = (*GPU, "model.num_hidden_layers=1")
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default


def plan_of(*overrides):
    return plan_for(compose(list(last_wins(*overrides))), planning=True)


def highest(*overrides) -> int:
    return max(trace(plan_of(*overrides)).allocated.values())


def test_autocast_lists_match_this_torch() -> None:
    assert fake_device.drift() == [], (
        "eke/training/trace/fake_device.py names operators of another torch"
    )
    # A new rule may be one of lower precision: then the count changes, and the lists must be read.
    version = ".".join(torch.__version__.split(".")[:2])
    assert len(fake_device.known_operators()) == KNOWN_RULES[version]


KNOWN_RULES = {"2.11": 126, "2.13": 119}
"""Of each torch that was read, aliases included; what is not in the lists runs in float32. 2.11 has
rules for named dimensions, and none for rms_norm."""


def test_fake_device_is_never_available() -> None:
    device = fake_gpu()
    assert device.type == FAKE_GPU
    assert not torch.fakegpu.is_available()


def test_fake_tensors_are_not_seen_as_graph_capture() -> None:
    """transformers would build a mask, and lose causal attention and grouped heads."""
    from transformers import masking_utils

    true = masking_utils.is_tracing
    with fake_surroundings():
        assert not masking_utils.is_tracing(torch.zeros(1))
    assert masking_utils.is_tracing is true


def test_foreach_is_kept_only_inside_the_trace() -> None:
    with fake_surroundings():
        assert FakeTensor in optimizers._foreach_supported_types
    assert FakeTensor not in optimizers._foreach_supported_types
    small = (*GPU, "data.seq_len=8", "batch.per_device=1", "model.hidden_size=512")
    loop, lists = (
        trace(plan_of(*small, f"optimizer=adamw_{kind}")).allocated["optimizer"]
        for kind in ("forloop", "foreach")
    )
    assert lists > 1.05 * loop, "whole lists of temporaries"


def test_trace_is_reproducible_and_independent_of_gpus(monkeypatch) -> None:
    """Remembered results, views above all, are those of the first time. Where CUDA is there,
    PyTorch's optimizers ask whether a graph is being captured."""
    FakeKernels._made.clear()
    plan = plan_of(*ONE_LAYER, "model=tiny_gpt2", "precision=bf16", "attention=eager")
    first, second = trace_history(plan), trace_history(plan)
    assert first.events == second.events
    assert first.components == second.components
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: asked.append(1) or False)
    assert trace_history(plan).events == first.events
    assert torch.cuda.is_available()
    assert not asked


def test_device_constant_is_created_on_the_host() -> None:
    """As transformers 5.17's mask of plain attention does; the device has no kernel to make it."""
    device, mode = fake_gpu(), FakeTensorMode()
    before = torch._C._only_lift_cpu_tensors()
    watch = StorageTrace(mode, device, Questions(False, mode), Workspaces("cuda", (9, 0)))
    with fake_surroundings(), watch:
        constant = torch.tensor(0.5, device=device)
    assert type(constant) is FakeTensor
    assert constant.device.type == FAKE_GPU
    assert torch._C._only_lift_cpu_tensors() is before


@pytest.mark.slow
def test_gradients_are_summed_in_place(monkeypatch) -> None:
    """T5 reads its encoder's output in each decoder layer: one sum, not one tensor more."""
    t5 = (*GPU, "model=tiny_t5", "task=seq2seq_lm", "memory=checkpointing",
          "data.seq_len=256", "batch.per_device=4", "model.num_decoder_layers=3")  # fmt: skip
    as_autograd = len(trace_history(plan_of(*t5)).components)
    monkeypatch.setattr("eke.training.trace.trace._is_owned_by_autograd", lambda gradient: False)
    assert len(trace_history(plan_of(*t5)).components) > as_autograd


def test_autocast_weight_copies_are_counted() -> None:
    found = trace(plan_of(*ONE_LAYER, "precision=bf16"))
    assert found.components["autocast_cache"] > 0
    assert "autocast_cache" not in trace(plan_of(*ONE_LAYER)).components


def test_attention_is_chosen_as_in_cuda() -> None:
    def query(dtype, heads=4):
        return torch.empty(2, heads, 16, 32, dtype=dtype, device="meta")

    half, full = query(torch.bfloat16), query(torch.float32)
    mask = torch.empty(2, 1, 16, 16, device="meta")
    assert operations.choose_kernel(half, half, None) == "flash"
    assert operations.choose_kernel(half, half, mask) == "efficient"
    assert operations.choose_kernel(full, full, None) == "efficient"
    assert operations.choose_kernel(half, query(torch.bfloat16, 2), None) == "flash"
    assert operations.choose_kernel(full, query(torch.float32, 2), None) == "math", (
        "no grouped heads there"
    )


@pytest.mark.parametrize(
    ("overrides", "kernel"),
    [
        (("hardware=h200", "precision=fp32"), "efficient"),
        (("hardware=h200", "precision=bf16"), "flash"),
        (("hardware=h200", "precision=bf16", "attention.backend=mem_efficient"), "efficient"),
        (("hardware=t4", "precision=fp16"), "efficient"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_grouped_heads_do_not_disable_fused_attention(overrides, kernel, monkeypatch) -> None:
    found, choose = [], operations.choose_kernel
    monkeypatch.setattr(
        operations, "choose_kernel", lambda *args: found.append(choose(*args)) or choose(*args)
    )
    small = (*SMALL, "model.num_hidden_layers=1", "model.num_key_value_heads=2")
    plan = plan_of(*small, "model=llama_1b", *overrides)
    trace_history(plan)
    assert set(found) == {kernel}


@pytest.mark.slow
def test_old_gpu_has_no_flash_kernel() -> None:
    new = highest("hardware=h100", *SMALL, "model=tiny_bert", "precision=fp16", "task=masked_lm")
    old = highest("hardware=v100_16", *SMALL, "model=tiny_bert", "precision=fp16", "task=masked_lm")
    assert old != new
    assert workspace_bytes((9, 0)) == 32 * 2**20
    assert workspace_bytes((7, 0)) == 8519680, "what `torch.cuda.memory_allocated` shows of it"


@pytest.mark.parametrize(
    ("key_heads", "num_bytes"),
    [(8, 4 * 2 * 8 * 256 * 96), (2, 4 * 2 * 8 * 256 * 96 + 2 * 2 * 2 * 8 * 200 * 80)],
    ids=["own", "shared"],
)
def test_flash_backward_allocates_float32_sums(key_heads, num_bytes) -> None:
    """Lengths to a multiple of 128, widths to one of 32; shared keys once per query head."""
    query, key = (
        torch.empty(2, heads, 200, 80, dtype=torch.bfloat16, device="meta")
        for heads in (8, key_heads)
    )
    found = Workspaces("cuda", (9, 0)).bytes_of(FLASH_BACKWARD, (query, query, key, key), {})
    assert found == num_bytes


def test_trace_includes_flash_sums() -> None:
    typed = ("precision=bf16", "data.seq_len=512", "batch.per_device=16")
    history = trace_history(plan_of(*GPU, *typed))
    sums = 4 * 16 * 4 * 512 * 32
    found = [number for number, size in history.events if size == sums]
    assert [history.components[number] for number in found].count("temporaries") >= 2, "layers"


def test_pinned_kernel_is_traced() -> None:
    long = (*ONE_LAYER, "precision=bf16", "data.seq_len=512")
    flash, *others = (
        highest(*long, f"attention.backend={backend}")
        for backend in ("flash", "math", "mem_efficient")
    )
    assert all(other >= flash for other in others)


def test_components_add_up_to_the_peak() -> None:
    found = trace(plan_of("hardware=cpu", *SMALL))
    peak = max(found.allocated.values())
    assert sum(found.components.values()) == peak
    assert found.allocated == found.reserved or max(found.reserved.values()) == peak
    weights = found.components["weights"]
    assert 2 * 0.99 * weights < found.components["optimizer"] <= 2 * weights


@pytest.mark.slow
def test_checkpointing_and_offload_need_less() -> None:
    plain = highest(*GPU, "data.seq_len=256", "batch.per_device=4")
    assert highest(*GPU, "data.seq_len=256", "batch.per_device=4", "memory=checkpointing") < plain
    offloaded = (*GPU, "data.seq_len=256", "batch.per_device=4", "memory=activation_offload")
    assert highest(*offloaded) < plain


@pytest.mark.parametrize(
    ("override", "word"),
    [("compile=cudagraphs", "compile"), ("kernels=liger", "liger"), ("attention=flash2", "flash")],
)
def test_substituted_operation_is_noted(override, word) -> None:
    found = trace(plan_of(*ONE_LAYER, override, "precision=bf16"))
    assert any(word in note for note in found.notes)
    assert (found.method is Method.upper_bound) is (word != "flash")


def test_failed_trace_has_a_reason(monkeypatch) -> None:
    def broken(*_):
        raise RuntimeError("torch has changed\nand more")

    monkeypatch.setattr("eke.training.trace.trace_plan.build_trainable", broken)
    with pytest.raises(Untraceable, match=r"without data \(RuntimeError in [\w.]+\)$"):
        trace(plan_of(*GPU))


@pytest.mark.slow
def test_one_of_several_processes_is_traced() -> None:
    """Where a trace fails, formulas take its place without a word: here it has to succeed."""
    one = (*GPU, "batch.accumulation=2")
    one_of_two = (*one, "distributed=ddp", "distributed.num_processes=2")
    assert highest(*one_of_two) == pytest.approx(highest(*one), rel=0.01)


def test_batch_counts_as_gpu_memory_but_not_on_a_cpu() -> None:
    """NumPy makes it; on a CPU those very tensors are trained on."""
    assert trace(plan_of(*ONE_LAYER)).components["batch"] > 0
    assert "batch" not in trace(plan_of(*ONE_LAYER, "hardware=cpu")).components
