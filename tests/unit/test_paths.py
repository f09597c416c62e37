"""Where things are."""

from eke.paths import RunPaths, conf_folder


def test_the_files_of_a_run_are_the_contract(tmp_path) -> None:
    """DESIGN section 6; tools outside eke rely on these names."""
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


def test_the_configuration_that_ships_is_found() -> None:
    assert (conf_folder() / "config.yaml").is_file()
