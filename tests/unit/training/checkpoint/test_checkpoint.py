"""A checkpoint brings everything back to the last bit, or it is not used."""

import copy
import errno
import json
import os
import pickle
import random
import resource
import shutil
import signal
import warnings

import numpy as np
import pytest
import torch
from saved import load_checkpoint, save_checkpoint
from torch import nn

from eke.common.errors import RunError
from eke.training.checkpoint import (
    CHECKPOINT_FILES,
    EXPORT,
    OPTIMIZER,
    STATE,
    checkpoint_name,
    find_damage,
    newest_complete,
)
from eke.training.distributed.ranks import Ranks
from eke.training.loop.meter import capture_random_state
from eke.training.model.save_model import WEIGHTS

MODEL = f"{EXPORT}/{WEIGHTS}"


def tiny_gpt2(seed=0, vocabulary=11):
    """A whole model of transformers: a tied output projection, buffers, dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=vocabulary, n_embd=4, n_layer=1, n_head=1, n_positions=8, resid_pdrop=0.3,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def make(seed=0):
    model = tiny_gpt2(seed).train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, steps, scaler=None):
    """Losses; every random generator takes part."""
    losses = []
    for _ in range(steps):
        ids = torch.randint(0, 11, (8,)) + int(np.random.randint(0, 1)) + random.randint(0, 0)
        noise = 1 + 0.1 * (random.random() + float(np.random.random()) + float(torch.rand(())))
        loss = nn.functional.cross_entropy(model(ids[None]).logits[0], ids) * noise
        if scaler:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture
def saved(tmp_path):
    """A trained model and optimizer, and their checkpoint after step 3."""
    model, optimizer = make()
    train(model, optimizer, 3)
    return model, optimizer, save_checkpoint(tmp_path, 3, model, optimizer, None, keep=2)


def test_resumed_training_is_bit_exact(tmp_path) -> None:
    """With other optimizers: ../loop/test_optimizer_checkpoints.py."""
    seed_all(5)
    model, optimizer = make()
    train(model, optimizer, 3)
    save_checkpoint(tmp_path, 3, model, optimizer, None, keep=2)
    undisturbed = train(model, optimizer, 4)
    seed_all(99)
    other, other_optimizer = make(seed=1)
    path = newest_complete(tmp_path)
    assert load_checkpoint(path, other, other_optimizer, None) == 3
    assert train(other, other_optimizer, 4) == undisturbed


def test_each_rank_restores_its_random_state(tmp_path) -> None:
    model, optimizer = make()
    states, expected = [], []
    for seed in (1, 2):
        seed_all(seed)
        states.append(capture_random_state())
        expected.append(torch.rand(3).tolist())
    path = save_checkpoint(tmp_path, 1, model, optimizer, None, keep=1, random_states=states)
    for rank in (0, 1):
        load_checkpoint(path, model, optimizer, None, Ranks(rank, 2))
        assert torch.rand(3).tolist() == expected[rank]


def test_cached_gaussian_is_restored(tmp_path) -> None:
    seed_all(3)
    random.gauss(0, 1)
    np.random.normal()
    model, optimizer = make()
    path = save_checkpoint(tmp_path, 1, model, optimizer, None, keep=1)
    expected = random.gauss(0, 1), float(np.random.normal())
    seed_all(4)
    load_checkpoint(path, model, optimizer, None)
    assert (random.gauss(0, 1), float(np.random.normal())) == expected


def test_loss_scale_is_restored(tmp_path) -> None:
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    train(model, optimizer, 3, scaler)
    path = save_checkpoint(tmp_path, 3, model, optimizer, scaler, keep=1)
    fresh = torch.amp.GradScaler("cpu")
    other, other_optimizer = make(seed=1)
    load_checkpoint(path, other, other_optimizer, fresh)
    assert fresh.state_dict() == scaler.state_dict()
    assert fresh.get_scale() == 16.0


def test_tied_weights_stay_tied(saved) -> None:
    *_, path = saved
    model, optimizer = make(seed=1)
    load_checkpoint(path, model, optimizer, None)
    assert model.lm_head.weight is model.transformer.wte.weight
    from safetensors.torch import load_file

    shape = tuple(model.lm_head.weight.shape)
    assert [tuple(t.shape) for t in load_file(path / MODEL).values()].count(shape) == 1


def test_saving_keeps_random_states(tmp_path) -> None:
    model, optimizer = make()
    seed_all(7)
    expected = random.random(), float(np.random.random()), torch.rand(1).item()
    seed_all(7)
    save_checkpoint(tmp_path, 1, model, optimizer, None, keep=1)
    assert (random.random(), float(np.random.random()), torch.rand(1).item()) == expected


def test_only_the_newest_checkpoints_are_kept(tmp_path) -> None:
    model, optimizer = make()
    (tmp_path / ".step-00000009.1.tmp").mkdir()
    for step in (2, 4, 10, 100):
        save_checkpoint(tmp_path, step, model, optimizer, None, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["step-00000010", "step-00000100"]
    assert newest_complete(tmp_path).name == checkpoint_name(100)


@pytest.mark.parametrize("keep", [1, 2])
def test_damaged_checkpoints_do_not_displace_usable_checkpoints(keep, tmp_path) -> None:
    model, optimizer = make()
    for step in (100, 110)[:keep]:
        cut(MODEL)(save_checkpoint(tmp_path, step, model, optimizer, None, keep))
    for step in (20, 40, 60):
        path = save_checkpoint(tmp_path, step, model, optimizer, None, keep)
        assert newest_complete(tmp_path) == path
    kept = sorted(tmp_path.glob("step-000000*"))
    assert [each.name for each in kept] == [checkpoint_name(n) for n in (40, 60)[-keep:]]


def test_second_save_of_a_step_replaces_the_first(tmp_path) -> None:
    model, optimizer = make()
    save_checkpoint(tmp_path, 5, model, optimizer, None, keep=2)
    train(model, optimizer, 1)
    path = save_checkpoint(tmp_path, 5, model, optimizer, None, keep=2)
    other, other_optimizer = make(seed=1)
    load_checkpoint(path, other, other_optimizer, None)
    assert torch.equal(other.lm_head.weight, model.lm_head.weight)
    assert os.listdir(tmp_path) == [path.name]


def test_missing_checkpoint_is_none(tmp_path) -> None:
    assert newest_complete(tmp_path / "nowhere") is None
    assert newest_complete(tmp_path) is None
    (tmp_path / ".step-00000003.77.tmp").mkdir()
    assert newest_complete(tmp_path) is None, "an unfinished one"


def cut(name, size=-10):
    return lambda path: (path / name).write_bytes((path / name).read_bytes()[:size])


def flip(name):
    def damage(path):
        content = bytearray((path / name).read_bytes())
        content[len(content) // 2] ^= 1
        (path / name).write_bytes(bytes(content))

    return damage


def rewrite_manifest(change):
    def damage(path):
        manifest = json.loads((path / CHECKPOINT_FILES).read_text())
        (path / CHECKPOINT_FILES).write_text(json.dumps(change(manifest)))

    return damage


FILES = (MODEL, OPTIMIZER, STATE)
DAMAGE = {
    **{f"{name} cut": cut(name) for name in (*FILES, CHECKPOINT_FILES)},
    **{f"{name} with a flipped bit": flip(name) for name in FILES},
    **{f"{name} missing": lambda path, name=name: (path / name).unlink() for name in FILES},
    "no manifest": lambda path: (path / CHECKPOINT_FILES).unlink(),
    "empty manifest": rewrite_manifest(lambda _: {}),
    "manifest of other files": rewrite_manifest(lambda m: {MODEL: m[MODEL]}),
    "manifest is a list": rewrite_manifest(lambda _: [1]),
    "manifest without checksums": rewrite_manifest(lambda m: dict.fromkeys(m, 5)),
    "a file and no folder": lambda path: (shutil.rmtree(path), path.touch()),
    "empty": lambda path: (shutil.rmtree(path), path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_checkpoint_is_skipped_with_a_warning(damage, saved, tmp_path, caplog) -> None:
    model, optimizer, older = saved
    newest = save_checkpoint(tmp_path, 6, model, optimizer, None, keep=2)
    assert newest_complete(tmp_path) == newest
    damage(newest)
    assert find_damage(newest)
    assert newest_complete(tmp_path) == older
    assert f"skipping checkpoint {newest.name}" in caplog.text
    assert save_checkpoint(tmp_path, 6, model, optimizer, None, keep=2) == newest
    assert newest_complete(tmp_path) == newest, "a new one takes the name of the damaged one"


def test_export_excludes_training_state(saved) -> None:
    """An export is loaded, copied and uploaded as it is: no optimizer, which is twice its size."""
    *_, path = saved
    exported = {file.name for file in (path / EXPORT).iterdir()}
    assert exported == {"config.json", "generation_config.json", WEIGHTS}
    assert {file.name for file in path.iterdir()} == {EXPORT, OPTIMIZER, STATE, CHECKPOINT_FILES}
    (path / "notes.txt").write_text("mine")
    assert find_damage(path) == "", "a file beside the others does no harm"


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


def test_loading_executes_no_code(saved, tmp_path, monkeypatch) -> None:
    """A pickle in optimizer.pt that would run a command, with a manifest that vouches for it."""
    model, optimizer, path = saved
    monkeypatch.chdir(tmp_path)
    torch.save({"optimizer": Bomb()}, path / OPTIMIZER)
    with pytest.raises(pickle.UnpicklingError):
        load_checkpoint(path, model, optimizer, None)
    assert not (tmp_path / "exploded").exists()
    torch.load(path / OPTIMIZER, weights_only=False)
    assert (tmp_path / "exploded").exists(), "the bomb would have worked"


def test_checkpoint_of_another_model_is_rejected(saved) -> None:
    _, optimizer, path = saved
    with pytest.raises(RunError, match=r"\[11, 4\], the model's is .*\[13, 4\]"):
        load_checkpoint(path, tiny_gpt2(vocabulary=13), optimizer, None)


def in_a_fork(work) -> int:
    """The exit code of a process that does this alone: a new one would import for ten seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: other threads, if any
        pid = os.fork()
    if not pid:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("limit", [-100, 100], ids=["weights", "optimizer"])
def test_full_disk_keeps_only_the_earlier_checkpoint(limit, tmp_path) -> None:
    """The libraries hide the system's error, or lose it; it must reach the user as what it is."""
    folder, told = tmp_path / "checkpoints", tmp_path / "told"
    model, optimizer = make()
    first = save_checkpoint(folder, 1, model, optimizer, None, keep=2)
    train(model, optimizer, 1)  # not in a fork, which autograd may refuse after other tests
    size = (first / MODEL).stat().st_size
    assert size < (first / OPTIMIZER).stat().st_size

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + limit, resource.RLIM_INFINITY))
        try:
            save_checkpoint(folder, 2, model, optimizer, None, keep=2)
        except OSError as error:
            told.write_text(f"{error.errno} {error.filename}")

    assert in_a_fork(work) == 0
    assert told.read_text() == f"{errno.EFBIG} {folder / checkpoint_name(2)}"
    assert os.listdir(folder) == [checkpoint_name(1)]
    assert newest_complete(folder) is not None


def test_unrelated_error_is_not_converted(tmp_path, monkeypatch) -> None:
    model, optimizer = make()

    def broken(*_):
        raise ValueError("not the disk")

    monkeypatch.setattr(torch, "save", broken)
    with pytest.raises(ValueError, match="not the disk"):
        save_checkpoint(tmp_path, 1, model, optimizer, None, keep=1)
    assert os.listdir(tmp_path) == []


def test_kill_while_saving_leaves_no_partial_checkpoint(tmp_path, monkeypatch) -> None:
    model, optimizer = make()

    def work() -> None:
        import eke.training.checkpoint as module

        monkeypatch.setattr(module, "write_json", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        save_checkpoint(tmp_path, 1, model, optimizer, None, keep=2)

    assert in_a_fork(work) == -signal.SIGKILL
    assert newest_complete(tmp_path) is None
    assert list(tmp_path.glob(".step-*"))
    assert not list(tmp_path.glob("step-*"))
    save_checkpoint(tmp_path, 1, model, optimizer, None, keep=2)
    assert os.listdir(tmp_path) == [checkpoint_name(1)], "what the kill left is swept up"


def test_loaded_states_are_not_shared(saved) -> None:
    """Loading copies: training on does not change what another model loaded."""
    *_, path = saved
    first, second = make(seed=1), make(seed=2)
    load_checkpoint(path, *first, None)
    load_checkpoint(path, *second, None)
    before = copy.deepcopy(second[0].state_dict())
    train(*first, 2)
    after = second[0].state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
