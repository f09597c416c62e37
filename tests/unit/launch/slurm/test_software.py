"""Software that changes where jobs of a submission have been, and software that is just other."""

import pytest

from eke.launch.slurm import cluster_run
from eke.launch.slurm.cluster_run import note_software

PLANNED = {"python": "3.11.7", "eke_source": "1", "torch": "2.13.0"}
SHARED = {name: ("/shared", 7) for name in PLANNED}
LOCAL = {name: ("/opt/venv", 9) for name in PLANNED}


@pytest.fixture
def see(tmp_path, monkeypatch):
    """What a job finds; returns what it is told."""

    def see(places, prefix="", **versions) -> str:
        monkeypatch.setattr(cluster_run, "software_now", lambda: {**PLANNED, **versions})
        monkeypatch.setattr(cluster_run, "software_places", lambda: places)
        return note_software(tmp_path / "eke-1.json", prefix)

    return see


def test_changed_shared_software_is_reported(see) -> None:
    assert see(SHARED) == ""
    assert see(SHARED) == ""
    assert "torch: 2.13.0 -> 2.14.0" in see(SHARED, torch="2.14.0")
    assert "eke_source: 1 -> 2" in see(SHARED, eke_source="2")
    assert see(SHARED) == "", "what is as planned goes on"


def test_node_software_must_not_change_during_a_submission(see) -> None:
    assert see(SHARED) == ""
    assert see(LOCAL, torch="2.9.0") == ""
    assert see({**LOCAL, "torch": ("/opt/venv", 10)}, torch="2.8.0") == "", "another node's"
    assert "torch: 2.9.0 -> 2.10.0" in see(LOCAL, torch="2.10.0")


def test_container_image_is_identified_by_name(see) -> None:
    image = "apptainer exec a.sif"
    assert see(SHARED) == ""
    assert see(SHARED, image, torch="2.9.0") == "", "not what plans"
    moved = {name: (folder, number + 1) for name, (folder, number) in SHARED.items()}
    assert "torch: 2.9.0 -> 2.10.0" in see(moved, image, torch="2.10.0"), "built anew"
    assert see(moved, "apptainer exec b.sif", torch="2.10.0") == ""


def test_shared_source_is_checked_with_node_libraries(see) -> None:
    assert see(SHARED) == ""
    mixed = {**LOCAL, "eke_source": SHARED["eke_source"]}
    assert see(mixed, torch="2.9.0") == ""
    assert "eke_source: 1 -> 2" in see(mixed, torch="2.9.0", eke_source="2")
