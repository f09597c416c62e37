"""State bytes against the tensors that real optimizers hold after one step."""

import pytest
import torch
import transformers
from unit.sizes.configs import TINY_CASES, make_config

from eke.build.model import BUILDERS, HEADS
from eke.paths import conf_folder
from eke.sizes import model_size, state_bytes


def optimizer_of(name, parameters):
    if name == "adafactor":
        return transformers.Adafactor(
            parameters, lr=1e-3, scale_parameter=False, relative_step=False
        )
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-3)
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9 if name == "sgd" else 0.0)


def held_bytes(config, name):
    """Bytes of weights, gradients and optimizer tensors (scalars left out) after one step."""
    model = getattr(transformers, HEADS[config.task.option]).from_config(
        BUILDERS[config.model.family](config)
    )
    inputs = {"input_ids": torch.randint(8, 300, (2, 8))}
    if config.model.family == "t5":
        inputs["input_ids"][:, -1] = 2
    if config.task.option == "seq2seq_lm":
        inputs["decoder_input_ids"] = torch.randint(8, 300, (2, 8))
    model(**inputs, use_cache=False).logits.square().mean().backward()
    optimizer = optimizer_of(name, model.parameters())
    optimizer.step()
    state = [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return tuple(
        sum(t.nbytes for t in tensors if t.ndim > 0)
        for tensors in (list(model.parameters()), gradients, state)
    )


def predicted_bytes(config):
    state = state_bytes(config, model_size(config))
    assert state.total == state.weights + state.gradients + state.optimizer
    return state.weights, state.gradients, state.optimizer


OPTIMIZERS = {
    "adamw": ["optimizer=adamw"],
    "adafactor": ["optimizer=adafactor"],
    "sgd": ["optimizer=sgd"],
    "sgd_plain": ["optimizer=sgd", "optimizer.momentum=0"],
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("option", "task"), TINY_CASES, ids=lambda value: value)
def test_bytes_are_those_of_the_real_tensors(option, task, name):
    config = make_config(f"model={option}", f"task={task}", *OPTIMIZERS[name])
    assert predicted_bytes(config) == held_bytes(config, name)


def test_a_tensor_without_gradient_has_no_state():
    config = make_config("model=tiny_bert", "task=masked_lm", "model.tie_word_embeddings=false")
    assert predicted_bytes(config) == held_bytes(config, "adamw")


@pytest.mark.parametrize(
    ("optimizer", "bytes_per_parameter"),
    [
        pytest.param("optimizer=adamw", 16, id="adamw"),
        pytest.param("optimizer=adamw_fused", 16, id="adamw_fused"),
        pytest.param("optimizer=sgd", 12, id="sgd"),
    ],
)
def test_bert_large_as_in_the_textbooks(optimizer, bytes_per_parameter):
    config = make_config("model=bert_large", "task=masked_lm", optimizer)
    size = model_size(config)
    assert state_bytes(config, size).total == bytes_per_parameter * size.num_parameters


def test_adafactor_keeps_rows_and_columns():
    config = make_config("model=bert_large", "task=masked_lm", "optimizer=adafactor")
    size = model_size(config)
    # Of 335 M parameters less than one in two hundred leaves a number behind.
    assert state_bytes(config, size).optimizer < 4 * size.num_parameters / 200


def test_every_optimizer_option_is_known():
    for path in (conf_folder() / "optimizer").glob("*.yaml"):
        config = make_config("model=tiny", f"optimizer={path.stem}")
        assert state_bytes(config, model_size(config)).weights == 844928 * 4
