"""What is said of a PyTorch that has not what eke uses."""

import re
from importlib.metadata import version

import pytest
import torch
from support import REPO

from eke.common.python_runtime import TESTED, describe_missing_api


def name_of_a_function() -> None:
    torch._C._never_there  # noqa: B018  # raises


def name_of_a_module() -> None:
    from torch._C._profiler import _NeverThere  # noqa: F401  # raises


def module() -> None:
    import torch._never_there  # noqa: F401  # raises


def operator() -> None:
    torch.ops.aten.never_there.default  # noqa: B018  # raises


def caught(does) -> BaseException:
    with pytest.raises((ImportError, AttributeError)) as found:
        does()
    return found.value


@pytest.mark.parametrize(
    ("does", "what"),
    [
        (name_of_a_function, "module 'torch._C' has no attribute '_never_there'"),
        (name_of_a_module, "cannot import name '_NeverThere' from 'torch._C._profiler'"),
        (module, "No module named 'torch._never_there'"),
        (operator, "'_OpNamespace' 'aten' object has no attribute 'never_there'"),
    ],
)
def test_missing_torch_name_is_reported_with_tested_release(does, what) -> None:
    said = describe_missing_api(caught(does))
    assert said.startswith(f"torch {version('torch')} is not supported ({what})")
    assert "\n" not in said


def none_of_torchs() -> None:
    import nowhere_at_all  # noqa: F401  # raises


def not_a_module() -> None:
    torch.ones(1).never_there  # noqa: B018  # raises


@pytest.mark.parametrize("does", [none_of_torchs, not_a_module])
def test_unrelated_error_has_no_message(does) -> None:
    assert describe_missing_api(caught(does)) == ""


def test_missing_torch_is_not_an_incomplete_torch() -> None:
    assert describe_missing_api(ModuleNotFoundError("No module named 'torch'", name="torch")) == ""
    assert describe_missing_api(RuntimeError("torch.nowhere")) == ""


def test_tested_release_matches_constraints() -> None:
    pins = (REPO / "constraints.txt").read_text()
    assert re.search(r"^torch==(\S+)$", pins, re.M)[1] == TESTED
