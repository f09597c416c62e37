"""Collections are put off while modules are imported, and never for good."""

import gc
import sys
from types import SimpleNamespace

import pytest

from eke.common.python_runtime import GC_THRESHOLD, importing, relax_gc


@pytest.fixture(autouse=True)
def as_before():
    """What is frozen stays so: all that tests/conftest.py has frozen would be looked at again."""
    thresholds, enabled = gc.get_threshold(), gc.isenabled()
    gc.set_threshold(700)
    yield
    gc.set_threshold(*thresholds)
    (gc.enable if enabled else gc.disable)()


def test_imported_objects_are_frozen_for_the_collector() -> None:
    before = gc.get_freeze_count()
    with importing():
        assert not gc.isenabled()
        kept = [[n] for n in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(kept)


def test_failed_import_re_enables_the_collector() -> None:
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()


def test_disabled_collector_stays_disabled() -> None:
    gc.disable()
    with importing():
        pass
    assert not gc.isenabled()


def test_later_garbage_is_collected() -> None:
    with importing():
        pass
    cycle: list[object] = []
    cycle.append(cycle)
    del cycle
    assert gc.collect() > 0


def test_tracing_worker_freezes_only_once(monkeypatch) -> None:
    from eke.training.trace.trace_worker import import_libraries

    libraries = SimpleNamespace(import_transformers=lambda: None)
    for name in ("eke.training.model", "eke.training.trace.trace_plan"):  # seconds of imports
        monkeypatch.setitem(sys.modules, name, libraries)
    import_libraries.cache_clear()
    import_libraries()
    before = gc.get_freeze_count()
    garbage: list[object] = [[] for _ in range(1000)]
    import_libraries()
    assert gc.get_freeze_count() <= before
    del garbage
    import_libraries.cache_clear()


def test_command_collects_after_many_objects() -> None:
    relax_gc()
    assert gc.get_threshold()[0] == GC_THRESHOLD
