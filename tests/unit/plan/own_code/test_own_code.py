"""Own code is found by its text, frozen, and imported under its original path."""

import enum
import inspect
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from eke.common.errors import ChangedError, ConfigError
from eke.config.parts import Part
from eke.plan.own_code import (
    call_part,
    check_arguments,
    find_code,
    freeze_code,
    frozen_folder,
    load_part,
    serve_code,
    store_code,
)
from eke.plan.own_code.arguments import OwnCodeError

MODEL = Part("model", "net.model:Net", {"width": 3})


@pytest.fixture(autouse=True)
def nothing_served():
    """Serve nothing after a test."""
    yield
    serve_code(None, Path())


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project in the current folder: a package of two modules, a file of data, an unused one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "project"
    write(folder, {
        "net/__init__.py": "",
        "net/model.py": """
            from pathlib import Path
            from .layers import scale
            DATA = Path(__file__).with_name("data.txt").read_text()
            class Net:
                def __init__(self, width: int):
                    self.width = scale(width)
        """,
        "net/layers.py": "def scale(x): return 2 * x\n",
        "net/data.txt": "next to it",
        "net/unused.py": "raise SystemExit\n",
        "torch.py": "raise SystemExit\n",
    })  # fmt: skip
    monkeypatch.chdir(folder)
    return folder


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(inspect.cleandoc("\n" + text) + "\n")


def served(part, run):
    code = find_code([part])
    store_code(code)
    freeze_code(code, run)
    serve_code(code, frozen_folder(run))
    return code


@pytest.mark.parametrize("target", ["net.model:Net", "net.model.Net"])
def test_files_are_those_that_the_text_imports(project, target):
    code = find_code([Part("model", target, {})])
    assert list(code.files) == ["net", "net.layers", "net.model"]
    assert code.folders == (str(project),)


def test_unused_files_do_not_change_the_digest_and_used_ones_do(project):
    before = find_code([MODEL]).digest
    write(project, {"net/unused.py": "x = 1"})
    assert find_code([MODEL]).digest == before
    write(project, {"net/layers.py": "def scale(x): return 3 * x"})
    assert find_code([MODEL]).digest != before


def test_digest_does_not_depend_on_the_folder(project, tmp_path, monkeypatch):
    before = find_code([MODEL]).digest
    (tmp_path / "other").mkdir()
    (project / "net").rename(tmp_path / "other" / "net")
    monkeypatch.chdir(tmp_path / "other")
    assert find_code([MODEL]).digest == before


def test_frozen_text_runs_after_an_edit_under_its_original_path(project, tmp_path):
    served(MODEL, tmp_path / "run")
    write(project, {"net/layers.py": "raise SystemExit", "net/model.py": "raise SystemExit"})
    net = call_part(MODEL)
    assert net.width == 6
    module = sys.modules["net.model"]
    assert module.__file__ == str(project / "net/model.py")
    assert module.DATA == "next to it\n"
    assert "scale(width)" in inspect.getsource(type(net))


def test_module_that_was_not_frozen_is_not_importable(project, tmp_path):
    served(MODEL, tmp_path / "run")
    call_part(MODEL)
    with pytest.raises(ModuleNotFoundError):
        __import__("net.unused")


def test_changed_frozen_text_is_refused(project, tmp_path):
    served(MODEL, tmp_path / "run")
    (tmp_path / "run" / "code" / "net.layers.py").write_text("x = 1")
    with pytest.raises(ChangedError):
        load_part(MODEL)


def test_other_code_replaces_served_modules(project, tmp_path):
    served(MODEL, tmp_path / "first")
    assert call_part(MODEL).width == 6
    write(project, {"net/layers.py": "def scale(x): return 5 * x"})
    served(MODEL, tmp_path / "second")
    assert call_part(MODEL).width == 15


def test_a_name_of_the_environment_is_not_taken_from_the_folder(project):
    write(project, {"net/layers.py": "import torch\ndef scale(x): return x"})
    code = find_code([MODEL])
    assert "torch" not in code.files
    assert str(project / "torch.py") in code.warnings[0]


def test_installed_target_counts_by_its_version():
    code = find_code([Part("optimizer", "torch.optim:Adam", {})])
    assert list(code.packages) == ["torch"]
    assert not code.files


def test_folders_without_init_are_packages(project):
    (project / "net/__init__.py").unlink()
    assert list(find_code([MODEL]).files) == ["net", "net.layers", "net.model"]


def test_src_layout_and_folder_of_options_are_searched(project, monkeypatch):
    (project / "src").mkdir()
    (project / "net").rename(project / "src/net")
    assert find_code([MODEL]).folders == (str(project / "src"),)
    (project / "conf").mkdir()
    (project / "src/net").rename(project / "net")
    monkeypatch.chdir("/")
    assert find_code([MODEL], config_dir=project / "conf").folders == (str(project),)


def test_two_places_with_other_content_are_refused(project):
    write(project, {"src/net/__init__.py": "", "src/net/model.py": "x = 1"})
    with pytest.raises(ConfigError) as error:
        find_code([MODEL])
    (problem,) = error.value.problems
    assert (problem.id, problem.overrides) == ("two_modules", (f"code.path={project}",))
    assert find_code([MODEL], str(project)).folders == (str(project),)


@pytest.mark.parametrize(
    ("target", "key", "words"),
    [
        ("nett.model:Net", "no_module", ("model.target=net.model.Net",)),
        ("net.mmodel:Net", "no_module", ("model.target=net.model.Net",)),
        ("zzz:Net", "no_module", ("code.path=FOLDER",)),
    ],
)
def test_missing_module_has_a_fix(project, target, key, words):
    with pytest.raises(ConfigError) as error:
        find_code([Part("model", target, {})])
    (problem,) = error.value.problems
    assert (problem.key, problem.id, problem.fix.words) == ("model.target", key, words)


def test_syntax_error_names_file_and_line(project):
    write(project, {"net/layers.py": "x = 1\ndef"})
    with pytest.raises(ConfigError) as error:
        find_code([MODEL])
    assert f"{project}/net/layers.py:2" in error.value.problems[0].why


@pytest.mark.skipif(not Path("/proc").exists(), reason="Linux")
def test_code_of_another_user_is_refused(project):
    import os

    if os.getuid():
        pytest.skip("only root can give files away")
    os.chown(project / "net/layers.py", 12345, 12345)
    with pytest.raises(ConfigError) as error:
        find_code([MODEL])
    assert error.value.problems[0].id == "unusable_code"


def test_error_in_own_code_has_the_line_of_its_last_frame(project, tmp_path):
    write(project, {"net/layers.py": "def scale(x):\n    raise ValueError('too wide')"})
    served(MODEL, tmp_path / "run")
    with pytest.raises(OwnCodeError) as error:
        call_part(MODEL)
    assert f"ValueError: too wide ({project}/net/layers.py:2)" in str(error.value)


def test_exit_while_importing_is_an_error(project, tmp_path):
    part = Part("model", "net.unused:Net", {})
    served(part, tmp_path / "run")
    with pytest.raises(OwnCodeError):
        load_part(part)


@pytest.mark.parametrize("name", ["Nett", "DATA"])
def test_no_attribute_and_no_callable(project, tmp_path, name):
    part = Part("model", f"net.model:{name}", {})
    served(part, tmp_path / "run")
    with pytest.raises(OwnCodeError):
        load_part(part)


class Kind(enum.Enum):
    small = "s"
    large = "l"


@dataclass
class Inner:
    depth: int = 1
    rates: list[float] = field(default_factory=list)


def target(
    a: int, b: float = 1.0, c: bool = False, d: str | None = None, e: Kind = Kind.small,
    f: Literal["x", "y"] = "x", g: Path = Path(), h: tuple[int, int] = (1, 2),
    i: Inner = Inner(), j=None,  # noqa: B008  # as users write it
):  # fmt: skip
    return {"a": a, "b": b, "c": c, "d": d, "e": e, "f": f, "g": g, "h": h, "i": i, "j": j}


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("b", 2, 2.0), ("d", None, None), ("d", "x", "x"), ("e", "large", Kind.large),
        ("e", "l", Kind.large), ("g", "a/b", Path("a/b")), ("h", [3, 4], (3, 4)),
        ("i", {"depth": 2, "rates": [1]}, Inner(2, [1.0])), ("j", [1], [1]),
    ],
)  # fmt: skip
def test_values_get_the_types_of_the_signature(name, value, wanted):
    part = Part("model", "x:y", {"a": 1, name: value})
    assert check_arguments(target, part, ()) == []
    found = call_part(part, load=target)[name]
    assert found == wanted
    assert type(found) is type(wanted)


@pytest.mark.parametrize(
    ("args", "key", "kind"),
    [
        ({}, "model.args.a", "missing_value"),
        ({"a": "x"}, "model.args.a", "wrong_type"),
        ({"a": True}, "model.args.a", "wrong_type"),
        ({"a": 1.5}, "model.args.a", "wrong_type"),
        ({"a": 1, "c": "yes"}, "model.args.c", "wrong_type"),
        ({"a": 1, "e": "huge"}, "model.args.e", "wrong_type"),
        ({"a": 1, "f": "z"}, "model.args.f", "wrong_type"),
        ({"a": 1, "h": [1]}, "model.args.h", "wrong_type"),
        ({"a": 1, "h": 1}, "model.args.h", "wrong_type"),
        ({"a": 1, "i": {"dept": 2}}, "model.args.i.dept", "wrong_type"),
        ({"a": 1, "aa": 2}, "model.args.aa", "no_parameter"),
    ],
)
def test_wrong_arguments_are_named(args, key, kind):
    (problem,) = check_arguments(target, Part("model", "x:y", args), ())
    assert (problem.key, problem.id) == (key, kind)


def test_given_parameters_are_not_missing():
    assert check_arguments(target, Part("model", "x:y", {}), ("a",)) == []
    assert check_arguments(target, Part("model", "x:y", {}), ("0",)) == []


def test_frozen_code_works_in_a_process_of_its_own(project, tmp_path):
    code = served(MODEL, tmp_path / "run")
    script = (
        "import json, sys, cattrs; from pathlib import Path;"
        "from eke.plan.own_code import *; from eke.config.parts import Part;"
        "code = cattrs.structure(json.loads(sys.argv[1]), Code);"
        "serve_code(code, Path(sys.argv[2]));"
        "print(call_part(Part('model', 'net.model:Net', {'width': 4})).width)"
    )
    import json

    import cattrs

    text = json.dumps(cattrs.unstructure(code))
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, text, str(frozen_folder(tmp_path / "run"))],
        capture_output=True, text=True, cwd="/",
    )  # fmt: skip
    assert done.stdout == "8\n", done.stderr


def test_guess_for_a_method_keeps_its_class(project, tmp_path):
    write(
        project, {"net/layers.py": "class Kind:\n    def forge(self): ...\ndef scale(x): return x"}
    )
    part = Part("model", "net.layers:Kind.forgee", {})
    served(part, tmp_path / "run")
    with pytest.raises(OwnCodeError, match=r"model\.target=net\.layers\.Kind\.forge"):
        load_part(part)
