"""A training state that several ranks hold in parts: saved, read by others, and failing on one."""

import errno
import json
import os
import random
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from saved import load_checkpoint as load_alone
from saved import save_checkpoint as save_alone
from torch import nn

from eke.common.paths import RunPaths, checkpoint_name
from eke.training import checkpoint
from eke.training.checkpoint import find_damage, newest_complete
from eke.training.distributed.ranks import Ranks
from eke.training.loop import saving
from eke.training.model.number_formats import build_with_master
from eke.training.part_files import PartFiles, part_name
from eke.training.state_parts import hold


def tied_llama(dtype):
    """Sizes that no number of ranks divides, a tied weight, a buffer, a frozen weight."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=7, hidden_size=4, intermediate_size=5, num_hidden_layers=1,
        num_attention_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.model.norm.requires_grad_(False)
    model.register_buffer("scale", torch.arange(3.0))
    return model.to(dtype)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def schedule_free(parameters):
    made = pytest.importorskip("schedulefree").AdamWScheduleFree(parameters, lr=1e-2)
    made.train()
    return made


def build(kind, mesh=None):
    """A model and its optimizer; cut among the ranks of a mesh."""
    model = tied_llama(torch.bfloat16 if kind == "master" else torch.float32)
    if mesh is not None:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model.model.layers[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    trained = [p for p in model.parameters() if p.requires_grad]
    if kind == "master":
        return model, build_with_master([{"params": trained}], adamw)
    return model, {"adamw": adamw, "momentum": momentum, "averaged": schedule_free}[kind](trained)


KINDS = ("adamw", "momentum", "averaged", "master")


def train(model, optimizer, steps) -> None:
    """Steps with gradients that any part of a weight has as the whole."""
    for _ in range(steps):
        for p in model.parameters():
            if p.requires_grad:
                p.grad = (p.detach() * 0.5 + 0.25).to(p.dtype)
        optimizer.step()
        optimizer.zero_grad()


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def job_of(folder, rank, world_size, model, optimizer, background):
    """As much of a run's state as saving asks for."""
    paths = RunPaths(folder)
    settings = SimpleNamespace(checkpoint_async=background, keep_checkpoints=2)
    cut = SimpleNamespace(hold=lambda model: hold(model, optimizer) if world_size > 1 else None)
    return SimpleNamespace(
        callbacks=SimpleNamespace(save=lambda folder: None),
        ranks=Ranks(rank, world_size), paths=paths, bare_model=model, optimizer=optimizer,
        update=cut, formats=SimpleNamespace(scaler=None), tokenizer=None, saving=None,
        checkpoint_s=0.0, meter=SimpleNamespace(leave=lambda phase: None, is_saving=False),
        plan=SimpleNamespace(run_id="r", config=SimpleNamespace(train=settings)),
    )  # fmt: skip


def start_ranks(folder, world_size, work) -> tuple[list[int], list[Path]]:
    """Processes forked from here for `work(rank, mesh)`, and the files of what each answers."""
    from torch.distributed.device_mesh import init_device_mesh

    meeting = folder / f"meeting-{world_size}-{time.monotonic_ns()}"
    answers = [folder / f"{meeting.name}.{rank}" for rank in range(world_size)]
    pids = []
    for rank in range(world_size):
        if pid := os.fork():
            pids.append(pid)
            continue
        try:
            limit = timedelta(seconds=60)
            dist.init_process_group("gloo", f"file://{meeting}", limit, world_size, rank)
            mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",))
            answers[rank].write_text(json.dumps(work(rank, mesh)))
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(0)
    return pids, answers


def in_ranks(folder, world_size, work) -> list:
    """What `work(rank, mesh)` answers on each of several ranks."""
    pids, answers = start_ranks(folder, world_size, work)
    for pid in pids:
        os.waitpid(pid, 0)
    return [json.loads(path.read_text()) if path.exists() else "died" for path in answers]


@pytest.fixture(autouse=True)
def without_evaluations(monkeypatch) -> None:
    monkeypatch.setattr(saving, "best_so_far", lambda job: None)


def stage(folder, kind, steps, background, first):
    """Go on from the newest checkpoint, train and save; says what the ranks drew next."""

    def work(rank, mesh):
        model, optimizer = build(kind, mesh if mesh.size() > 1 else None)
        job = job_of(folder / kind, rank, mesh.size(), model, optimizer, background)
        found, done, drawn = newest_complete(job.paths.checkpoints), 0, 0.0
        torch.manual_seed(rank)
        if found is not None:
            checkpoint.load_model(found, model, job.ranks)
            done = checkpoint.load_checkpoint(found, model, optimizer, None, job.ranks, seed=5)
            drawn = float(torch.rand(()))
        assert found is not None or first
        train(model, optimizer, steps)
        saving.save(job, done + steps)
        saving.await_copy(job)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1)  # what is saved is a copy by now
        saving.finish_saving(job)
        return drawn

    return work


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True], ids=["at once", "beside"])
def test_any_number_of_ranks_resumes(background, tmp_path) -> None:
    """4 -> 2 -> 3 -> 1, bit for bit what one process computes."""
    drawn = {}
    for number, world_size in enumerate((4, 2, 3, 1)):

        def work(rank, mesh, first=number == 0):
            return [stage(tmp_path, kind, 2, background, first)(rank, mesh) for kind in KINDS]

        drawn[world_size] = in_ranks(tmp_path, world_size, work)
        assert "died" not in drawn[world_size]
    for kind in KINDS:
        model, optimizer = build(kind)
        path = newest_complete(tmp_path / kind / "checkpoints")
        assert path.name == checkpoint_name(8)
        assert load_alone(path, model, optimizer, None) == 8
        expected, reference = build(kind)
        train(expected, reference, 8)
        for theirs, mine in ((expected, model), (reference.state, optimizer.state)):
            if isinstance(theirs, nn.Module):
                assert theirs.state_dict().keys() == mine.state_dict().keys()
                pairs = zip(theirs.state_dict().values(), mine.state_dict().values(), strict=True)
                assert all(torch.equal(one, other) for one, other in pairs), kind
            else:
                pairs = list(zip(theirs.values(), mine.values(), strict=True))
                assert pairs
                for one, other in pairs:
                    assert one.keys() == other.keys()
                    assert all(torch.equal(one[k], other[k]) for k in one if one[k] is not None)
        assert model.lm_head.weight is model.model.embed_tokens.weight
    third = {tuple(answer) for answer in drawn[3]}
    assert len(third) == 3, "each rank draws other numbers"


@pytest.mark.slow
def test_shards_load_a_single_process_checkpoint(tmp_path) -> None:
    for kind in KINDS:
        model, optimizer = build(kind)
        train(model, optimizer, 2)
        save_alone(tmp_path / kind / "checkpoints", 2, model, optimizer, None, keep=1)

    def work(rank, mesh):
        return [stage(tmp_path, kind, 2, True, False)(rank, mesh) for kind in KINDS]

    assert "died" not in in_ranks(tmp_path, 2, work)
    for kind in KINDS:
        model, optimizer = build(kind)
        load_alone(newest_complete(tmp_path / kind / "checkpoints"), model, optimizer, None)
        expected, reference = build(kind)
        train(expected, reference, 4)
        for one, other in zip(expected.parameters(), model.parameters(), strict=True):
            assert torch.equal(one, other), kind


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True], ids=["at once", "beside"])
def test_full_disk_on_rank_1_is_raised_on_every_rank(background, tmp_path, monkeypatch) -> None:
    real = checkpoint.write_part

    def work(rank, mesh):
        model, optimizer = build("adamw", mesh)
        train(model, optimizer, 1)
        job = job_of(tmp_path / "adamw", rank, 2, model, optimizer, background)
        saving.save(job, 1)
        saving.finish_saving(job)

        def full(*args):
            if rank == 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args)

        monkeypatch.setattr(checkpoint, "write_part", full)
        try:
            saving.save(job, 2)
            while saving.progress(job) < (2 if rank == 1 else 1):
                time.sleep(0.01)
            saving.finish_saving(job)
        except OSError as error:
            return [error.errno, os.path.basename(error.filename)]
        return []

    told = in_ranks(tmp_path, 2, work)
    assert told == [[errno.ENOSPC, checkpoint_name(2)]] * 2
    folder = tmp_path / "adamw" / "checkpoints"
    assert os.listdir(folder) == [checkpoint_name(1)]
    (whole_one,) = folder.iterdir()
    assert not find_damage(whole_one)
    part = whole_one / part_name(1, 2)
    part.write_bytes(part.read_bytes()[:-1])
    assert part.name in find_damage(whole_one)
    part.unlink()
    assert newest_complete(folder) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rank"), [("save_settings", 0), ("save_weights", 1), ("finish_checkpoint", 0)]
)
def test_late_save_failure_is_raised_on_every_rank(name, rank, tmp_path, monkeypatch) -> None:
    def work(mine, mesh):
        model, optimizer = build("adamw", mesh)
        job = job_of(tmp_path, mine, 2, model, optimizer, True)

        def full(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        if mine == rank:
            monkeypatch.setattr(saving, name, full)
        saving.save(job, 1, exports=True)
        with pytest.raises(OSError, match="No space left"):
            saving.finish_saving(job)
        return os.listdir(job.paths.checkpoints) if mine == 0 else []

    assert in_ranks(tmp_path, 2, work) == [[], []]


@pytest.mark.slow
def test_kill_during_saving_keeps_the_last_complete_checkpoint(tmp_path) -> None:
    """Twenty times: the weights of step n are all n."""
    chance, last = random.Random(0), 0
    folder = tmp_path / "adamw" / "checkpoints"

    def work(rank, mesh):
        model, optimizer = build("adamw", mesh)
        job = job_of(tmp_path / "adamw", rank, 2, model, optimizer, True)
        for number in range(last + 1, last + 1000):
            with torch.no_grad():
                for p in model.parameters():
                    p.fill_(number)
            saving.save(job, number)
            saving.await_copy(job)

    for _ in range(20):
        pids, _ = start_ranks(tmp_path, 2, work)
        begun = time.monotonic()
        while not list(folder.glob(f"step-*{last + 1}")) and time.monotonic() < begun + 60:
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.2))
        os.kill(pids.pop(chance.randrange(2)), signal.SIGKILL)
        os.kill(pids.pop(), signal.SIGKILL)
        found = newest_complete(folder)
        assert found is not None
        assert int(found.name[-8:]) > last
        last = int(found.name[-8:])
        parts = PartFiles(found)
        weights = [n for n in parts.names if n.endswith("weight")]
        assert all(bool((parts.read(name) == last).all()) for name in weights)


@pytest.mark.slow
def test_only_one_replica_writes(tmp_path) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    def work(rank, mesh):
        model, optimizer = build(
            "adamw", init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))
        )
        train(model, optimizer, 2)
        job = job_of(tmp_path, rank, 4, model, optimizer, True)
        torch.manual_seed(rank)
        saving.save(job, 2)
        saving.finish_saving(job)
        checkpoint.load_model(tmp_path / "checkpoints" / checkpoint_name(2), model, job.ranks)
        path = newest_complete(tmp_path / "checkpoints")
        torch.manual_seed(9)
        checkpoint.load_checkpoint(path, model, optimizer, None, job.ranks)
        return float(torch.rand(()))

    drawn = in_ranks(tmp_path, 4, work)
    expected = []
    for rank in range(4):
        torch.manual_seed(rank)
        expected.append(float(torch.rand(())))
    assert drawn == expected
    path = newest_complete(tmp_path / "checkpoints")
    assert sorted(p.name for p in path.glob("part-*")) == [part_name(0, 2), part_name(1, 2)]
    model, optimizer = build("adamw")
    load_alone(path, model, optimizer, None)
    other, reference = build("adamw")
    train(other, reference, 2)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


@pytest.mark.slow
def test_planted_pickle_is_not_executed(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "died" not in in_ranks(tmp_path, 2, stage(tmp_path, "adamw", 1, False, True))
    path = newest_complete(tmp_path / "adamw" / "checkpoints")
    for name in ("optimizer.pt", ".metadata", "optimizer-00000-of-00001.pt"):
        with open(path / name, "wb") as file:
            torch.save({"optimizer": Bomb()}, file)
    model, optimizer = build("adamw")
    assert load_alone(path, model, optimizer, None) == 1
    assert not (tmp_path / "exploded").exists()
