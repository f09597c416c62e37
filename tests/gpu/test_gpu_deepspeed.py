"""DeepSpeed's stages, one process of each: the plain loop's loss, and state where it should be.

One process shares nothing out. What several do, test_gpu_ranks and, on CPUs, tests/equivalence see.
"""

import pytest
from equivalence_compare import largest_difference
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.gpu

ALONE = ("distributed.num_processes=1",)
WIDE = ("model.hidden_size=512", "model.intermediate_size=1024")
"""14 million parameters: their state outweighs the activations."""

CASES = {
    "zero1": (("distributed=zero1",), "state"),
    "zero2": (("distributed=zero2",), "state"),
    "zero3": (("distributed=zero3",), "state"),
    "zero2, optimizer on the host": (("distributed=zero2", "offload=optimizer_cpu"), "host"),
    "zero3, weights on the host": (("distributed=zero3", "offload=params_cpu"), "host"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint: ZeRO-3 draws random weights on the host, which are not a GPU's."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, pad_token_id=0)).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(("overrides", "state"), CASES.values(), ids=CASES.keys())
def test_zero_stage_matches_the_loop(overrides, state, trained, saved) -> None:
    model = ("model=pretrained", f"model.name_or_path={saved}")
    plain, zero = trained(*model), trained(*model, *ALONE, *overrides)
    assert largest_difference(plain.curve, zero.curve) < 1e-4
    found = zero.effective["deepspeed"]
    assert found["stage"] == int(overrides[0][-1])
    expected = "cpu" if state == "host" else zero.plan.device.kind
    assert found["optimizer_device"] == expected


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bit_zero_stays_within_rounding(precision, trained) -> None:
    typed = f"precision={precision}"
    plain, zero = trained(typed), trained(*ALONE, typed, "distributed=zero2")
    differences = [abs(a - b) / a for a, b in zip(plain.losses, zero.losses, strict=True)]
    assert max(differences) < 10 * 2**-9
    assert {"bf16": "bfloat16", "fp16": "float16"}[precision] in zero.effective["matmul_dtypes"]


def test_offload_frees_device_memory_of_states(trained) -> None:
    kept = trained(*ALONE, *WIDE, "distributed=zero2")
    moved = trained(*ALONE, *WIDE, "distributed=zero2", "offload=optimizer_cpu")
    moved.needs_effect()
    # The float32 copy of the weights and both moments: 12 bytes per parameter leave.
    assert kept.peak_bytes - moved.peak_bytes > 6 * kept.plan.size.num_parameters


def test_offloaded_weights_free_device_memory(trained) -> None:
    kept = trained(*ALONE, *WIDE, "distributed=zero3")
    moved = trained(*ALONE, *WIDE, "distributed=zero3", "offload=params_cpu")
    moved.needs_effect()
    assert moved.effective["deepspeed"]["weights_device"] == "cpu"
    assert moved.peak_bytes < kept.peak_bytes
