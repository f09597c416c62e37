"""Weights come into being where they are used, once: nothing of a GPU's model lies on the host."""

import pytest
import torch
import transformers
from checkpoints import checkpoint_plan, save_checkpoint
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from unit.models.sizes.configs import FAMILY_CASES
from unit.training.model.plans import hand_plan

from eke.training.model.build_model import build_model, make_model_config
from eke.training.model.model_checks import HEADS

CPU, META = torch.device("cpu"), torch.device("meta")


class Allocations(TorchDispatchMode):
    """Bytes of the tensors that operations return, by device; views of one storage once."""

    def __init__(self):
        super().__init__()
        self.largest_on_host = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                self.largest_on_host = max(self.largest_on_host, tensor.nbytes)
        return result


@pytest.mark.parametrize(("option", "task"), FAMILY_CASES, ids=lambda value: value)
def test_model_for_another_device_is_not_allocated_on_the_host(option, task):
    # The meta device stands in for a GPU: the code is the same for every device.
    with Allocations() as seen:
        model = build_model(hand_plan(f"model={option}", f"task={task}"), META)
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"meta"}
    assert seen.largest_on_host <= 4096  # rotary frequencies and the like; the model has megabytes


@pytest.mark.parametrize("option", ["tiny_moe", "tiny_bert", "tiny_gpt2"])
def test_building_takes_only_the_memory_of_the_weights(option):
    task = "masked_lm" if option == "tiny_bert" else "causal_lm"
    plan = hand_plan(f"model={option}", f"task={task}")
    build_model(plan, CPU)  # imports and caches
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiled:
        model = build_model(plan, CPU)
    peak = max(_held_bytes(profiled))
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    largest = max(p.nbytes for p in model.parameters())
    # Tied projections exist for a moment before they are tied: one tensor above the model at most.
    assert held <= peak <= held + largest + 2**20


def _held_bytes(profiled):
    """Memory after each allocation and release."""
    held = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            yield held


@pytest.mark.parametrize(("option", "task"), FAMILY_CASES, ids=lambda value: value)
def test_built_weights_match_from_config(option, task):
    plan = hand_plan(f"model={option}", f"task={task}", "seed=11")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        config = make_model_config(plan.config)
        plain = getattr(transformers, HEADS[task]).from_config(config)
    built = build_model(plan, CPU)
    for (name, one), (other, two) in zip(
        [*plain.named_parameters(), *plain.named_buffers()],
        [*built.named_parameters(), *built.named_buffers()],
        strict=True,
    ):
        assert name == other
        assert torch.equal(one, two), name


def test_rotary_frequencies_are_scaled_as_published():
    plain = build_model(hand_plan("model=tiny", "model.rope_theta=500000"), CPU)
    longer = build_model(
        hand_plan("model=tiny", "model.rope_theta=500000", "model.rope_scaling_factor=32"), CPU
    )
    before, after = plain.model.rotary_emb.inv_freq, longer.model.rotary_emb.inv_freq
    # Wavelengths below 8192 / 4 stay, above 8192 32 times as long: transformers' rope_type llama3.
    wavelength = 2 * torch.pi / before
    assert torch.equal(after[wavelength < 2048], before[wavelength < 2048])
    slow = wavelength > 8192
    assert slow.any()
    assert torch.allclose(after[slow], before[slow] / 32)


def test_checkpoint_is_loaded_once(tmp_path):
    wide = {"hidden_size": 256, "intermediate_size": 1024, "tie_word_embeddings": True}
    path = save_checkpoint(tmp_path / "m", "llama", **wide)
    plan = checkpoint_plan(path)
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiled:
        model = build_model(plan, CPU)
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert max(_held_bytes(profiled), default=0) <= 1.1 * held + 2**20
