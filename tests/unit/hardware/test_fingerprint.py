"""A fingerprint changes with what it stands for, and with nothing else."""

import os
import subprocess
import sys
from importlib import metadata

import pytest

from eke.hardware import DEVICES, environment, machine_fingerprint
from eke.hardware.fingerprint import LIBRARIES, installed_versions, source_hash
from eke.rules.requirements import NEEDS


def test_fingerprint_holds_device_and_installed_versions():
    facts = machine_fingerprint(DEVICES["h200"])
    assert facts["device"] == "NVIDIA H200"
    assert facts["device_count"] == "1"
    assert facts["torch"] == metadata.version("torch")
    assert facts["transformers"] == metadata.version("transformers")
    assert len(facts["eke_source"]) == 16
    int(facts["eke_source"], 16)
    assert all(isinstance(value, str) for value in facts.values())
    assert facts == machine_fingerprint(DEVICES["h200"])


def test_fingerprint_and_record_cover_all_technique_libraries():
    of_steps = [modules for (group, _), (modules, _) in NEEDS.items() if group != "tracker"]
    tops = {module.partition(".")[0] for modules in of_steps for module in modules.split()}
    other = {"flash_attn_interface": "flash-attn-3"}
    names = {other.get(top, top.replace("_", "-")) for top in tops}
    assert names <= set(LIBRARIES)
    here = installed_versions(sorted(names))
    assert "schedulefree" in here
    assert here.items() <= machine_fingerprint(DEVICES["h200"]).items()
    assert here.items() <= environment()["versions"].items()


def test_missing_or_broken_library_is_absent(tmp_path, monkeypatch):
    (tmp_path / "halfgone-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    found = installed_versions(["no-such-distribution", "pytest", "halfgone"])
    assert found == {"pytest": metadata.version("pytest")}


@pytest.fixture
def package(tmp_path):
    """A package of two modules and a data file."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "sub" / "b.py").write_text("y = 2\n")
    (tmp_path / "sub" / "notes.txt").write_text("no code\n")
    return tmp_path


def test_source_hash_covers_names_and_contents(package):
    before = source_hash(package)
    (package / "sub" / "notes.txt").write_text("other notes\n")
    assert source_hash(package) == before
    (package / "a.py").write_text("x = 2\n")
    changed = source_hash(package)
    assert changed != before
    (package / "a.py").write_text("x = 1\n")
    assert source_hash(package) == before
    (package / "a.py").write_text("x = 1\ny = 2\n")
    (package / "sub" / "b.py").write_text("")
    assert source_hash(package) not in (before, changed), "text that moves between modules"
    (package / "a.py").rename(package / "c.py")
    renamed = source_hash(package)
    assert renamed not in (before, changed)
    (package / "lock.py").symlink_to(package / "nowhere")  # cannot be read, and stops no run
    assert source_hash(package) != renamed


def test_hardware_module_does_not_import_torch():
    code = (
        "import sys; from eke import hardware as h; d = h.detect(); h.machine_fingerprint(d); "
        "h.environment(); h.has_foreign_processes(d); "
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONPATH": path}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0
