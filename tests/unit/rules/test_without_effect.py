"""Settings without effect: the run is the same to the last bit with them and without them.

A rule that says so and is wrong is found here: the setting would change the run.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from unit.rules.without import is_same, trained

from eke.training.loop.training_state import TrainingState

CLASSES = ("task=sequence_classification",)
LORA = ("peft=lora", "peft.r=1")
ROWS = ("data=jsonl", "data.path={tmp}/rows.jsonl")

SAME: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "packing_needs_ragged": (("data.packing=on",), ()),
    "grouping_needs_ragged": (("data.length_grouping=true",), ()),
    "multiple_needs_padding": (("data.pad_to_multiple_of=8",), ()),
    "median_needs_lognormal": (("data.median_len=10",), ()),
    "min_len_needs_ragged": (("data.min_len=10",), ()),
    "tied_embeddings_need_head": ((*CLASSES, "model.tie_word_embeddings=false"), CLASSES),
    "master_needs_narrow_weights": (
        ("precision=bf16", "precision.master=on"),
        ("precision=bf16",),
    ),
    "casts_need_wide_weights": (("precision.casts=per_step",), ()),
    "tf32_needs_ampere": (("precision=tf32",), ()),
    "paging_needs_cuda": (("optimizer=paged_adamw_8bit",), ("optimizer=adamw_8bit",)),
    "every_n_needs_checkpointing": (("memory.every_n=2",), ()),
    "offload_needs_gpu": (("memory=activation_offload",), ()),
    "empty_cache_needs_gpu": (("memory=empty_cache",), ()),
    "backend_is_sdpas": (("attention=eager", "attention.backend=flash"), ("attention=eager",)),
    "regional_needs_compiler": (("compile.regional=true",), ()),
    "fused_loss_needs_vocabulary": (
        (*CLASSES, "kernels=fused_linear_cross_entropy"),
        CLASSES,
    ),
    "sparse_prediction_needs_vocabulary": ((*CLASSES, "kernels=sparse_prediction"), CLASSES),
    "dp_needs_two_gpus": (("distributed=dp", "distributed.num_processes=1"), ()),
    "ddp_of_one": (("distributed=ddp", "distributed.num_processes=1"), ()),
    "fsdp_of_one": (("distributed=fsdp", "distributed.num_processes=1"), ()),
    "checkpoint_async_needs_parts": (("train.checkpoint_async=true",), ()),
    "p2p_needs_gpus": (("distributed.p2p=off",), ()),
    "ds_config_without_zero": (("distributed.deepspeed_config={tmp}/ds.json",), ()),
    "offload_needs_zero": (
        ("offload=optimizer_cpu", "optimizer=adamw_fused"),
        ("optimizer=adamw_fused",),
    ),
    "rslora_needs_rank": ((*LORA, "peft.use_rslora=true"), LORA),
    "implementation_is_adamws": (
        ("optimizer=adamw_forloop", "optimizer.implementation=foreach"),
        ("optimizer=adamw_forloop",),
    ),
    "adapters_are_fused": (
        (*LORA, "peft.dropout=0.1", "peft.fused=true"),
        (*LORA, "peft.dropout=0.1"),
    ),
    "adapted_layers_have_biases": ((*LORA, "peft.bias=lora_only"), LORA),
    "extra_needs_trainer": (("trainer.extra.label_smoothing_factor=0.1",), ()),
    "pinning_needs_cuda": (("dataloader.pin_memory=on",), ()),
    "mode_is_wandbs": (("tracker.mode=online",), ()),
    "entity_is_wandbs": (("tracker.entity=team",), ()),
    "uri_is_mlflows": (("tracker.uri=sqlite:///mlflow.db",), ()),
    "norm_is_known_anyway": (("train.record_grad_norm=false",), ()),
    "early_stop_needs_evaluations": (("train.early_stop_patience=2",), ()),
    "keep_best_needs_evaluations": (("train.keep_best=loss",), ()),
    "shuffle_buffer_needs_stream": ((*ROWS, "data.shuffle_buffer=5"), ROWS),
}
"""Rule -> overrides with the setting, and without it."""

EFFECTIVE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "data.packing": (("data.lengths=uniform", "data.packing=on"), ("data.lengths=uniform",)),
    "data.length_grouping": (
        ("data.lengths=uniform", "data.length_grouping=true"),
        ("data.lengths=uniform",),
    ),
    "data.min_len": (("data.lengths=uniform", "data.min_len=15"), ("data.lengths=uniform",)),
    "precision": (("precision=bf16",), ()),
    "peft.use_rslora": (
        ("peft=lora", "peft.r=4", "peft.use_rslora=true"),
        ("peft=lora", "peft.r=4"),
    ),
}
"""The same comparison where there is an effect, so that it is seen to find one."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TrainingState]:
    """Overrides -> the finished job; what several comparisons start from is trained once."""
    done: dict[tuple[str, ...], TrainingState] = {}
    tmp = tmp_path_factory.mktemp("runs")
    (tmp / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    (tmp / "rows.jsonl").write_text("".join(f'{{"text": "row {n}"}}\n' for n in range(80)))

    def train(*overrides: str) -> TrainingState:
        if overrides not in done:
            typed = [o.format(tmp=tmp) if "{tmp}" in o else o for o in overrides]
            done[overrides] = trained(tmp / str(len(done)), *typed)
        return done[overrides]

    return train


@pytest.mark.parametrize("rule", SAME)
def test_setting_without_effect_keeps_the_run_bit_exact(
    rule: str, run: Callable[..., TrainingState]
) -> None:
    with_it, without_it = SAME[rule]
    assert is_same(run(*with_it), run(*without_it))


@pytest.mark.parametrize("key", EFFECTIVE)
def test_difference_is_detected(key: str, run: Callable[..., TrainingState]) -> None:
    with_it, without_it = EFFECTIVE[key]
    assert not is_same(run(*with_it), run(*without_it))


def test_memory_is_not_pinned_on_a_cpu(run: Callable[..., TrainingState], tmp_path: Path) -> None:
    assert run("dataloader.pin_memory=on").data.pinned is False
