"""Where W&B's key may be; compared with what W&B itself finds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import REPO

from eke.rules.tracker import has_wandb_key

KEY = "ab" * 20
ASK = (
    "import wandb.sdk.lib.wbauth as a, wandb.sdk.wandb_setup as s; "
    "host = s.singleton().settings.base_url; "
    "print(bool(a.authenticate_session(host=host, source='test', prompt=False)))"
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("WANDB_") or name == "NETRC"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def netrc(host: str, password: str = KEY) -> str:
    return f"machine {host}\n  login user\n  password {password}\n"


CASES = {
    "nothing": ({}, {}, False),
    "variable": ({"WANDB_API_KEY": KEY}, {}, True),
    "empty variable": ({"WANDB_API_KEY": ""}, {}, False),
    "netrc": ({}, {".netrc": netrc("api.wandb.ai")}, True),
    "netrc under the new name": ({}, {".netrc": netrc("api.forge.coreweave.com")}, True),
    "netrc of another host": ({}, {".netrc": netrc("example.org")}, False),
    "netrc that cannot be read": ({}, {".netrc": "machine"}, False),
    "netrc elsewhere": ({"NETRC": "~/keys"}, {"keys": netrc("api.wandb.ai")}, True),
    "own server": (
        {"WANDB_BASE_URL": "http://localhost:8080"},
        {".netrc": netrc("localhost:8080")},
        True,
    ),
    "own server, key of the public one": (
        {"WANDB_BASE_URL": "http://localhost:8080"},
        {".netrc": netrc("api.wandb.ai")},
        False,
    ),
    "own server in the settings": (
        {},
        {
            ".config/wandb/settings": "[default]\nbase_url = http://localhost:8080\n",
            ".netrc": netrc("localhost:8080"),
        },
        True,
    ),
}


@pytest.fixture
def expected(request: pytest.FixtureRequest, home: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether there is a key in the surroundings of a case, which are made here."""
    variables, files, there = CASES[request.param]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for file, content in files.items():
        (home / file).parent.mkdir(parents=True, exist_ok=True)
        (home / file).write_text(content)
        (home / file).chmod(0o600)
    return there


every_case = pytest.mark.parametrize("expected", CASES, indirect=True)


@every_case
def test_wandb_key_is_found(expected: bool) -> None:
    assert has_wandb_key() is expected


@pytest.mark.slow
@every_case
def test_wandb_finds_the_same_key(expected: bool, home: Path) -> None:
    said = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, cwd=home)
    assert said.stdout.strip() == str(expected), said.stderr


def test_key_lookup_does_not_import_wandb() -> None:
    code = (
        "import sys; from eke.rules.tracker import has_wandb_key; has_wandb_key(); "
        "sys.exit('wandb' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPO / "src")}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0


@pytest.mark.parametrize(
    ("name", "value", "typed", "tracker"),
    [
        ("WANDB_MODE", "disabled", (), "none"),
        ("WANDB_DISABLED", "true", (), "none"),
        ("WANDB_DISABLED", "1", ("recipe=guide_best",), "none"),
        ("WANDB_DISABLED", "false", (), "wandb"),
        ("WANDB_DISABLED", "", (), "wandb"),
        ("WANDB_MODE", "offline", (), "wandb"),
        ("WANDB_MODE", "disabled", ("tracker.mode=offline",), "wandb"),
        ("WANDB_MODE", "disabled", ("tracker=tensorboard",), "tensorboard"),
    ],
)
def test_wandb_is_disabled_by_the_environment(
    name, value, typed, tracker, make_plan, monkeypatch
) -> None:
    monkeypatch.setenv(name, value)
    plan = make_plan("data=synthetic", "model=tiny", *typed)
    assert (plan.config.tracker.option, plan.choices["tracker"]) == (tracker, tracker)
    assert any(f"{name}={value}" in each for each in plan.warnings) is (tracker == "none")
    monkeypatch.delenv(name)
    assert make_plan("data=synthetic", "model=tiny", *typed).run_id == plan.run_id
