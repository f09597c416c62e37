"""Without the rules about trackers and packages: what really goes wrong."""

import sys

import pytest
from torch import nn
from unit.training.model.plans import hand_plan

from eke.training.optimizer.build_optimizer import build_optimizer


def test_mlflow_rejects_a_folder_store(tmp_path) -> None:
    from mlflow.exceptions import MlflowException
    from mlflow.store.tracking.file_store import FileStore

    with pytest.raises(MlflowException, match=r"(?i)file"):
        FileStore(str(tmp_path / "mlruns"))


@pytest.mark.parametrize(
    ("option", "package"),
    [("galore", "galore_torch"), ("apollo", "apollo_torch"), ("schedule_free", "schedulefree")],
)
def test_option_without_its_package_cannot_be_built(option, package, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=package):
        build_optimizer(hand_plan(f"optimizer={option}"), nn.Linear(2, 2))
