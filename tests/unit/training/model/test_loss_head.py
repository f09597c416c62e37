"""The vocabulary projection that takes the loss: what it replaces, saves and refuses."""

import pytest
import torch
import torch.nn.functional as F
from recipe_plans import planned
from torch import nn
from unit.training.model.plans import hand_plan
from unit.training.model.steps import make_inputs

from eke.common.errors import RunError
from eke.training.model.build_model import build_model
from eke.training.model.fused_loss import BLOCK_BYTES, fused_loss_sum
from eke.training.model.loss import (
    apply_loss,
    build_compiled_loss,
    build_loss,
    compiled_loss_sum,
    from_logits,
    from_loss_head,
    has_fused_loss,
    loss_head,
    loss_sum,
    put_loss_head,
)
from eke.training.observe.memory_stages import AllocationProfile

CPU = torch.device("cpu")
FUSED = "kernels=fused_linear_cross_entropy"

HEADS = {
    "llama": ("model=tiny",),
    "qwen3": ("model=tiny_qwen3",),
    "moe": ("model=tiny_moe",),
    "gpt2": ("model=tiny_gpt2",),
    "bert": ("model=tiny_bert", "task=masked_lm", "model.dropout=0"),
    "t5": ("model=tiny_t5", "task=seq2seq_lm", "model.dropout=0"),
}


@pytest.mark.parametrize("case", HEADS.values(), ids=HEADS.keys())
def test_loss_head_keeps_names_weights_and_ties(case) -> None:
    plan = hand_plan(*case, FUSED)
    plain, fused = (build_model(plan, CPU).eval() for _ in range(2))
    apply_loss(plan, fused)
    assert list(plain.state_dict()) == list(fused.state_dict())
    assert [n for n, _ in plain.named_parameters()] == [n for n, _ in fused.named_parameters()]
    inputs = make_inputs(plain)
    with torch.no_grad():
        logits = plain(**inputs).logits
        torch.testing.assert_close(fused(**inputs).logits, logits)
        labels = torch.randint(0, 300, logits.shape[:-1])
        labels[0, :5] = -100
        answer = fused(**inputs, labels=labels).logits
    torch.testing.assert_close(answer, loss_sum(logits, labels))
    assert answer.dtype is torch.float32
    assert fused(**inputs).logits.shape == logits.shape, "labels hold for one forward pass"


@pytest.mark.parametrize("fused", [False, True])
def test_only_labelled_positions_are_projected(fused) -> None:
    plan = hand_plan(*HEADS["bert"], f"kernels.fused_linear_cross_entropy={fused}",
                     "kernels.sparse_prediction=true")  # fmt: skip
    plain, sparse = (build_model(plan, CPU).eval() for _ in range(2))
    apply_loss(plan, sparse)
    inputs = make_inputs(plain)
    labels = torch.full(inputs["input_ids"].shape, -100)
    labels[0, 3], labels[1, 0] = 7, 9
    places = labels.flatten().ne(-100).nonzero().flatten()
    with torch.no_grad():
        expected = loss_sum(plain(**inputs).logits, labels)
        answer = sparse(**inputs, labels=labels, places=places).logits
    torch.testing.assert_close(answer, expected)
    head = loss_head(sparse)
    assert head is not None
    assert head.projected == (2, labels.numel())


def test_batch_without_labels_has_zero_gradients() -> None:
    """A placeholder of a rank, or of Trainer's last step."""
    plan = hand_plan(*HEADS["bert"], "kernels=sparse_prediction")
    model = build_model(plan, CPU)
    apply_loss(plan, model)
    inputs = make_inputs(model)
    labels = torch.full(inputs["input_ids"].shape, -100)
    loss = model(**inputs, labels=labels, places=torch.zeros(0, dtype=torch.int64)).logits
    loss.backward()
    assert loss.item() == 0
    trained = [p for p in model.parameters() if p.grad is not None]
    assert len(trained) > 10
    assert all(not p.grad.any() for p in trained)


@pytest.mark.slow
def test_large_vocabulary_never_allocates_all_logits() -> None:
    """4096 x 32768 are 512 MiB of float32 logits, and as many of their gradient."""
    logits_bytes = 4096 * 32768 * 4
    weight = torch.randn(32768, 32, requires_grad=True)
    hidden = torch.randn(4096, 32, requires_grad=True)
    labels = torch.randint(0, 32768, (4096,))

    def peak(take_loss) -> int:
        with AllocationProfile(0) as profile:
            take_loss().backward()
        hidden.grad = weight.grad = None
        assert profile.peak is not None
        return profile.peak

    plain = peak(lambda: loss_sum(hidden @ weight.T, labels))
    fused = peak(lambda: fused_loss_sum(hidden, weight, None, labels))
    assert plain > 2 * logits_bytes
    chunk, block, gradients = logits_bytes // 4, BLOCK_BYTES, 2 * 32768 * 32 * 4
    assert fused < chunk + 2 * block + gradients


def gradients_of(take, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """The loss and its gradients by these."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    loss = take(*leaves)
    (3 * loss).backward()
    return [loss.detach().double(), *(leaf.grad.double() for leaf in leaves)]


CHANGES = [(1.0, 0.0), (0.25, 0.0), (1.0, 3.0), (2.0, 5.0)]
WAYS = [
    *((change, smoothing, False) for change in CHANGES for smoothing in (0.0, 0.1)),
    pytest.param((1.0, 0.0), 0.0, True, marks=pytest.mark.slow),
    pytest.param((2.0, 5.0), 0.1, True, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("change", "smoothing", "compiled"), WAYS)
def test_chunk_size_does_not_change_gradients(change, smoothing, compiled, monkeypatch) -> None:
    """In float32 to 1e-6; 300 rows in chunks of 64 and blocks of 16, a seventh without a label."""
    monkeypatch.setattr("eke.models.sizes.parameters.CHUNK_BYTES", 64 * 1000 * 4)
    monkeypatch.setattr("eke.training.model.fused_loss.BLOCK_BYTES", 16 * 1000 * 4)
    torch.manual_seed(0)
    tensors = torch.randn(300, 64), torch.randn(1000, 64) / 3, torch.randn(1000)
    labels = torch.randint(0, 1000, (300,))
    labels[::7] = -100
    scale, cap = change

    def logits(h, w, b):
        made = F.linear(h, w, b) * scale
        return torch.tanh(made / cap) * cap if cap else made

    plain = gradients_of(lambda *leaves: loss_sum(logits(*leaves), labels, smoothing), *tensors)
    fused = gradients_of(
        lambda h, w, b: fused_loss_sum(h, w, b, labels, smoothing, compiled, None, change),
        *tensors,
    )
    for expected, found in zip(plain, fused, strict=True):
        assert (found - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize(
    ("dtype", "compiled"),
    [
        (torch.bfloat16, False),
        (torch.float16, False),
        pytest.param(torch.bfloat16, True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_16_bit_fused_loss_is_as_accurate(dtype, compiled) -> None:
    """Than the plain loss under autocast, by float64; 20,000 classes, so that most have 1e-5."""
    torch.manual_seed(0)
    tensors = torch.randn(128, 64), torch.randn(20000, 64) * 0.02
    labels = torch.randint(0, 20000, (128,))

    def half(take):
        def under_autocast(*leaves):
            with torch.autocast("cpu", dtype=dtype):
                return take(*leaves)

        return under_autocast

    exact = gradients_of(
        lambda h, w: F.cross_entropy(h @ w.t(), labels, reduction="sum"),
        *(tensor.double() for tensor in tensors),
    )
    plain = gradients_of(half(lambda h, w: loss_sum(F.linear(h, w), labels)), *tensors)
    fused = gradients_of(
        half(lambda h, w: fused_loss_sum(h, w, None, labels, 0.0, compiled)), *tensors
    )
    for truth, old, new in zip(exact, plain, fused, strict=True):
        assert (new - truth).norm() < 1.1 * (old - truth).norm() + 1e-5 * truth.norm()


def test_frozen_head_gets_no_gradient_and_evaluation_builds_no_graph() -> None:
    hidden, weight = torch.randn(9, 8, requires_grad=True), torch.randn(20, 8)
    labels = torch.arange(9)
    fused_loss_sum(hidden, weight, None, labels).backward()
    assert hidden.grad is not None
    with torch.no_grad():
        assert not fused_loss_sum(hidden, weight, None, labels).requires_grad


def test_second_backward_pass_is_rejected() -> None:
    """The gradients were given away; they would be scaled twice."""
    hidden = torch.randn(9, 8, requires_grad=True)
    loss = fused_loss_sum(hidden, torch.randn(20, 8), None, torch.arange(9))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="no second backward pass"):
        loss.backward()


@pytest.mark.parametrize("hardware", ["h100", "cpu"])
def test_gpu_loss_is_compiled_with_the_model(hardware) -> None:
    overrides = ("compile=inductor", "compile.regional=true", f"hardware={hardware}")
    loss = build_compiled_loss(planned(*overrides))
    assert getattr(loss, "keywords", None) == ({"compiled": True} if hardware == "h100" else None)


@pytest.mark.slow
def test_compiled_loss_matches_the_uncompiled_loss() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(6, 5, 40), torch.randint(0, 40, (6, 5))
    plain = gradients_of(lambda x: loss_sum(x, labels), logits)
    compiled = gradients_of(lambda x: compiled_loss_sum()(x, labels), logits)
    for expected, found in zip(plain, compiled, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_model_without_projection_is_rejected() -> None:
    with pytest.raises(RunError, match="no linear projection onto a vocabulary"):
        put_loss_head(nn.Linear(2, 2), fused=True)
    plan = hand_plan("task=sequence_classification")
    with pytest.raises(RunError, match=r"kernels\.fused_linear_cross_entropy=false"):
        put_loss_head(build_model(plan, CPU), fused=True)
    with pytest.raises(RunError, match=r"kernels\.sparse_prediction=false"):
        put_loss_head(build_model(plan, CPU), fused=False)


def test_classification_uses_its_logits() -> None:
    plan = hand_plan("task=sequence_classification", FUSED)
    assert not has_fused_loss(plan)
    assert build_loss(plan) is from_logits
    model = build_model(plan, CPU)
    apply_loss(plan, model)
    assert loss_head(model) is None


def test_field_selects_the_loss() -> None:
    assert build_loss(hand_plan(FUSED)) is from_loss_head
    assert build_loss(hand_plan("kernels.fused_linear_cross_entropy=true")) is from_loss_head
    assert build_loss(hand_plan()) is from_logits
