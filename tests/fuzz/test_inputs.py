"""Damaged data files, checkpoints, commands and options: an answer or a refusal."""

import json
import shutil
from random import Random

import pyarrow
import pyarrow.parquet
import pytest
from chat_templates import FAMILIES, saved
from checkpoints import save_checkpoint
from fuzz.mutations import COUNT, SEED, VALUES, case, damage
from unit.plan.cases import config_of

from eke.cli import main
from eke.common.errors import EkeError
from eke.config.compose.catalogue import make_catalogue
from eke.data.preparation.rows import prepare_store
from eke.data.sources import request_of


def draws(what: str, few: int):
    return [(number, Random(f"{SEED} {what} {number}")) for number in range(COUNT or few)]


@pytest.fixture
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    saved(FAMILIES["llama 3.1"], folder)
    return folder


def test_no_damaged_data_file_ends_in_a_traceback(tokenizer, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    turns = [{"role": "user", "content": "a fox?"}, {"role": "assistant", "content": "no"}]
    rows = [
        {"text": f"row {n}", "label": n % 2, "messages": turns, "n": [n], "x": None}
        for n in range(30)
    ]
    for number, rng in draws("data", 10):
        option = rng.choice(["jsonl", "csv", "parquet", "chat"])
        ending = rng.choice(["jsonl", "parquet"]) if option == "chat" else option
        file = tmp_path / f"rows.{ending}"
        if ending == "parquet":
            table = pyarrow.Table.from_pylist(rows)
            pyarrow.parquet.write_table(table, file, row_group_size=rng.choice([7, 30]))
        elif ending == "csv":
            file.write_text("text,label\n" + "".join(f"{r['text']},{r['label']}\n" for r in rows))
        else:
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        if ending == "jsonl" and rng.random() < 0.5:
            bad = {rng.choice(list(rows[0])): rng.choice(VALUES) for _ in range(2)}
            file.write_text(file.read_text() + (json.dumps({**rows[0], **bad}) + "\n") * 3)
            how = f"rows {str(bad)[:200]}"
        else:
            how = damage(rng, file)
        typed = [f"data={option}", f"data.path={file}", "data.seq_len=64"]
        typed += [f"data.tokenizer={tokenizer}"] if option == "chat" else []
        with case(f"data {number}: {file.name} of data={option} became {how}"):
            try:
                request = request_of(config_of(*typed))
                assert request is not None
                prepare_store(request)
            except (EkeError, OSError):
                pass
        shutil.rmtree(file) if file.is_dir() and not file.is_symlink() else file.unlink(
            missing_ok=True
        )


def test_no_damaged_checkpoint_ends_in_a_traceback(tokenizer, tmp_path, capsys) -> None:
    whole = tmp_path / "whole"
    save_checkpoint(whole, "llama", tokenizer=False)
    saved(FAMILIES["llama 3.1"], whole)
    names = sorted(path.name for path in whole.iterdir())
    for number, rng in draws("checkpoint", 2):
        folder = tmp_path / "checkpoint"
        shutil.copytree(whole, folder)
        file = folder / rng.choice(names)
        with case(f"checkpoint {number}: {file.name} became {damage(rng, file)}"):
            code = main(["generate", str(folder), "hello", "--max-new-tokens", "2"])
            assert code in (0, 1, 2)
            assert "Traceback" not in capsys.readouterr().err
        shutil.rmtree(folder)


WORDS = [
    "[", "]", "{", "}", "(", ",", "=", "+", "~", "'", '"', "\\", "${x}", "${oc.env:HOME}", "\udcff",
    "\n", "*", "null", "1e999", "-1", "true", "a.b", "???", "@", ":", "range(1,3)", "inf",
    "choice(1,2)", "nan", "0x1", "1_0", "é", " ", "tiny", "data", "model",
]  # fmt: skip


def test_no_command_ends_in_a_traceback(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    keys = list(make_catalogue().keys)
    for number, rng in draws("command", 20):
        typed = []
        for _ in range(rng.randint(1, 3)):
            value = "".join(rng.choice(WORDS) for _ in range(rng.randint(0, 4)))
            key = rng.choice(keys) if rng.random() < 0.8 else rng.choice(WORDS)
            sign = rng.choice(["", "", "", "+", "++", "~", "-"])
            typed.append(f"{sign}{key}{rng.choice(['=', '=', ''])}{value}")
        command = rng.choice(
            ["plan", "plan", "report", "status", "logs", "evaluate", "export", "data"]
        )
        first = ["--quick", "hardware=cpu", "model=tiny"] if command == "plan" else []
        with case(f"command {number}: {command} {typed}"):
            try:
                code = main([command, *first, *typed])
            except SystemExit as left:
                code = left.code
            assert code in (0, 1, 2), code
            assert "Traceback" not in capsys.readouterr().err


EXPERIMENT = """\
# @package _global_
defaults:
  - override /optimizer: sgd
  - _self_
train:
  steps: 3
optimizer:
  lr: 0.1
"""


def test_no_option_file_ends_in_a_traceback(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for number, rng in draws("option", 5):
        folder = tmp_path / "conf" / "experiment"
        folder.mkdir(parents=True)
        file = folder / "mine.yaml"
        file.write_text(EXPERIMENT)
        how = damage(rng, file)
        if (
            rng.random() < 0.5
            and file.is_file()
            and not file.is_symlink()
            and file.stat().st_size < 1 << 20
        ):
            lines = EXPERIMENT.splitlines()
            for _ in range(rng.randint(1, 2)):
                lines[rng.randrange(len(lines))] += rng.choice(
                    ["  ", ": ", "\t", "&a *a", "- x", "!!python/object:os.x {}", "[", "? "]
                ) + rng.choice(WORDS)
            file.write_text("\n".join(lines), errors="backslashreplace")
            how = repr(lines)
        with case(f"option {number}: {how}"):
            try:
                code = main(
                    [
                        "plan",
                        "--quick",
                        "hardware=cpu",
                        "model=tiny",
                        "experiment=mine",
                        "--config-dir",
                        "conf",
                    ]
                )
            except SystemExit as left:
                code = left.code
            assert code in (0, 1, 2), code
            assert "Traceback" not in capsys.readouterr().err
        shutil.rmtree(tmp_path / "conf")
