"""What a record says about where it was made."""

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from eke.hardware import environment
from eke.hardware.fingerprint import git_state, slurm_job_id


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A git checkout with `src/eke` committed; returns the package's folder."""
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    package = tmp_path / "a project" / "src" / "eke"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    git(package.parents[1], "init", "--quiet")
    git(package.parents[1], "add", ".")
    git(package.parents[1], "commit", "--quiet", "--message", "first")
    return package


def test_git_state_belongs_to_the_package_checkout(checkout, monkeypatch):
    commit = git(checkout, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert git_state(checkout) == {"commit": commit, "dirty": False}
    monkeypatch.delenv("GIT_DIR")
    (checkout / "new.py").write_text("")
    assert git_state(checkout) == {"commit": commit, "dirty": True}
    for place in (".venv/lib/site-packages/eke", "vendored/eke"):
        installed = checkout.parents[1] / place
        installed.mkdir(parents=True)
        assert git_state(installed) is None, place
    monkeypatch.setenv("PATH", "")
    assert git_state(checkout) is None


def test_checkout_without_commit_has_no_git_state(tmp_path):
    package = tmp_path / "src" / "eke"
    package.mkdir(parents=True)
    git(tmp_path, "init", "--quiet")
    assert git_state(package) is None


def test_environment_is_json_and_its_time_is_utc(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    facts = json.loads(json.dumps(environment()))
    when = datetime.fromisoformat(facts["time"])
    assert when.utcoffset() == timedelta(0)
    assert abs(datetime.now(UTC) - when) < timedelta(minutes=5)
    assert facts["versions"]["torch"]
    assert facts["host"]
    assert facts.keys().isdisjoint({"driver", "cuda_driver", "slurm_job_id"})


def test_driver_and_cuda_version_are_recorded(machine):
    machine("NVIDIA H200")
    facts = environment()
    assert (facts["driver"], facts["cuda_driver"]) == ("580.65.06", "13.1")


def test_slurm_job_is_recorded():
    array = {"SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": "2"}
    assert slurm_job_id({}) is None
    assert slurm_job_id({"SLURM_JOB_ID": "4711"}) == "4711"
    assert slurm_job_id({"SLURM_JOB_ID": "4713", **array}) == "4711_2"
