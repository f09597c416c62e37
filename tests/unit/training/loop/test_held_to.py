"""A run is refused where its software or its input is no longer what was planned."""

import dataclasses
import json
import sys
from importlib import metadata

import pytest
from unit.plan.cases import plan_of

from eke.common.errors import ChangedError
from eke.common.paths import RunPaths
from eke.hardware import fingerprint, software_now
from eke.launch.processes.run_attempt import finish_attempt
from eke.plan.planner import write_plan
from eke.plan.record import read_attempts, read_record, start_attempt
from eke.training.loop.stop import StopFlag
from eke.training.loop.worker import run_rank_0


@pytest.fixture
def paths(tmp_path):
    """An empty run folder."""
    found = RunPaths(tmp_path / "run")
    found.folder.mkdir()
    return found


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Puts a version of a library in front of the installed one."""

    def package(name: str, version: str) -> None:
        folder = tmp_path / "site" / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}")

    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return package


@pytest.fixture
def source(tmp_path, monkeypatch):
    """In place of eke's own source: a file that may be edited."""
    file = tmp_path / "eke" / "module.py"
    file.parent.mkdir()
    file.write_text("old = 1\n")
    monkeypatch.setattr(fingerprint, "package_folder", lambda: file.parent)
    monkeypatch.setattr(fingerprint, "_software", software_now)
    return file


def test_upgraded_library_rejects_the_run(paths, package) -> None:
    plan = plan_of("data=synthetic")
    write_plan(paths, plan)
    package("transformers", "99.1")
    before = set(sys.modules)
    assert run_rank_0(paths, StopFlag(), None) == 2
    assert "eke.training.loop.attempt" not in set(sys.modules) - before, (
        "nothing heavy was imported"
    )
    record = read_record(paths)
    assert (record.outcome, record.failure.phase) == ("refused", "software")
    old = metadata.version("torch")
    assert record.machine == {**plan.machine, "transformers": "99.1"}, "the worker's own"
    assert record.machine["torch"] == old
    assert f"transformers: {plan.machine['transformers']} -> 99.1" in record.failure.message
    assert record.failure.message.endswith("-> repeat the command")
    assert read_attempts(paths)[0]["machine"] == record.machine


def test_software_versions_cover_libraries_that_compute(package) -> None:
    before = software_now()
    package("mlflow", "99.1")
    assert software_now() == before
    names = ("numpy", "tokenizers", "torch", "peft", "flash-attn")
    for name in names:
        package(name, "99.1")
    assert software_now() == {**before, **dict.fromkeys(names, "99.1")}


def test_edited_editable_install_rejects_the_run(paths, source) -> None:
    write_plan(paths, plan_of("data=synthetic"))
    source.write_text("new = 2\n")
    assert run_rank_0(paths, StopFlag(), None) == 2
    record = read_record(paths)
    assert record.outcome == "refused"
    assert record.machine["eke_source"] == fingerprint.source_hash(source.parent)


def test_touched_source_is_unchanged(source) -> None:
    before = software_now()
    content = source.read_text()
    source.unlink()
    source.write_text(content)
    (source.parent / "__pycache__").mkdir()
    (source.parent / "__pycache__" / "module.pyc").write_text("compiled")
    assert software_now() == before


def test_files_edited_during_import_are_rejected(tmp_path, source) -> None:
    from eke.training.loop.attempt import verify_inputs

    text = tmp_path / "text.txt"
    text.write_bytes(b"abcd" * 400)
    short = ("data.seq_len=16", "batch.per_device=2", "train.steps=2")
    plan = plan_of("data=text", f"data.path={text}", *short)
    with verify_inputs(plan):
        pass
    with pytest.raises(ChangedError, match=r"^data\.path"), verify_inputs(plan):
        text.write_bytes(b"0123" * 400)
    with pytest.raises(ChangedError, match=r"^data\.path"), verify_inputs(plan):
        pytest.fail("nothing is read of another text")
    text.write_bytes(b"abcd" * 400)

    def imported_while_it_is_edited() -> None:
        with verify_inputs(plan):
            source.write_text("new = 2\n")
            raise ImportError("half of it is the new one")

    with pytest.raises(ChangedError, match="eke_source"):
        imported_while_it_is_edited()
    source.write_text("old = 1\n")
    with pytest.raises(ImportError, match="its own"), verify_inputs(plan):
        raise ImportError("its own")


def test_supervisor_rejects_a_worker_that_cannot_import(paths, source) -> None:
    plan = plan_of("data=synthetic")
    source.write_text("new = (\n")
    record = finish_attempt(paths, plan, exit_code=1, attempts_before=0)
    assert (record.outcome, record.exit_code) == ("refused", 2)
    killed = finish_attempt(paths, plan, exit_code=-9, attempts_before=1)
    assert killed.outcome == "crashed", "not the software's fault"


def test_killed_worker_is_recorded_with_its_software(paths) -> None:
    plan = plan_of("data=synthetic")
    start_attempt(paths, {**plan.machine, "torch": "99.1"}, {})
    record = finish_attempt(paths, plan, exit_code=-9, attempts_before=0)
    assert record.machine["torch"] == "99.1"


def test_steps_with_other_software_are_reported(source) -> None:
    from eke.training.loop.results import other_software

    plan = plan_of("data=synthetic")
    older = {**plan.machine, "torch": "1.0"}
    attempts = [{"attempt": 0, "machine": older}, {"attempt": 1, "machine": plan.machine}]
    assert other_software(plan, attempts) == [
        f"attempt 0 ran with other software: torch: 1.0 -> {plan.machine['torch']}"
    ]
    source.write_text("new = 2\n")
    (told,) = other_software(plan, attempts[1:])
    assert "eke_source: " in told
    assert json.dumps(dataclasses.asdict(plan.batch)), "the plan is as it was"
