"""Options and trackers are the same set, and choosing one never raises."""

import pytest

from eke.common.paths import conf_folder
from eke.config import schema
from eke.results.trackers import TRACKERS, build_tracker

from .conftest import rows


def test_options_match_trackers():
    options = {file.stem for file in (conf_folder() / "tracker").glob("*.yaml")}
    assert options == set(TRACKERS)


def test_tracker_none_writes_no_files(make_run):
    run = make_run(settings=schema.Tracker(option="none"))
    tracker = build_tracker(run)
    tracker.log(rows(1))
    tracker.summary({"loss": 1.0})
    tracker.finish(0)
    assert tracker.problem == ""
    assert list(run.directory.iterdir()) == []


def test_unknown_tracker_is_named(make_run):
    tracker = build_tracker(make_run(settings=schema.Tracker(option="aim")))
    tracker.log(rows(1))
    tracker.finish(0)
    known = "mlflow, none, tensorboard, trackio, wandb"
    assert tracker.problem == f"tracker.option = aim: not one of {known} -> tracker=none"


MIRROR = """\
class ToFile:
    def __init__(self, run):
        self.file = run.directory / "told"

    def prepare(self):
        self.file.write_text("")

    def open(self):
        self.write("open")

    def log(self, rows):
        self.write(f"{len(rows)} rows")

    def summary(self, values):
        self.write(str(values))

    def close(self, exit_code):
        self.write(f"closed {exit_code}")

    def write(self, text):
        self.file.write_text(self.file.read_text() + text + "\\n")
"""


@pytest.mark.parametrize("name", ["ToFile", "Missing"])
def test_installed_plugin_adds_a_tracker(name, make_run, tmp_path, monkeypatch):
    info = tmp_path / "site" / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (tmp_path / "site" / "to_file.py").write_text(MIRROR)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[eke.trackers]\n{name} = to_file:{name}\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    run = make_run(settings=schema.Tracker(option=name))
    tracker = build_tracker(run)
    tracker.log(rows(2))
    tracker.finish(0)
    if name == "Missing":
        assert "eke.trackers: Missing = to_file:Missing of Missing" in tracker.problem
        return
    assert tracker.problem == ""
    assert (run.directory / "told").read_text() == f"open\n{len(rows(2))} rows\nclosed 0\n"
