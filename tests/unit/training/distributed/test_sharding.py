"""Parts of tensors: how many bytes they are, what is saved of them, and which optimizers fail."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from saved import load_checkpoint, save_checkpoint
from support import TINY
from unit.models.sizes.configs import FAMILY_CASES
from unit.rules.devices import CPU as CPU_DEVICE
from unit.training.model.sharded import CPU, among, sharded_model, sharded_plan

from eke.config.compose import compose
from eke.config.schema import GradientSync
from eke.models.sizes import exchange_of, state_bytes
from eke.rules import RuleInputs, check
from eke.training.distributed.deepspeed_engine import ShardedUpdate
from eke.training.distributed.fsdp import (
    build_mesh,
    groups_of,
    is_sharded,
    local_tensor,
    part_bytes,
)
from eke.training.distributed.ranks import SINGLE_PROCESS, Ranks
from eke.training.model.build_model import build_model
from eke.training.model.number_formats import _look_up, build_formats
from eke.training.observe.record_settings import note_sharding
from eke.training.optimizer.build_optimizer import build_optimizer
from eke.training.state_parts import hold

SMALL = tuple(o for o in TINY if o != "model.dropout=0.0")


RANK = 1
"""Of two, in all tests: torch 2.13 remembers which part a rank has, by the size of the mesh."""


def step(model, optimizer):
    """One step with gradients of ones."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pytest.mark.parametrize(("option", "task"), FAMILY_CASES, ids=lambda value: value)
def test_predicted_state_bytes_of_rank_0_match_real_shards(option, task) -> None:
    """Three processes, so that most dimensions do not divide evenly."""
    plan = sharded_plan(3, f"model={option}", f"task={task}")
    with among(3, 0):
        model = sharded_model(plan)
        optimizer = build_optimizer(plan, model)
        step(model, optimizer)
        states = [v for s in optimizer.state.values() for v in s.values() if v.dim()]
        expected = state_bytes(plan.config)
        assert part_bytes(model.parameters()) == expected.weights
        trained = [p.grad for p in model.parameters() if p.grad is not None]
        assert part_bytes(trained) == expected.gradients
        assert part_bytes(states) == expected.optimizer
        largest = max(4 * p.numel() for p in model.parameters())
        assert expected.start == expected.weights + largest
        assert expected.peak == max(expected.start, expected.total)


def test_accumulated_gradients_are_full_size() -> None:
    several = ("batch.accumulation=2",)
    plain, every = (
        sharded_plan(2, *several),
        sharded_plan(2, *several, "distributed.exchange=every"),
    )
    whole = state_bytes(plain.config).gradients
    assert whole == 4 * plain.size.num_parameters
    assert state_bytes(every.config).gradients == whole / 2


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("adafactor", r"mixed torch\.Tensor and DTensor"),
        ("apollo", r"mixed torch\.Tensor and DTensor"),
        ("lion", "does not have a sharding strategy registered"),
        ("adamw_8bit", "does not have a sharding strategy registered"),
    ],
)
def test_optimizers_rejected_for_fsdp_fail(option, words) -> None:
    plan = sharded_plan(2, *SMALL, f"optimizer={option}")
    with among(2, RANK):
        model = sharded_model(plan)
        with pytest.raises((RuntimeError, NotImplementedError), match=words):
            step(model, build_optimizer(plan, model))


@pytest.mark.parametrize("option", ["adamw_foreach", "sgd", "muon"])
def test_checkpoint_of_one_process_is_sharded(option, tmp_path) -> None:
    plan = sharded_plan(2, *SMALL, f"optimizer={option}")
    alone = build_model(plan, CPU)
    theirs = build_optimizer(plan, alone)
    step(alone, theirs)
    path = save_checkpoint(tmp_path, 3, alone, theirs, None, keep=1)
    with among(2, RANK):
        model = sharded_model(plan)
        mine = build_optimizer(plan, model)
        assert load_checkpoint(path, model, mine, None, Ranks(RANK, 1)) == 3
        pairs = list(zip(alone.parameters(), model.parameters(), strict=True))
        assert all(is_sharded(p) for _, p in pairs)
        for complete, cut in pairs:
            assert torch.equal(local_tensor(cut), complete.chunk(2)[RANK])
            for name, value in theirs.state[complete].items():
                held = local_tensor(mine.state[cut][name])
                assert torch.equal(held, value.chunk(2)[RANK] if value.dim() else value)


def held(plan):
    """What this rank would write, after a step."""
    model = sharded_model(plan)
    optimizer = build_optimizer(plan, model)
    step(model, optimizer)
    return hold(model, optimizer)


def test_tied_weight_is_written_once() -> None:
    with among(2, RANK):
        found = held(sharded_plan(2, *SMALL, "model=tiny_gpt2"))
    assert found.notes["tied"] == {"lm_head.weight": "transformer.wte.weight"}
    assert "lm_head.weight" not in found.pieces
    assert found.pieces["transformer.wte.weight@exp_avg"].tensor.dim() == 2


def test_shard_size_is_bounded() -> None:
    plan = sharded_plan(2, *SMALL)
    with among(2, RANK):
        pieces = held(plan).pieces
    numbers = sum(piece.tensor.numel() for piece in pieces.values())
    assert numbers == pytest.approx(1.5 * plan.size.num_parameters, rel=0.01)


def test_uneven_replicas_leave_a_rank_idle() -> None:
    plan = sharded_plan(4, *SMALL, "distributed.replicas=3")
    with among(4, 3):
        assert build_mesh(plan, CPU).get_coordinate() is None


def test_ranks_of_a_copy_are_neighbours() -> None:
    plan = sharded_plan(4, *SMALL, "distributed.replicas=2")
    with among(4, 2):
        model = sharded_model(plan)
        optimizer = build_optimizer(plan, model)
        step(model, optimizer)
        mesh = next(model.parameters()).device_mesh
        assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
        assert mesh.mesh_dim_names == ("replicate", "shard")
        assert part_bytes(model.parameters()) == state_bytes(plan.config).weights
        assert state_bytes(plan.config).weights == 2 * plan.size.num_parameters


@pytest.mark.parametrize(
    ("processes", "replicas", "fix"),
    [(4, 3, 2), (4, 4, 2), (6, 3, None), (8, 2, None), (7, 2, 1), (3, 9, 1), (12, 5, 4)],
)
def test_copies_have_equal_parts(processes, replicas, fix) -> None:
    keys = {"num_processes": processes, "replicas": replicas}
    typed = [f"distributed.{key}={value}" for key, value in keys.items()]
    facts = RuleInputs(compose(["distributed=fsdp", *typed]).config, CPU_DEVICE, planning=True)
    found = [p for p in check(facts)[0] if p.id == "replicas_share_evenly"]
    assert [str(p.fix) for p in found] == ([] if fix is None else [f"distributed.replicas={fix}"])


def test_large_accumulated_gradients_are_reduced_immediately() -> None:
    def chosen(*overrides: str) -> GradientSync:
        return exchange_of(compose(["distributed=fsdp", *overrides]).config)

    large = ("model=llama3_8b", "batch.per_device=1")
    assert chosen(*large, "batch.accumulation=2") is GradientSync.every
    assert chosen(*large, "batch.accumulation=2", "peft=lora") is GradientSync.last
    assert chosen(*large, "batch.accumulation=1") is GradientSync.last
    assert chosen(*large, "batch.accumulation=2", "distributed.exchange=last") is GradientSync.last


def test_default_fsdp_settings_keep_the_run_id(make_plan) -> None:
    base = (*SMALL, "data=synthetic", "distributed=fsdp", "distributed.num_processes=4")
    typed = ((), ("distributed.exchange=last",), ("distributed.replicas=1",))
    ids = {make_plan(*base, *more, planning=True).run_id for more in typed}
    others = ("distributed.exchange=every", "distributed.replicas=2")
    assert len(ids) == 1
    assert len(ids | {make_plan(*base, more, planning=True).run_id for more in others}) == 3


TWO = (*SMALL, "data=synthetic", "distributed=fsdp", "distributed.num_processes=2")
BF16 = ("precision=bf16", "data.seq_len=8")
ONCE = (*BF16, "precision.casts=per_step")
FORMATS = {
    "products": (BF16, "llama", {"bfloat16", "float32"}),
    "nothing wide": (ONCE, "llama", {"bfloat16"}),
    "norms": (ONCE, "gpt2", {"bfloat16", "float32"}),
    "another evaluation": ((*BF16, "precision.evaluation=float32"), "llama", {"float32"}),
    "float32": (("precision=fp32",), "llama", {"float32"}),
}


@pytest.mark.parametrize(("overrides", "family", "sent"), FORMATS.values(), ids=FORMATS.keys())
def test_weights_are_gathered_in_the_compute_format(overrides, family, sent, make_plan):
    """Read from the buffers; a LayerNorm and what no product takes stay float32."""
    model = "tiny_gpt2" if family == "gpt2" else "tiny"
    plan = make_plan(*TWO, f"model={model}", *overrides)
    with among(2, RANK):
        model = sharded_model(plan)
        formats = build_formats(plan, CPU, model)
        with formats.autocast():
            model(torch.zeros((1, 4), dtype=torch.long)).logits.float().sum().backward()
        sharding, warnings = noted(plan, model)
    assert set(sharding["gathered_numbers"]) == sent
    assert not warnings


def test_ineffective_mixed_precision_policy_is_warned_about(make_plan) -> None:
    plan = make_plan(*TWO, *BF16)
    silent = replace(plan, compute=replace(plan.compute, gathered=""))
    with among(2, RANK):
        model = sharded_model(silent)
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.zeros((1, 4), dtype=torch.long))
        assert "bfloat16" in noted(plan, model)[1][0]


def test_embedding_and_head_are_units_unless_tied() -> None:
    for tied, units in (("true", 3), ("false", 5)):
        plan = sharded_plan(2, *SMALL, f"model.tie_word_embeddings={tied}")
        with among(2, RANK):
            assert len(groups_of(sharded_model(plan).modules())) == units


def test_narrow_table_gradients_are_summed_in_float32() -> None:
    """Beyond 256 equal rows a sum in bfloat16 stops growing."""
    table = torch.nn.Embedding(3, 4, padding_idx=2).bfloat16()
    ids = torch.tensor([1] * 3000 + [2])
    _look_up(table.forward, ids).sum().backward()
    assert table.weight.grad is not None
    assert table.weight.grad[:, 0].tolist() == [0, 3008, 0]  # 3000 rounded to 8 bits


def noted(plan, model):
    """What the record would say of a model, and the warnings."""
    optimizer = build_optimizer(plan, model)
    update = ShardedUpdate(plan, model, optimizer, None, list(model.parameters()))
    warnings: list[str] = []
    job = SimpleNamespace(
        plan=plan, bare_model=model, optimizer=optimizer, ranks=SINGLE_PROCESS, effective={},
        update=update, warn=warnings.append,
    )  # fmt: skip
    note_sharding(job)
    return job.effective["sharding"], warnings


def test_sharded_parameters_are_recorded() -> None:
    plan = sharded_plan(4, *SMALL)
    with among(4, 0):
        sharding, warnings = noted(plan, sharded_model(plan))
    assert sharding["mesh"] == [4]
    assert sharding["sharded_parameters"] == sharding["parameters"] == plan.size.num_parameters
    assert sharding["state_bytes_per_rank"][0]["weights"] == plan.size.num_parameters
    assert not warnings


def test_unsharded_model_is_warned_about() -> None:
    plan = sharded_plan(2, *SMALL)
    sharding, warnings = noted(plan, build_model(plan, CPU))
    assert (sharding["mesh"], sharding["sharded_parameters"]) == ([], 0)
    (warning,) = warnings
    assert warning.startswith("distributed=fsdp ")
