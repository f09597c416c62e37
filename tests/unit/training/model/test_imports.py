"""A run imports what it needs: not every library that is installed."""

import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

import pytest
from support import TINY, environment

from eke.common.paths import RunPaths
from eke.launch.processes.run_attempt import write_plan_files
from eke.training import model

UNUSED = (
    "apex", "apollo_torch", "bitsandbytes", "datasets", "deepspeed", "galore_torch", "hydra",
    "liger_kernel", "matplotlib", "mlflow", "omegaconf", "optuna", "pandas", "peft", "pyarrow",
    "rich", "schedulefree", "scipy", "sklearn", "tensorboard", "torchao", "torchvision", "trackio",
    "transformers.trainer", "transformers.training_args", "trio", "wandb",
)  # fmt: skip
"""For other options, other tasks, other commands."""

RUN = """
import sys
from eke.training.loop.worker import main
code = main(sys.argv[1:])
print(code, *sys.modules)
sys.stdout.flush()
"""


@pytest.mark.slow
def test_default_run_imports_no_optional_libraries(make_plan, tmp_path) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.folder.mkdir()
    write_plan_files(
        paths, make_plan(*TINY, "data=synthetic", "train.steps=2", "train.eval_every=1")
    )
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(paths.folder)],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
    )
    code, *modules = done.stdout.splitlines()[-1].split()
    assert code == "0", done.stderr
    assert "transformers.models.llama.modeling_llama" in modules, "it did train"
    assert not set(UNUSED) & set(modules)
    assert [name for name in UNUSED if find_spec(name.partition(".")[0])], "none is installed"


LATER = """
import sys
from eke.training.model import import_transformers
import_transformers()
assert not {"scipy", "torchao"} & set(sys.modules)
from transformers.utils import is_scipy_available, is_torchao_available
assert is_scipy_available() and is_torchao_available()
import scipy.linalg, torchao, trio
import transformers.models.fnet.modeling_fnet as fnet
assert fnet.linalg is scipy.linalg
import_transformers()
"""
"""FNet's Fourier matrices are scipy's."""


@pytest.mark.slow
@pytest.mark.skipif(
    not (find_spec("scipy") and find_spec("torchao") and find_spec("trio")),
    reason="what would be imported for nothing is not all installed",
)
def test_hidden_modules_can_be_imported_later(tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LATER], env=environment(tmp_path), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_hidden_packages_are_restored(tmp_path, monkeypatch) -> None:
    name, asked = "only_for_this_test", []
    (tmp_path / f"{name}.py").touch()

    def check(module):
        asked.append(module)
        if module == "transformers.modeling_utils":
            assert find_spec(name) is None
            with pytest.raises(ModuleNotFoundError):
                import_module(name)
            assert find_spec("json"), "what is imported already stays"

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "transformers.modeling_utils", raising=False)
    monkeypatch.setattr(model, "NEEDLESS", dict.fromkeys([name, "json", "nowhere"]))
    monkeypatch.setattr("importlib.import_module", check)
    model.import_transformers()
    assert "transformers.modeling_utils" in asked
    assert not {name, "nowhere"} & set(sys.modules)
    assert import_module(name)
    del sys.modules[name]
