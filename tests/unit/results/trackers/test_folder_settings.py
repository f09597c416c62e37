"""A file `wandb/settings` in the current folder names no server, proxy or account."""

import logging
from pathlib import Path

import pytest

from eke.cli import main
from eke.launch.processes.run_dir import lock_run_folder
from eke.rules.tracker import has_wandb_key

from .conftest import make_folder, rows, track
from .stub import Server, serving


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The current folder is one where somebody has named a server of his own."""
    with serving() as server:
        for folder in ("wandb", ".wandb"):
            file = tmp_path / "here" / folder / "settings"
            file.parent.mkdir(parents=True)
            file.write_text(f"[default]\nbase_url = {server.url}\nentity = thief\n")
        monkeypatch.chdir(tmp_path / "here")
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.delenv("WANDB_CONFIG_DIR", raising=False)
        yield server


@pytest.fixture
def own_file(online: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server is named by the user's own file alone."""
    monkeypatch.delenv("WANDB_BASE_URL")
    file = tmp_path / "home" / ".config" / "wandb" / "settings"
    file.parent.mkdir(parents=True)
    file.write_text(f"[default]\nbase_url = {online.url}\n")
    return online


def test_sync_uses_the_configured_server_and_names_it_first(planted, own_file, tmp_path, capsys):
    paths = make_folder(tmp_path / "runs")
    with lock_run_folder(paths):  # the account is asked, and nothing is sent
        assert main(["sync", str(paths.folder)]) == 0
    assert planted.requests == []
    assert own_file.operations
    assert capsys.readouterr().err.splitlines()[0] == f"W&B's server: {own_file.url}"


def test_online_run_ignores_settings_of_the_folder(planted, own_file, make_run, caplog):
    with caplog.at_level(logging.INFO):
        tracker = track(make_run(mode="online"), rows(1))
    assert tracker.problem == ""
    assert planted.requests == []
    assert own_file.rows
    assert f"W&B's server is {own_file.url}" in caplog.text


def test_key_in_the_folder_is_ignored(planted, monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("NETRC", raising=False)
    Path("wandb/settings").write_text("[default]\napi_key = " + "ab" * 20 + "\n")
    assert not has_wandb_key()
