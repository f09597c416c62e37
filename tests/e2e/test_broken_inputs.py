"""Broken inputs of docs/how-to/data.md: one clear message each, nothing half-written.

Typed through the whole of eke; finer cases of each kind are in tests/unit/data/preparation and
tests/unit/models/checkpoints.
"""

import gzip
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import make_tokenizer, save_checkpoint
from live import run_in
from support import REPO, environment

from eke import workflows

ROWS = b"".join(b'{"text": "row %d", "label": %d}\n' % (n, n % 2) for n in range(40))
CLASSES = ("task=sequence_classification", "model=tiny_bert")


def jsonl(content: bytes) -> Callable[[Path], None]:
    """Writes my.jsonl."""
    return lambda folder: (folder / "my.jsonl").write_bytes(content) and None


def mixed(folder: Path) -> None:
    lines = [json.dumps({"text": f"row {n}" if n % 2 else n}) for n in range(40)]
    (folder / "my.jsonl").write_text("\n".join(lines))


def cut_gzip(folder: Path) -> None:
    (folder / "my.jsonl.gz").write_bytes(gzip.compress(ROWS + os.urandom(2000))[:-500])


def large_tokenizer(folder: Path) -> None:
    jsonl(ROWS)(folder)
    make_tokenizer().save_pretrained(folder / "tokenizer")


def other_architecture(folder: Path) -> None:
    save_checkpoint(folder / "model", "llama")
    path = folder / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "bert"}))


def cut_weights(folder: Path) -> None:
    save_checkpoint(folder / "model", "llama")
    path = folder / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


JSONL = ("data=jsonl", "data.path={tmp}/my.jsonl")
CHECKPOINT = ("model=pretrained", "model.name_or_path={tmp}/model")

BROKEN = {
    "empty file": (jsonl(b""), JSONL, "is empty", "data.path="),
    "wrong column": (jsonl(ROWS), (*JSONL, "data.text=txt"), "data.text = txt", "data.text=text"),
    "mixed types": (mixed, JSONL, "is the number 0, not text", "data.max_bad_frac=0.5"),
    "invalid UTF-8": (
        jsonl(ROWS + b'{"text": "\xff"}\n' * 9), JSONL, "not UTF-8", "data.max_bad_frac=",
    ),
    "cut gzip": (
        cut_gzip, ("data=jsonl", "data.path={tmp}/my.jsonl.gz"), "Compressed file ended before",
        "data.path=",
    ),
    "label out of range": (
        jsonl(ROWS.replace(b'"label": 1', b'"label": 7')), (*JSONL, *CLASSES), "label",
        "task.num_labels=8",
    ),
    "tokenizer larger than the vocabulary": (
        large_tokenizer,
        (*JSONL, "data.tokenizer={tmp}/tokenizer", "model.vocab_size=290"),
        "model.vocab_size = 290", "model.vocab_size=300",
    ),
    "checkpoint of another architecture": (
        other_architecture, CHECKPOINT, "model.name_or_path = ", "the config.json that was saved",
    ),
    "checkpoint for another task": (
        lambda folder: save_checkpoint(folder / "model", "llama") and None,
        (*CHECKPOINT, "task=masked_lm"), "task = masked_lm", "task=causal_lm",
    ),
    "cut weights": (cut_weights, CHECKPOINT, "model.name_or_path = ", "model.name_or_path="),
    "no such model": (
        lambda _: None, ("model=pretrained", "model.name_or_path=owner/name"),
        "the hub cannot be reached", "model.name_or_path=LOCAL_FOLDER",
    ),
    "no such data set": (
        lambda _: None, ("data=hub", "data.name=owner/name"),
        "data.name = owner/name", "data=jsonl",
    ),
}  # fmt: skip


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of its own; the run's folder is the working directory."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setenv("PYTHONPATH", str(REPO / "src"))
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", BROKEN)
def test_broken_input_prints_one_message(case, tmp_path, cache, capfd) -> None:
    make, typed, phrase, fix = BROKEN[case]
    make(tmp_path)
    code = workflows.main([*(word.format(tmp=tmp_path) for word in typed), "tracker=none"])
    said = capfd.readouterr()
    assert code == 2, said
    assert said.err.count("1 problem in this configuration") == 1, said.err
    assert "Traceback" not in said.err
    assert phrase in " ".join(said.err.split())  # wrapped
    assert f"-> {fix}" in said.err
    assert not (tmp_path / "runs").exists()
    assert_no_half_store(cache)


def assert_no_half_store(cache: Path) -> None:
    """What lies in the cache is whole, or a lock."""
    for store in (cache / "eke" / "data").glob("*"):
        assert store.name.endswith(".lock") or (store / "manifest.json").exists(), store


def test_read_only_run_folder_is_reported(tmp_path, cache, capfd, monkeypatch) -> None:
    """Tests may run as root, who may write everywhere: the system's answer is replaced."""
    jsonl(ROWS)(tmp_path)
    writable = os.access
    monkeypatch.setattr(
        os, "access",
        lambda p, mode, **k: not (mode & os.W_OK and str(p) == str(tmp_path)) and writable(p, mode),
    )  # fmt: skip
    code = workflows.main([*(word.format(tmp=tmp_path) for word in JSONL), "tracker=none"])
    said = capfd.readouterr().err
    assert code == 2, said
    assert "paths.runs = runs" in said
    assert not (tmp_path / "runs").exists()


def test_read_only_cache_is_tolerated(tmp_path, cache, capfd) -> None:
    """A file stands where the folder should be: nobody can write below it, root neither."""
    jsonl(ROWS)(tmp_path)
    cache.write_text("")
    code = workflows.main([*(word.format(tmp=tmp_path) for word in JSONL), "tracker=none"])
    said = capfd.readouterr().err
    assert code == 2, said
    assert "XDG_CACHE_HOME" in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_full_disk_during_preparation_is_reported(tmp_path, cache) -> None:
    """The limit on file sizes stands for the disk; once there is space the same command works."""
    jsonl(ROWS * 200)(tmp_path)
    command = [
        sys.executable, str(REPO / "train.py"), *(word.format(tmp=tmp_path) for word in JSONL),
        "plan_only=true",
    ]  # fmt: skip

    def full() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    surroundings = {**environment(tmp_path), "XDG_CACHE_HOME": str(cache)}
    torn = {"PYTHONDONTWRITEBYTECODE": "1"}  # Python 3.11 leaves its own files so, for all
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=surroundings | torn,
        preexec_fn=full,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "XDG_CACHE_HOME" in done.stderr
    assert_no_half_store(cache)
    again = run_in(tmp_path, command, XDG_CACHE_HOME=str(cache))
    assert again.code == 0, again.err
