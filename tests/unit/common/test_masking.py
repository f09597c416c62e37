"""What counts as a secret, and where it is not written."""

import json
import os
import stat
import time

import pytest
from unit.plan.record.samples import bare_record

from eke import workflows
from eke.common.errors import ConfigError, EkeError, Problem
from eke.common.masking import is_secret, mask, masked
from eke.common.paths import RunPaths
from eke.config.compose import compose, split_arguments
from eke.config.schema import Tracker
from eke.launch.processes.sweep import SweepFile, SweepRun, sweep_paths
from eke.results.trackers.tracker import tracked_run

SECRETS = [
    "export WANDB_API_KEY=Zq9", 'export HF_TOKEN="Zq9 x"', "a=1 HF_TOKEN=Zq9", "apiKey=Zq9",
    "PGPASSWORD=Zq9", "GH_TOKEN_2=Zq9", "setenv HF_TOKEN Zq9", "hf login --token Zq9",
    "hf login --token=Zq9", "HF_TOKEN=${HF_TOKEN:-Zq9}", "slurm.options.export='ALL,X_SECRET=Zq9'",
    "tracker.uri=https://me:Zq9@host/x", "tracker.uri=https://Zq9@host", "http_proxy=http://u:Zq9@p:1",
    "git clone https://Zq9@github.com/a", "ssh://u:Zq9@host", "https://h/?token=Zq9&x=1",
    "https://h/?x=1&api_key=Zq9", "https://h?key=Zq9", "https://h/a?X-Amz-Signature=Zq9",
    "https://h/a?se=1&sig=Zq9", "trainer.extra.hub_token=Zq9",
    "+trainer.extra.hub_token=Zq9", "trainer.extra={hub_token: Zq9}", '{"hub_token":"Zq9", "a": 1}',
    "hydra.job.env_set.WANDB_API_KEY=Zq9", "trainer.extra.hub_token = Zq9", "DB_PASSWORD=123Zq9",
    "export HF_TOKEN+=Zq9", "${HF_TOKEN:-Zq9}", "${HF_TOKEN:=Zq9}", "X-Api-Key=Zq9",
    'curl -H "Authorization: Bearer Zq9" https://h', "Authorization: Basic Zq9",
    "curl -H 'X-Token: Zq9'", "Proxy-Authorization: Digest a Zq9",
    "export OTEL_EXPORTER_OTLP_HEADERS=Authorization=Bearer%20Zq9",
    "{'Authorization': 'token Zq9'}", "headers.authorization='Bearer Zq9'", "authorization=Zq9",
]  # fmt: skip

OTHERS = [
    "export TOKENIZERS_PARALLELISM=false", "data.tokenizer=gpt2", "data.max_token=100,200",
    "export HF_TOKEN=$(cat ~/.t)", 'export HF_TOKEN="$(cat ~/.t)"', "HF_TOKEN=$OTHER", "HF_TOKEN=",
    "tracker.group=${oc.env:USER}", "no API key: neither WANDB_API_KEY nor a netrc file has one",
    "KEY=VALUE", "key path = value", "ssh://git@github.com/x", "git@github.com:a/b", "monkey=3",
    "sqlite:////a/b@c/mlflow.db", "http://host:5000/a@b", "include_tokens_per_second=true",
    "export WANDB_API_KEY=...; for", "authorization is needed", "needs authorization: ",
    "s3://bucket/key", "https://***@host", "model.eos_token_id=5",
]  # fmt: skip


def test_only_secrets_are_masked() -> None:
    for text in SECRETS:
        assert "Zq9" not in mask(text), text
        assert "***" in mask(text), text
        assert mask(mask(text)) == mask(text), text
    assert [mask(text) for text in OTHERS] == OTHERS


def test_secret_keys_are_recognized_by_their_last_word() -> None:
    assert all(map(is_secret, ("HF_TOKEN", "hub_token", "AWS_SECRET_ACCESS_KEY", "a.b.password")))
    assert not any(
        map(is_secret, ("TOKENIZERS_PARALLELISM", "tokenizer", "KEYS", "max_token", "key"))
    )
    assert masked({"hub_token": "a b", "n": [3, "X_KEY=1"]}) == {
        "hub_token": "***",
        "n": [3, "X_KEY=***"],
    }


@pytest.mark.parametrize("text", ["a." * 40_000, "token" * 20_000, "-" * 60_000, '"' * 60_000])
def test_masking_is_fast(text: str) -> None:
    began = time.perf_counter()
    mask(text)
    assert time.perf_counter() - began < 2


@pytest.mark.parametrize(
    "typed",
    ["slurm.setup=[export WANDB_API_KEY=Zq9]", "trainer.extra.hub_token=Zq9 x",
     "tracker.uri=https://Zq9@host", "slurm.options={export: 'HF_TOKEN=Zq9'}", "--api-key=Zq9"],
)  # fmt: skip
def test_secret_on_the_command_line_is_rejected_before_writing(
    typed, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["-m"] if "slurm" in typed else []
    assert workflows.main([*flags, "experiment=smoke", "hardware=cpu", "seed=1", typed]) == 2
    told = capsys.readouterr()
    assert "Zq9" not in told.err + told.out
    assert "***" in told.err
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("where", "name"),
    [("typed", "AWS_SECRET_ACCESS_KEY"), ("typed", "DATABASE_URL"), ("file", "HF_TOKEN")],
)
def test_secrets_in_interpolated_variables_are_rejected(where, name, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(name, "https://me:Zq9@host")
    value = f"${{oc.env:{name}}}"
    file = tmp_path / "experiment" / "mine.yaml"
    file.parent.mkdir()
    file.write_text(f"# @package _global_\ntracker:\n  group: {value}\n")
    words = ["experiment=mine"] if where == "file" else [f"tracker.group={value}"]
    with pytest.raises(ConfigError) as caught:
        compose(words, tmp_path)
    assert "Zq9" not in str(caught.value)
    assert "secret" in str(caught.value)


def test_other_variables_are_not_masked(monkeypatch) -> None:
    monkeypatch.setenv("TEAM", "ours")
    assert compose(["tracker.group=${oc.env:TEAM}"]).config.tracker.group == "ours"
    assert compose(["tracker.group=${oc.env:NO_SUCH,x}"]).config.tracker.group == "x"
    split_arguments(["slurm.setup=['export HF_TOKEN=$(cat ~/t)', 'export OMP_NUM_THREADS=4']"])


def test_secrets_are_masked_in_sweep_files_and_errors(tmp_path) -> None:
    paths = sweep_paths(str(tmp_path / "runs"), "1")
    cell = SweepRun(("trainer.extra.hub_token=Zq9",), reason="X_TOKEN=Zq9")
    SweepFile(paths, ["-m", "slurm.setup=[export X_KEY=Zq9]"], [cell]).flush()
    assert "Zq9" not in paths.sweep.read_text()
    assert json.loads(paths.sweep.read_text())["cells"][0]["overrides"] == [
        "trainer.extra.hub_token=***"
    ]
    problem = Problem("trainer.extra.hub_token", "Zq9", "https://Zq9@host", "X_TOKEN=Zq9")
    for text in (
        str(ConfigError(problem)),
        ConfigError(problem).short(),
        str(EkeError("T_KEY=Zq9")),
    ):
        assert "Zq9" not in text


def test_trackers_receive_no_cluster_settings(tmp_path) -> None:
    setup = "slurm.setup=[module load cuda/private]"
    prefix = "launcher.prefix=['sshpass -p private ssh a']"
    record = bare_record(
        overrides=["seed=1", setup, prefix],
        command=["python", "train.py", "seed=1", setup, prefix],
        choices={"slurm": "ours", "data": "text"},
        config={
            "slurm": {"setup": ["x"]},
            "launcher": {"prefix": ["x"]},
            "seed": 1,
            "trainer": {"hub_token": "Zq9"},
        },
    )
    told = tracked_run(record, RunPaths(tmp_path), 0, Tracker())
    assert told.name == "seed=1"
    assert told.notes == "python train.py seed=1"
    assert told.factors == {"data": "text", "seed": 1}
    assert told.config == {"seed": 1, "trainer": {"hub_token": "***"}}


def test_files_follow_the_umask(tmp_path) -> None:
    from eke.common.files import append_line, write_json

    before = os.umask(0o002)
    try:
        append_line(tmp_path / "a", "x")
        write_json(tmp_path / "b", {})
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / n).stat().st_mode) for n in "ab"] == [0o664, 0o664]
