"""`eke export`: what plain libraries load is what was trained; what cannot be exported says why."""

import fcntl
import json
import os
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from trained import record_of
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)

from eke.cli import main
from eke.common.paths import CHECKPOINT_FILES, RunPaths

# peft 0.21 asks by a name that transformers 5.23 has renamed.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)

KINDS = {
    "full": ("data=chat",),
    "lora": ("data=chat", "peft=lora", "precision=bf16"),
    "qlora": ("data=chat", "peft=qlora", "precision=bf16"),
    "classes": ("data=jsonl", "peft=lora", "task=sequence_classification", "precision=fp32"),
    "random": ("data=synthetic", "peft=lora", "model=tiny", "model.hidden_size=32",
               "model.num_attention_heads=2", "model.intermediate_size=64"),
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(run_folder, chat_base, train_kind):
    """Kind -> the job of a finished run with an id of the same name."""
    GenerationConfig(eos_token_id=2, pad_token_id=0).save_pretrained(run_folder / "base")
    return lambda kind: train_kind(kind, *KINDS[kind])


@pytest.fixture
def export(trained, capsys):
    """Kind and arguments -> exit code, output, errors."""

    def run(kind, *words):
        trained(kind)
        code = main(["export", kind, *map(str, words)])
        return code, *capsys.readouterr()

    return run


def names_in(folder):
    return {path.name for path in folder.iterdir()}


HELD = []
"""Descriptors of locked files."""
TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
IDS = torch.arange(5, 17).reshape(1, 12)


@torch.no_grad()
def logits(model):
    return model.eval()(IDS).logits


@pytest.mark.slow
def test_exported_model_equals_the_trained_model(trained, export, chat_base, tmp_path) -> None:
    code, out, err = export("full", tmp_path / "out")
    assert (code, err) == (0, "")
    found = names_in(tmp_path / "out")
    weights = {"config.json", "generation_config.json", "model.safetensors", "README.md"}
    assert found == weights | TOKENIZER
    assert f"out: model ({len(found)} files, " in out
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(loaded), logits(trained("full").bare_model))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == chat_base
    assert loaded.generation_config.eos_token_id == [2, tokenizer.sep_token_id]
    card = (tmp_path / "out" / "README.md").read_text()
    record = record_of(trained("full"))
    told = (
        *(
            "base model: base (a folder)",
            "chat rows.jsonl",
            "data.path=rows.jsonl",
            "trained: all weights",
        ),
        *(record.plan["data_fingerprint"], f"{record.loss.eval_final:.5g}", record.run_id),
        f"torch {record.environment['versions']['torch']}",
    )
    for words in told:
        assert words in card


@pytest.mark.slow
def test_exported_adapter_is_loaded_and_merged_by_peft(trained, export, tmp_path) -> None:
    code, out, _ = export("lora", tmp_path / "adapter")
    assert code == 0
    assert "adapter: adapter (" in out
    assert str(Path("base").absolute()) in out
    own = {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    own.add("generation_config.json")  # ends of turn
    assert names_in(tmp_path / "adapter") == own | TOKENIZER
    base = AutoModelForCausalLM.from_pretrained("base", dtype=torch.bfloat16)
    plain = PeftModel.from_pretrained(base, tmp_path / "adapter")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(logits(plain), logits(trained("lora").bare_model))

    (tmp_path / "merged").mkdir()  # an empty one is as good as none
    code, out, _ = export("lora", tmp_path / "merged", "--merge")
    assert code == 0
    assert "merged: " in out
    assert 'library_name: "transformers"' in (tmp_path / "merged" / "README.md").read_text()
    expected = plain.merge_and_unload()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not hasattr(loaded, "peft_config")
    assert torch.equal(logits(loaded), logits(expected))
    saved = load_file(tmp_path / "merged" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    for name, tensor in expected.state_dict().items():
        assert torch.equal(tensor, saved[name]), name
    assert loaded.generation_config.eos_token_id == [2, 4], "the base's own, and the end of turn"
    plain_files = {"config.json", "generation_config.json", "model.safetensors", "README.md"}
    assert names_in(tmp_path / "merged") == plain_files | TOKENIZER


@pytest.mark.slow
def test_4_bit_weights_are_exported_in_16_bits(trained, export, tmp_path) -> None:
    assert export("qlora", tmp_path / "out", "--merge")[0] == 0
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        mine = logits(trained("qlora").bare_model)
    torch.testing.assert_close(logits(loaded), mine.float(), rtol=0.05, atol=0.05)


@pytest.mark.slow
def test_merged_classifier_keeps_head_and_names(trained, export, tmp_path) -> None:
    assert export("classes", tmp_path / "out", "--merge")[0] == 0
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(loaded), logits(trained("classes").bare_model))
    assert loaded.config.id2label == {0: "n", 1: "y"}


@pytest.mark.slow
def test_random_base_weights_are_regenerated(trained, export, tmp_path) -> None:
    assert "--merge" in export("random", tmp_path / "alone")[1]
    assert export("random", tmp_path / "out", "--merge")[0] == 0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(loaded), logits(trained("random").bare_model))


@pytest.mark.slow
def test_missing_class_names_are_warned_about(trained, export, tmp_path, monkeypatch) -> None:
    trained("classes")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    shutil.move("rows.jsonl", "elsewhere.jsonl")
    try:
        code, out, _ = export("classes", tmp_path / "out", "--merge")
    finally:
        shutil.move("elsewhere.jsonl", "rows.jsonl")
    assert code == 0
    assert "class names: " in out


def test_merge_without_adapters_warns(export, tmp_path) -> None:
    code, out, _ = export("full", tmp_path / "out", "--merge")
    assert code == 0
    assert "warning: --merge " in out


@pytest.mark.parametrize(
    ("kind", "change", "words", "expected"),
    [
        pytest.param("full", lambda run, out: (out.mkdir(), (out / "a").touch()), "",
                     "is a folder with files", id="not empty"),
        pytest.param("full", lambda run, out: out.touch(), "", "is a file", id="a file"),
        pytest.param("full", lambda run, out: run.record.unlink(), "",
                     "is not finished (no record)", id="no record"),
        pytest.param("full", lambda run, out: (run.record.unlink(), lock(run)), "",
                     "is not finished (running) -> eke status runs/copy", id="running"),
        pytest.param("full", lambda run, out: change_record(run, outcome="preempted"), "",
                     "is not finished (preempted)", id="interrupted"),
        pytest.param("full", lambda run, out: change_record(run, outcome="diverged"), "",
                     "ended as diverged -> eke logs runs/copy", id="diverged"),
        pytest.param("full", lambda run, out: shutil.rmtree(run.checkpoints), "",
                     "train.save_final=true rerun=true", id="no checkpoint"),
        pytest.param("full", lambda run, out: cut(run, "model.safetensors"), "",
                     "is damaged", id="damaged"),
        pytest.param("full", lambda run, out: of(run, "config.json").unlink(), "",
                     "config.json: is missing", id="missing"),
        pytest.param("full", lambda run, out: link(run, "tokenizer.json"), "",
                     "tokenizer.json: is a link", id="a link"),
        pytest.param("full", lambda run, out: listing(run).write_text("[]"), "",
                     "not a readable list", id="no list"),
        pytest.param("lora", lambda run, out: change_plan(run, name="not there"), "--merge",
                     "model.name_or_path = not there there is no", id="no base"),
        pytest.param("lora", lambda run, out: change_plan(run, name="runs"), "--merge",
                     "base model has changed", id="another base"),
        pytest.param("random", lambda run, out: change_plan(run, kind="cuda"), "--merge",
                     "random weights of a GPU", id="random base", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_failed_export_leaves_no_files(
    kind, change, words, expected, trained, tmp_path, capsys
) -> None:
    run = RunPaths(trained(kind).paths.folder.with_name("copy"))
    shutil.copytree(trained(kind).paths.folder, run.folder, symlinks=True)
    out = tmp_path / "out"
    try:
        change(run, out)
        before = sorted(tmp_path.rglob("*"))
        code = main(["export", "runs/copy", str(out), *words.split()])
    finally:
        while HELD:
            os.close(HELD.pop())
        shutil.rmtree(run.folder)
    assert code in (1, 2)
    assert expected in " ".join(capsys.readouterr().err.split())  # wrapped
    assert sorted(tmp_path.rglob("*")) == before


def change_record(run, **values):
    run.record.write_text(json.dumps(json.loads(run.record.read_text()) | values))


def lock(run):
    """As the process that works on a run does."""
    HELD.append(os.open(run.lock, os.O_RDWR | os.O_CREAT))
    fcntl.flock(HELD[-1], fcntl.LOCK_EX)


def change_plan(run, name="", kind=""):
    plan = json.loads(run.plan.read_text())
    if name:
        plan["config"]["model"]["name_or_path"] = name
    plan["device"]["kind"] = kind or "cpu"
    run.plan.write_text(json.dumps(plan))


def of(run, name):
    return run.exported(2) / name


def listing(run):
    return run.exported(2).parent / CHECKPOINT_FILES


def cut(run, name):
    of(run, name).write_bytes(of(run, name).read_bytes()[:-8] + bytes(8))


def link(run, name):
    of(run, name).rename(run.folder / name)
    of(run, name).symlink_to(run.folder / name)


def test_folder_without_run_is_rejected(trained, tmp_path, capsys) -> None:
    assert main(["export", "nothing", str(tmp_path / "out")]) == 2
    assert "eke export runs/ID DIR" in capsys.readouterr().err
    (tmp_path / "sweep.json").touch()
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 2
    assert f"-> eke status {tmp_path}" in capsys.readouterr().err


def test_untrained_random_weights_are_not_merged(export, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(
        "eke.training.model.save_model.warn_random_frozen_weights",
        lambda *_: ["1 tensor left random: x"],
    )
    code, _, err = export("lora", tmp_path / "out", "--merge")
    assert code == 1
    assert err == "error: cannot merge: 1 tensor left random: x. The run did not save them\n"
    assert not any(tmp_path.iterdir())


class FakeHub:
    """An HfApi that writes down what it is asked."""

    asked = ()
    fails_at = ""

    def __getattr__(self, name):
        def ask(*words, **named):
            self.asked.append((name, words, named))
            if name == self.fails_at:
                raise OSError(f"{name} is not possible\nmore lines")
            return type("Commit", (), {"repo_url": "https://huggingface.co/me/mine"})

        return ask


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeHub)
    monkeypatch.setattr(FakeHub, "asked", [])
    return monkeypatch


def test_export_is_pushed_to_the_hub(hub, export, tmp_path) -> None:
    code, out, _ = export("lora", tmp_path / "out", "--push", "me/mine")
    assert code == 0
    assert [name for name, _, _ in FakeHub.asked] == ["whoami", "create_repo", "upload_folder"]
    assert FakeHub.asked[1][1:] == (("me/mine",), {"private": True, "exist_ok": True})
    assert FakeHub.asked[2][2] == {"repo_id": "me/mine", "folder_path": tmp_path / "out"}
    assert out.endswith("https://huggingface.co/me/mine\n")


@pytest.mark.parametrize(
    ("name", "fails_at", "expected"),
    [
        ("me/mine", "whoami", "--push me/mine: whoami is not possible\n  -> hf auth login"),
        ("me//mine", "", "\n  -> --push OWNER/NAME\n"),
        ("me/mine", "create_repo", "create_repo is not possible\n  -> hf upload me/mine "),
        ("me/mine", "upload_folder", "upload_folder is not possible\n  -> hf upload me/mine "),
    ],
)
def test_hub_rejection_is_one_message(name, fails_at, expected, hub, export, tmp_path) -> None:
    hub.setattr(FakeHub, "fails_at", fails_at)
    code, _, err = export("lora", tmp_path / "out", "--push", name)
    assert code == 1
    assert expected in err
    sent_too_late = fails_at in ("create_repo", "upload_folder")
    assert (tmp_path / "out").exists() is sent_too_late


def test_push_without_token_writes_no_files(export, tmp_path, monkeypatch) -> None:
    """The hub's own client, which has no connection here."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, _, err = export("lora", tmp_path / "out", "--push", "me/mine")
    assert code == 1
    assert "-> hf auth login" in err
    assert not any(tmp_path.iterdir())
