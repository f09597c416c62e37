"""State bytes against the tensors that real optimizers hold after one step."""

import dataclasses
from functools import cache

import pytest
import torch
import transformers
from unit.models.sizes.configs import FAMILY_CASES, make_config
from unit.plan.cases import plan_config

from eke.common.paths import conf_folder
from eke.models.sizes import model_size, state_bytes
from eke.training.model.build_model import make_model_config
from eke.training.model.model_checks import HEADS
from eke.training.optimizer.build_optimizer import build_optimizer, state_tensors

COMPILED = ("adamw_torchao_8bit", "adamw_torchao_4bit", "adamw_bf16_sr")
"""Their states are made without a step, which compiles for many seconds."""


@cache
def trained_model(model, task, *overrides):
    """A model with gradients."""
    config = make_config(f"model={model}", f"task={task}", *overrides)
    network = getattr(transformers, HEADS[config.task.option]).from_config(
        make_model_config(config)
    )
    inputs = {"input_ids": torch.randint(8, 300, (2, 8))}
    if config.model.family == "t5":
        inputs["input_ids"][:, -1] = 2
    if config.task.option == "seq2seq_lm":
        inputs["decoder_input_ids"] = torch.randint(8, 300, (2, 8))
    network(**inputs, use_cache=False).logits.square().mean().backward()
    return network


def held_bytes(config, model):
    """Bytes of weights, gradients and optimizer tensors (scalars left out) after one step."""
    optimizer = build_optimizer(plan_config(config), model)
    if config.optimizer.option in COMPILED:
        for p in model.parameters():
            if p.grad is not None:
                optimizer.state[p] = {
                    "exp_avg": optimizer._new_buffer(p, True),
                    "exp_avg_sq": optimizer._new_buffer(p, False),
                }
    else:
        gradients = {p: p.grad.clone() for p in model.parameters() if p.grad is not None}
        optimizer.step()
        for p, gradient in gradients.items():  # Schedule-Free computes in them
            p.grad.copy_(gradient)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return tuple(
        sum(t.nbytes for t in tensors)
        for tensors in (list(model.parameters()), gradients, state_tensors(optimizer))
    )


def predicted_bytes(config):
    state = state_bytes(config)
    assert state.total == state.weights + state.gradients + state.optimizer
    return state.weights, state.gradients, state.optimizer


OPTIMIZERS = {
    **{
        path.stem: [f"optimizer={path.stem}"]
        for path in (conf_folder() / "optimizer").iterdir()
        if path.stem != "custom"
    },
    "sgd_plain": ["optimizer=sgd", "optimizer.momentum=0"],
    "adamw_8bit_all": ["optimizer=adamw_8bit", "optimizer.embeddings_32bit=false"],
    "adamw_8bit_some": ["optimizer=adamw_8bit", "optimizer.min_8bit_size=17000"],
    "lion_8bit_none": ["optimizer=lion_8bit", "optimizer.min_8bit_size=1000000"],
    "adamw_torchao_blocks": ["optimizer=adamw_torchao_8bit", "optimizer.block_size=96"],
    "galore_full": ["optimizer=galore", "optimizer.rank=1000"],
    "apollo_mini": ["optimizer=apollo", "optimizer.rank=1", "optimizer.scale_type=tensor"],
    "apollo_full": ["optimizer=apollo", "optimizer.rank=200"],
}
del OPTIMIZERS["adamw_apex_fused"]  # needs CUDA


BY_SHAPE = ("muon", "galore", "apollo", "adafactor", "8bit", "4bit")
"""What an optimizer is called whose bytes depend on the shapes of the tensors."""

TAKEN = {
    name: [
        FAMILY_CASES[(number + each) % len(FAMILY_CASES)]
        for each in ((0, 3) if any(word in name for word in BY_SHAPE) else (0,))
    ]
    for number, name in enumerate(OPTIMIZERS)
}
"""Each optimizer with a family or two, each family with several optimizers."""


@pytest.mark.parametrize(
    ("option", "task", "name"), [(*case, name) for name, cases in TAKEN.items() for case in cases]
)
def test_state_bytes_match_real_tensors(option, task, name):
    optimizer = make_config(*OPTIMIZERS[name]).optimizer
    model = make_config(f"model={option}", f"task={task}")
    config = dataclasses.replace(model, optimizer=optimizer)
    assert predicted_bytes(config) == held_bytes(config, trained_model(option, task))


def test_tensor_without_gradient_has_no_state():
    overrides = ("model.tie_word_embeddings=false",)
    config = make_config("model=tiny_bert", "task=masked_lm", *overrides)
    model = trained_model("tiny_bert", "masked_lm", *overrides)
    assert predicted_bytes(config) == held_bytes(config, model)


@pytest.mark.parametrize(
    ("optimizer", "low", "high"),
    [
        pytest.param("adamw", 8, 8, id="adamw"),
        pytest.param("adamw_8bit", 2.5, 2.7, id="embeddings in 32 bits"),
        pytest.param("adamw_torchao_8bit", 2.03, 2.05, id="torchao 8"),
        pytest.param("adamw_torchao_4bit", 1.06, 1.08, id="torchao 4"),
        pytest.param("lion", 4, 4, id="lion"),
        pytest.param("lion_8bit", 1.25, 1.35, id="lion 8"),
        pytest.param("muon", 4, 4.4, id="muon"),
        pytest.param("galore", 3, 3.1, id="galore"),
        pytest.param("adafactor", 0.001, 0.02, id="adafactor"),
    ],
)
def test_optimizer_bytes_per_parameter_match_literature(optimizer, low, high):
    config = make_config("model=bert_large", "task=masked_lm", f"optimizer={optimizer}")
    size = model_size(config)
    assert low <= state_bytes(config).optimizer / size.num_parameters <= high


def test_last_block_of_8_bit_states_has_its_own_scale():
    """64 x 66 numbers are 16 blocks of 256 and a half."""
    model = ("model=tiny", "model.hidden_size=64", "model.intermediate_size=66")
    config = make_config(*model, "optimizer=lion_8bit")
    network = trained_model("tiny", "causal_lm", *model[1:])
    assert predicted_bytes(config) == held_bytes(config, network)


def test_gradient_by_gradient_bytes_are_the_largest_gradient():
    config = make_config("model=tiny", "memory=optimizer_in_backward")
    largest = max(p.nbytes for p in trained_model("tiny", "causal_lm").parameters())
    assert predicted_bytes(config)[1] == largest


@pytest.mark.parametrize(("optimizer", "bytes_per_parameter"), [("adamw", 16), ("sgd", 12)])
def test_bert_large_state_matches_literature(optimizer, bytes_per_parameter):
    config = make_config("model=bert_large", "task=masked_lm", f"optimizer={optimizer}")
    size = model_size(config)
    assert state_bytes(config).total == bytes_per_parameter * size.num_parameters


def test_master_copy_optimizer_has_float32_moments():
    plain, narrow, copied = (
        state_bytes(make_config("model=tiny", *overrides))
        for overrides in (
            (),
            ("precision=bf16_pure",),
            ("precision=bf16_pure", "precision.master=on"),
        )
    )
    assert 2 * narrow.optimizer == copied.optimizer == plain.optimizer
    assert (narrow.master, copied.master) == (0, plain.weights)
    assert 2 * copied.weights == plain.weights
