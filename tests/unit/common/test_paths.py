"""Where things are."""

import os
import re
import subprocess
import sys

from support import REPO

import eke
from eke.common.paths import RunPaths, conf_folder, program
from eke.common.process_env import child_environment
from eke.config.compose import help_text


def test_file_names_of_a_run_are_fixed(tmp_path) -> None:
    """Tools outside eke rely on these names."""
    paths = RunPaths(tmp_path)
    names = {
        "config.yaml": paths.config,
        "plan.json": paths.plan,
        "record.json": paths.record,
        "metrics.jsonl": paths.metrics,
        "attempts.jsonl": paths.attempts,
        "train.log": paths.log,
        "checkpoints": paths.checkpoints,
    }
    assert {name: tmp_path / name for name in names} == names
    assert paths.lock.parent == tmp_path


def test_shipped_configuration_is_found() -> None:
    assert (conf_folder() / "config.yaml").is_file()


def test_child_process_imports_this_eke_and_inherited_paths(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "inherited.py").write_text("import eke\nprint(eke.__file__)\n")
    command = [sys.executable, "-P", "-m", "inherited"]
    done = subprocess.run(
        command, env=child_environment(), cwd="/", capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == eke.__file__
    monkeypatch.delenv("PYTHONPATH")
    assert os.pathsep not in child_environment()["PYTHONPATH"]


def test_checkout_uses_train_py_and_package_uses_eke(tmp_path, monkeypatch) -> None:
    assert program() == "python train.py"
    package = tmp_path / "site-packages" / "eke"
    package.mkdir(parents=True)
    (package / "conf").symlink_to(conf_folder())
    monkeypatch.setattr("eke.common.paths.__file__", str(package / "common" / "paths.py"))
    assert program() == "eke train"
    assert help_text().count("eke train ") == 6
    assert "train.py" not in help_text()


ASKS_FOR_HOME = re.compile(r"Path\.home\(|\.expanduser\(\)|\bgetpass\b|\bgetlogin\b")


def test_home_folder_is_read_only_through_safe_functions() -> None:
    """They raise for a user id without HOME and passwd entry: `user_path` and `home_folder`."""
    files = sorted((REPO / "src").rglob("*.py"))
    assert len(files) > 100
    found = [str(file) for file in files if ASKS_FOR_HOME.search(file.read_text())]
    assert not found
