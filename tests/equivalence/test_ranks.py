"""Two processes train like one: same loss, same gradient norm, at every step.

Ragged lengths, so that ranks hold unequal numbers of targets; 29 samples in steps of 12, so that
each epoch ends with a step in which the second rank has no sample at all. Dropout 0; float32.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from equivalence_cases import CASES, RAGGED, SMOOTH
from equivalence_compare import Curve, largest_difference
from support import TINY, last_wins

from eke.plan.record import metrics

UNEVEN = (*RAGGED, "data.num_samples=29", "data.num_eval_samples=5", "train.log_every=7")

QUICK = ("causal_lm-llama", "classification-bert")
"""What `make test` looks at."""


def slow(case: str) -> object:
    """For `make test-all`."""
    return pytest.param(case, marks=pytest.mark.slow)


@pytest.fixture
def ranks_curve(train_ranks) -> Callable[..., Curve]:
    """Overrides -> what two processes log at each step; with ddp, unless they say otherwise."""

    def run(*overrides: str) -> Curve:
        folder = train_ranks("distributed=ddp", *overrides)
        record = json.loads((folder / "record.json").read_text())
        assert len(record["memory"]["measured"]["peak_per_rank_bytes"]) == 2
        options = [record["config"][group]["option"] for group in ("distributed", "engine")]
        copies = 2 if options == ["ddp", "loop"] else None
        assert record["effective"].get("copies") == copies
        return logged(folder)

    return run


def logged(folder: Path) -> Curve:
    """What a run's folder says of each step."""
    rows, unreadable = metrics.read_rows(folder / "metrics.jsonl")
    assert unreadable == 0
    return [
        (row[metrics.LOSS], row["train/grad_norm"]) for row in metrics.latest(rows, metrics.LOSS)
    ]


@pytest.mark.parametrize("case", [case if case in QUICK else slow(case) for case in CASES])
def test_two_ranks_match_one(case, baseline_of, ranks_curve) -> None:
    base = (*CASES[case], *TINY, *UNEVEN, *SMOOTH.get(case, ()))
    one = baseline_of(*base, "batch.per_device=12")
    two = ranks_curve(*base, "batch.per_device=6")
    assert largest_difference(one, two) < 1e-5
    assert one[0][0] != one[-1][0], "the loss never moved"


@pytest.mark.slow
def test_train_py_starts_ranks_that_train_the_same(train_py, ranks_curve, tmp_path) -> None:
    """The other tests fork their ranks (rank_server.py); users have torch's agent start theirs."""
    case = (*CASES["causal_lm-llama"], *TINY, *UNEVEN, "batch.per_device=6", "distributed=ddp")
    forked = ranks_curve(*case)
    done = train_py(*last_wins(*case, "hardware=cpu", "paths.runs=typed"))
    assert done.code == 0, done.text
    (mine,), (typed,) = tmp_path.glob("runs/*"), tmp_path.glob("typed/*")
    assert logged(typed) == forked
    assert typed.name == mine.name, "another configuration"


@pytest.mark.slow
@pytest.mark.parametrize("case", ["causal_lm-llama", "classification-bert", "seq2seq-t5"])
def test_trainer_on_two_ranks_matches_the_loop(case, baseline_of, ranks_curve) -> None:
    base = (*CASES[case], *TINY, *UNEVEN, *SMOOTH.get(case, ()))
    one = baseline_of(*base, "batch.per_device=12")
    two = ranks_curve(*base, "batch.per_device=2", "batch.accumulation=3", "engine=trainer")
    assert largest_difference(one, two) < 1e-5


COMPILED = ("compile=aot_eager", "model.num_hidden_layers=1", "data.lengths=fixed",
            "data.min_len=null", "data.num_samples=24", "data.num_eval_samples=4",
            "train.steps=4")  # fmt: skip
"""One layer and one shape: each other one is traced again."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "technique",
    [
        ("batch.per_device=6", "memory=checkpointing"),
        ("batch.per_device=6", "optimizer=adafactor"),
        ("batch.per_device=6", "dataloader=workers"),
        ("batch.per_device=3", "batch.accumulation=2", *COMPILED),
        ("batch.per_device=3", "batch.accumulation=2", "kernels=fused_linear_cross_entropy"),
        ("batch.per_device=3", "batch.accumulation=2", *COMPILED, "engine=trainer"),
        ("batch.per_device=6", "peft=qlora"),
    ],
    ids=[
        "checkpointing",
        "adafactor",
        "loader processes",
        "compiled",
        "fused loss",
        "compiled under trainer",
        "qlora",
    ],
)
def test_techniques_match_on_two_ranks(technique, baseline_of, ranks_curve) -> None:
    base = (*CASES["causal_lm-llama"], *TINY, *UNEVEN)
    kept = ("optimizer", "peft", "model", "data.", "train.")
    one = [o for o in technique if o.startswith(kept)]
    alone = baseline_of(*base, *one, "batch.per_device=12")
    assert largest_difference(alone, ranks_curve(*base, *technique)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("distributed", ["ddp", "fsdp", "zero3"])
def test_ranks_exclude_positions_without_a_label(distributed, baseline_of, ranks_curve) -> None:
    """Each has its own number of them, and in an epoch's last step one has none at all."""
    base = (*CASES["masked_lm-bert"], *TINY, *UNEVEN)
    cut = ("batch.per_device=2", "batch.accumulation=3", f"distributed={distributed}")
    two = ranks_curve(*base, *cut, "kernels=sparse_prediction")
    assert largest_difference(baseline_of(*base, "batch.per_device=12"), two) < 1e-5


SHARDED = ("distributed=fsdp", "batch.per_device=2", "batch.accumulation=3")
"""Twelve samples of 29 in six pieces: an epoch's last step has three, the second rank's first is a
placeholder's neighbour, and one evaluation batch has no partner."""


@pytest.mark.parametrize(
    "case",
    ["causal_lm-llama", slow("masked_lm-bert"), slow("classification-llama"), slow("seq2seq-t5")],
)
def test_two_ranks_with_shards_match_one(case, baseline_of, ranks_curve) -> None:
    base = (*CASES[case], *TINY, *UNEVEN, *SMOOTH.get(case, ()), "train.max_grad_norm=0.5")
    one = baseline_of(*base, "batch.per_device=12")
    assert largest_difference(one, ranks_curve(*base, *SHARDED)) < 1e-5
    assert max(norm for _, norm in one) > 0.5, "nothing was ever clipped"


@pytest.mark.slow
@pytest.mark.parametrize(
    "technique",
    [
        ("distributed.exchange=every", "optimizer=adamw_foreach"),
        ("optimizer=muon",),
        ("optimizer=schedule_free",),
        ("peft=qlora",),
        ("peft=lora", "memory=checkpointing"),
        COMPILED,
        ("compile.regional=true", *COMPILED),
        ("model.intermediate_size=97", "model.vocab_size=331",
         "distributed.reshard_after_forward=false"),
        ("kernels=fused_linear_cross_entropy", "model.tie_word_embeddings=false"),
        ("precision=bf16", "precision.casts=per_step"),
        ("model=tiny_moe",),
        ("precision=fp16",),
    ],
    ids=lambda technique: technique[0],
)  # fmt: skip
def test_techniques_match_on_sharded_models(technique, baseline_of, ranks_curve) -> None:
    """In 16 bits, too: the same products of the same rows, only sums are made in another order.

    Muon orthogonalizes in bfloat16: one process that cuts its batch differs as much (2.7e-5).
    """
    base = last_wins(*CASES["causal_lm-llama"], *TINY, *UNEVEN, *technique)
    alone = [o for o in base if not o.startswith(("distributed", "memory", "compile"))]
    bound = 2**-8 if "precision" in technique[0] else 1e-3 if "muon" in technique[0] else 1e-5
    one = baseline_of(*alone, "batch.per_device=12")
    assert largest_difference(one, ranks_curve(*base, *SHARDED)) < bound


@pytest.mark.slow
@pytest.mark.parametrize("case", ["causal_lm-llama", "seq2seq-t5"])
def test_matrices_sent_in_16_bits_give_equal_results(case, make_plan, train_plan) -> None:
    """As when all weights were sent in float32, and autocast cast them on each rank."""
    plan = make_plan(*last_wins(*CASES[case], *TINY, *UNEVEN, *SHARDED, "precision=bf16"))
    folder = train_plan(plan)
    narrow, effective = logged(folder), json.loads((folder / "record.json").read_text())
    sent = effective["effective"]["sharding"]["gathered_numbers"]
    assert min(sent["bfloat16"], sent["float32"]) > 0
    shutil.rmtree(folder)
    wide = replace(plan, compute=replace(plan.compute, gathered=""))
    assert largest_difference(logged(train_plan(wide)), narrow) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("precision=bf16", "precision.casts=per_step")])
def test_replicas_of_a_sharded_model_match_one_process(
    more, baseline_of, train_ranks, monkeypatch
) -> None:
    monkeypatch.setattr("eke.rules.distributed.usable_cores", lambda: 4)
    base = (*CASES["causal_lm-llama"], *TINY, *UNEVEN, *more, "train.max_grad_norm=0.5")
    copies = ("distributed=fsdp", "distributed.num_processes=4", "distributed.replicas=2")
    folder = train_ranks(*base, *copies, "batch.per_device=1", "batch.accumulation=3")
    one = baseline_of(*base, "batch.per_device=12")
    assert largest_difference(one, logged(folder)) < (2**-8 if more else 1e-5)


@pytest.mark.slow
def test_sharded_float8_layers_scale_like_full_layers(curve_of, ranks_curve) -> None:
    """The same micro-batches on both sides, since each has scales of its own.

    Float8 rounds more coarsely than bfloat16: what that is allowed after some steps is enough here.
    """
    pytest.importorskip("torchao", reason="an extra")
    base = (*CASES["causal_lm-llama"], *TINY, *UNEVEN, "precision=fp8", "train.steps=24")
    one = curve_of(*base, "batch.per_device=2", "batch.accumulation=6")
    two = ranks_curve(*base, *SHARDED)
    assert largest_difference(one[:3], two[:3]) < 1e-5
    assert largest_difference(one, two) < 2**-8


STATES = {
    "average": ("optimizer=schedule_free",),
    "float32 copies": ("precision=bf16_pure", "precision.master=on"),
    "adapters": ("peft=lora",),
}
"""What a checkpoint of parts has to hold beside weights and moments, or instead of them."""


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES.values(), ids=STATES.keys())
def test_sharded_run_resumes_bit_exact(state, train_ranks) -> None:
    case = (*CASES["causal_lm-llama"], *TINY, *UNEVEN, *SHARDED, *state)
    case = (*case, "train.steps=4", "train.checkpoint_every=2")
    folder = train_ranks(*case)
    first = logged(folder)
    os.remove(folder / "record.json")
    assert train_ranks(*case) == folder
    assert logged(folder) == first
    assert "resuming after step 2" in (folder / "train.log").read_text()


@pytest.mark.slow
def test_record_describes_sharded_state(train_ranks) -> None:
    case = (*CASES["causal_lm-llama"], *TINY, *UNEVEN, *SHARDED, "distributed.exchange=every")
    folder = train_ranks(*case, "train.steps=2")
    sharding = json.loads((folder / "record.json").read_text())["effective"]["sharding"]
    assert sharding["mesh"] == [2]
    assert sharding["sharded_parameters"] == sharding["parameters"]
    first, second = sharding["state_bytes_per_rank"]
    assert first == second, "every dimension of this model is even"
    assert first["weights"] == first["gradients"] == 4 * sharding["parameters"] / 2
    assert first["optimizer"] == 2 * first["weights"]


@pytest.fixture(scope="module")
def routed_checkpoint(tmp_path_factory) -> Path:
    """Eight experts as modules, of which a rank's few tokens reach some."""
    import torch
    import transformers

    folder = tmp_path_factory.mktemp("routed")
    config = transformers.SwitchTransformersConfig(
        vocab_size=320, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_decoder_layers=2,
        num_heads=2, num_experts=8, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
        dropout_rate=0.0, router_jitter_noise=0.0, expert_capacity=1000, pad_token_id=0,
        eos_token_id=2, decoder_start_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.SwitchTransformersForConditionalGeneration(config)
    model.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["fsdp", "zero2"])
def test_router_loss_is_averaged_over_all_ranks(shared, curve_of, train_ranks) -> None:
    base = (*TINY, "model=tiny_moe", "data=synthetic", "data.seq_len=16", "data.lengths=uniform",
            "data.min_len=5", "data.num_samples=16", "data.num_eval_samples=2", "train.steps=2",
            "batch.per_device=2", "task.router_loss=0.5")  # fmt: skip
    one = curve_of(*base, "batch.accumulation=2")
    folder = train_ranks(*base, f"distributed={shared}")
    assert largest_difference(one, logged(folder)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["ddp", "fsdp", "zero3"])
def test_experts_unused_on_a_rank_are_trained(shared, routed_checkpoint, baseline_of, train_ranks):
    """SGD leaves an expert without a gradient as it is, and one with a gradient of zero as well."""
    base = (
        "model=pretrained", f"model.name_or_path={routed_checkpoint}", "task=seq2seq_lm",
        "data=synthetic", "data.seq_len=6", "data.max_token=300", "data.num_samples=8",
        "data.num_eval_samples=2", "train.steps=4", "train.epochs=null", "train.log_every=1",
        "optimizer=sgd", "optimizer.lr=0.1", "optimizer.weight_decay=0", "optimizer.momentum=0",
        "attention=eager",
    )  # fmt: skip
    one = baseline_of(*base, "batch.per_device=2")
    folder = train_ranks(*base, "batch.per_device=1", f"distributed={shared}")
    assert largest_difference(one, logged(folder)) < 1e-5
    warnings = json.loads((folder / "record.json").read_text())["warnings"]
    assert not any("not trained" in warning for warning in warnings)
