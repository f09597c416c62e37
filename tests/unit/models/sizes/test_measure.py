"""Parameter counts: every option of conf/model, against real classes and published numbers."""

from math import prod

import pytest
import torch
import transformers
from unit.models.sizes.configs import CHECKPOINTS_ONLY, TINY, make_config

from eke.common.errors import ConfigError
from eke.common.paths import conf_folder
from eke.models.families import FAMILIES
from eke.models.sizes import model_size, structure
from eke.training.model.build_model import make_model_config
from eke.training.model.model_checks import HEADS

OPTIONS = sorted(
    {path.stem for path in (conf_folder() / "model").glob("*.yaml")} - {"pretrained", "custom"}
)

PUBLISHED = {
    # The checkpoints' well-known totals with the head of their own pre-training task (BERT without
    # pooler and next-sentence head), pinned so that a slip in conf/model shows.
    "bert_base": 109_514_298,
    "bert_large": 335_174_458,
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    "t5_small": 60_506_624,
    "t5_base": 222_903_552,
    "t5_3b": 2_851_598_336,
    "llama_1b": 1_235_814_400,
    "llama2_7b": 6_738_415_616,
    "llama3_8b": 8_030_261_248,
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_8b": 8_190_735_360,
    "mixtral_8x7b": 46_702_792_704,
}


def real_model(config, device="meta"):
    model_config = make_model_config(config)
    with torch.device(device):
        return getattr(transformers, HEADS[config.task.option]).from_config(model_config)


def assert_same_tensors(config):
    named = names_and_shapes(real_model(config))
    planned = [(sorted(w.names), w.shape) for w in structure(config).weights]
    assert sorted(planned) == named
    assert model_size(config).num_parameters == sum(prod(shape) for _, shape in named)


def names_and_shapes(model):
    """All names of each parameter, and its shape."""
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(parameter, []).append(name)
    return sorted((sorted(names), tuple(p.shape)) for p, names in found.items())


@pytest.mark.parametrize("option", OPTIONS)
def test_option_sizes_match_real_classes(option):
    """Heads are those of the smallest of each family; `PUBLISHED` counts all layers."""
    tasks = FAMILIES[make_config(f"model={option}").model.family].tasks
    for task in tasks if option in TINY.values() else tasks[:1]:
        layers = ("model.num_hidden_layers=2",) * (option in PUBLISHED)
        assert_same_tensors(make_config(f"model={option}", f"task={task}", *layers))


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["model=tiny", "model.num_key_value_heads=2"], id="grouped-query"),
        pytest.param(["model=tiny", "model.head_dim=64"], id="wide-heads"),
        pytest.param(["model=tiny", "model.tie_word_embeddings=false"], id="llama-untied"),
        pytest.param(["model=tiny_gpt2", "model.tie_word_embeddings=false"], id="gpt2-untied"),
        pytest.param(["model=tiny_qwen3", "model.head_dim=null"], id="qwen3-derived-width"),
        pytest.param(["model=tiny_qwen3", "model.num_key_value_heads=null"], id="qwen3-heads"),
        pytest.param(["model=tiny_qwen3", "model.tie_word_embeddings=false"], id="qwen3-untied"),
        pytest.param(["model=tiny_moe", "model.num_local_experts=7"], id="experts"),
        pytest.param(["model=tiny_moe", "model.num_key_value_heads=2"], id="moe-grouped-query"),
        pytest.param(["model=tiny", "model.rope_scaling_factor=8"], id="stretched-positions"),
        pytest.param(
            ["model=tiny_bert", "task=masked_lm", "model.tie_word_embeddings=false"],
            id="bert-untied",
        ),
        pytest.param(
            ["model=tiny_bert", "task=masked_lm", "model.type_vocab_size=5"], id="bert-segments"
        ),
        pytest.param(["model=tiny_t5", "task=seq2seq_lm", "model.gated=true"], id="t5-gated"),
        pytest.param(
            ["model=tiny_t5", "task=seq2seq_lm", "model.tie_word_embeddings=false"], id="t5-untied"
        ),
        pytest.param(
            ["model=tiny_t5", "task=seq2seq_lm", "model.num_decoder_layers=3", "model.head_dim=24"],
            id="t5-deep-decoder",
        ),
        pytest.param(
            ["model=tiny_bert", "task=sequence_classification", "task.num_labels=7"], id="labels"
        ),
    ],
)
def test_changed_fields_change_sizes_like_real_classes(overrides):
    assert_same_tensors(make_config(*overrides))


@pytest.mark.parametrize(("option", "count"), PUBLISHED.items(), ids=PUBLISHED)
def test_published_sizes_are_matched(option, count):
    family = make_config(f"model={option}").model.family
    config = make_config(f"model={option}", f"task={FAMILIES[family].tasks[0]}")
    assert model_size(config).num_parameters == count


def test_active_parameters_of_mixtral_match_published_values():
    size = model_size(make_config("model=mixtral_8x7b"))
    # "13B active parameters": arXiv:2401.04088, section 2.1.
    assert size.num_active_parameters == 12_879_925_248
    per_layer = 3 * 14336 * 4096
    assert size.num_parameters - size.num_active_parameters == 32 * 6 * per_layer
    assert model_size(make_config("model=tiny")).num_active_parameters == 844928


def test_matmul_parameters_are_used_for_every_token():
    # 4 layers of 4 x 128 x 128 and 3 x 128 x 352, and the embedding that is also the projection.
    expected = 4 * (4 * 128 * 128 + 3 * 128 * 352) + 320 * 128
    assert model_size(make_config("model=tiny")).num_matmul_parameters == expected
    size = model_size(make_config("model=tiny_bert", "task=sequence_classification"))
    assert size.num_matmul_parameters == 4 * (4 * 128 * 128 + 2 * 128 * 512), "no pooled head"


def test_task_without_head_is_rejected_with_a_fix():
    config = make_config("model=tiny_bert", "task=causal_lm")
    with pytest.raises(ConfigError, match="have heads only for masked_lm and") as caught:
        model_size(config)
    (problem,) = caught.value.problems
    assert (problem.key, problem.value, str(problem.fix)) == ("task", "causal_lm", "task=masked_lm")


def test_families_tasks_and_options_agree():
    families = {make_config(f"model={option}").model.family for option in OPTIONS}
    assert set(FAMILIES) == families | CHECKPOINTS_ONLY
    built = {name: each.smallest for name, each in FAMILIES.items() if each.config_class}
    assert built == TINY
    assert set(TINY) == families
    tasks = {path.stem for path in (conf_folder() / "task").glob("*.yaml")}
    assert (
        {task for each in FAMILIES.values() for task in each.tasks} == tasks == {*HEADS, "custom"}
    )
