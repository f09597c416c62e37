"""Whole commands as users mistype them: exit code 2, what is wrong, what to type, no traceback."""

import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from live import run_in
from support import REPO, Finished

import eke
from eke import cli, workflows

# id: (command, a phrase of the message, the fix behind the arrow or "" where no override mends it).
# `world` and `locked` make what {tmp} holds.
WRONG: dict[str, tuple[str, str, str]] = {
    "group": ("precison=bf16", "Did you mean precision?", "precision=bf16"),
    "target is no multiple": (
        "batch.target=12 batch.per_device=8",
        "is not a multiple of batch.per_device x processes = 8 x 1 = 8",
        "batch.target=16",
    ),
    "step larger than the data": (
        "data=synthetic data.num_samples=100 batch.accumulation=16",
        "needs 128 samples per step, only 100 for training",
        "batch.accumulation=12",
    ),
    "negative rate": ("optimizer.lr=-1e-3", "must be above 0", "optimizer.lr=0.001"),
    "no steps": ("train.steps=0", "must be between 1 and 1000000000", "train.steps=null"),
    "heads": (
        "model.num_attention_heads=3",
        "does not divide model.hidden_size = 128",
        "model.num_attention_heads=2",
    ),
    "missing file": (
        "data=text data.path={tmp}/nowhere.txt",
        "no such file or folder",
        "data.path=FILE_OR_FOLDER",
    ),
    "file name too long": (
        "data=text data.path=" + "x" * 300,
        "no such file or folder",
        "data.path=FILE_OR_FOLDER",
    ),
    "nobody's home": (
        """data=text 'data.path="~nobody_at_all/x"'""",
        "no such file or folder",
        "data.path=FILE_OR_FOLDER",
    ),
    "unreadable file": ("data=text data.path={tmp}/locked.txt", "is not readable", "data.path="),
    "unreadable file in a folder": (
        "data=text data.path={tmp}/mixed",
        "cannot be read",
        "data.path=FILE_OR_FOLDER",
    ),
    "empty file": ("data=text data.path={tmp}/empty.txt", "no text", "data.path=FILE_OR_FOLDER"),
    "device file": ("data=text data.path=/dev/null", "no text", "data.path=FILE_OR_FOLDER"),
    "pattern of a path": (
        "data=text data.path={tmp}/bare data.pattern=/etc/*",
        "invalid file name pattern",
        "'data.pattern=*.txt'",
    ),
    "no path at all": ("data=text", "data=text needs a value", "data.path=FILE_OR_FOLDER"),
    "runs in a file": ("paths.runs={tmp}/a.txt", "is not a folder", "paths.runs=runs"),
    "runs by a dead link": ("paths.runs={tmp}/lost/a", "broken link", "paths.runs=runs"),
    "runs by a link to itself": ("paths.runs={tmp}/loop", "broken link", "paths.runs=runs"),
    "runs read-only": ("paths.runs={tmp}/kept/runs", "is not writable", "paths.runs=runs"),
    "runs too long": ("paths.runs=" + "x" * 300, "longer than 255 bytes", "paths.runs=runs"),
    "server without http": (
        "tracker=mlflow tracker.uri=localhost:5000",
        "needs a URI",
        "tracker.uri=http://localhost:5000",
    ),
    "bare value": ("=3", "no key before the equals sign", ""),
    "flag": ("--precision bf16", "key=value without dashes", "precision=bf16"),
    "flag with a number": ("--batch-size 4", "without dashes", "batch.per_device=4"),
    "sweep": ("precision=fp32,bf16", "values need -m", "python train.py -m precision=fp32,bf16"),
    "detached single run": ("launcher.detach=true", "this is a single run", "python train.py -m"),
    "not a number": ("optimizer.lr=nan", "a finite number, above 0", "optimizer.lr=0.001"),
    "huge width": ("model.hidden_size=100000000", "optimizer state", "model=tiny"),
    "huge epochs": ("train.epochs=1e12", "the limit is 1000000000", "train.epochs=1"),
    "huge batch": ("batch.per_device=1000000000", "the embeddings of", "batch.per_device="),
    "huge sequence": (
        "model=tiny_t5 task=seq2seq_lm data=synthetic data.seq_len=100000000000",
        "the embeddings of",
        "batch.per_device=1 data.seq_len=",
    ),
    "huge seed": ("seed=1000000000000", "between 0 and 4294967295", "seed=0"),
    "hundreds of digits": ("model.hidden_size=" + "9" * 400, "must be at most", "model.hidden"),
    "thousands of digits": ("seed=" + "9" * 5000, "", "seed=0"),
}  # fmt: skip

BY_PROCESS = ("group", "bare value", "sweep", "huge width")
"""Commands that are typed for real; the others are given to the very same function."""


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files and folders to stumble over."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("text " * 100)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "locked.txt").write_text("secret")
    (tmp_path / "lost").symlink_to(tmp_path / "gone")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("bare", "mixed", "kept"):
        (tmp_path / name).mkdir()
    for name in ("open.txt", "other.txt", "shut.txt"):
        (tmp_path / "mixed" / name).write_text("text " * 1000)
    return tmp_path


@pytest.fixture
def locked(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbids what file modes forbid; root may do everything, so the system's answers are given."""
    true_access, true_open = os.access, open
    shut = (str(world / "locked.txt"), str(world / "kept"))

    def access(path, mode, **options):
        return str(path) not in shut and true_access(path, mode, **options)

    def opened(path, *options, **named):
        if str(path).endswith("shut.txt"):
            raise PermissionError(13, "Permission denied", str(path))
        return true_open(path, *options, **named)

    monkeypatch.setattr(os, "access", access)
    monkeypatch.setattr("eke.data.sources.content_hash.open", opened, raising=False)


def words_of(command: str, world: Path) -> list[str]:
    return shlex.split(command.replace("{tmp}", str(world)))


def assert_explained(done: Finished, phrase: str, fix: str) -> None:
    assert done.code == 2, done.text
    assert "Traceback" not in done.text
    assert done.out == "", "a mistake goes to stderr"
    assert phrase in " ".join(done.err.split())  # wrapped
    assert not fix or f"-> {fix}" in done.err, done.err


@pytest.mark.parametrize("case", sorted(set(WRONG) - set(BY_PROCESS)))
def test_wrong_command_is_explained(case, world, locked, capsys) -> None:
    command, phrase, fix = WRONG[case]
    code = workflows.main(words_of(command, world))
    captured = capsys.readouterr()
    assert_explained(Finished(code, captured.out, captured.err), phrase, fix)
    assert not (world / "runs").exists(), "a refused command leaves nothing behind"


@pytest.mark.slow
@pytest.mark.parametrize("case", BY_PROCESS)
def test_wrong_command_is_explained_in_a_shell(case, world, train_py) -> None:
    command, phrase, fix = WRONG[case]
    assert_explained(train_py(*words_of(command, world)), phrase, fix)


ASK = """
import sys
from eke.cli import main
for command in sys.argv[1:]:
    code = main(["train", *command.split()])
    heavy = sorted({"torch", "transformers", "accelerate", "wandb"} & set(sys.modules))
    sys.stderr.write(f"\\n{command}: {code}, loaded {heavy}\\n")
"""

LIGHT = {
    "precison=bf16": 2,
    "model.num_attention_heads=3 precision=tf32": 2,
    "model.hidden_size=100000000": 2,
    "batch.per_device=1000000000": 2,
    "plan_only=true batch.target=64": 0,
    "--help": 0,
}
"""Command -> exit code, of what is answered within a second."""


@pytest.mark.slow
def test_command_is_answered_without_torch(tmp_path) -> None:
    done = run_in(tmp_path, [sys.executable, "-c", ASK, *LIGHT])
    answers = [line for line in done.err.splitlines() if ", loaded " in line]
    assert answers == [f"{command}: {code}, loaded []" for command, code in LIGHT.items()]


def test_missing_packages_are_reported_with_a_command(tmp_path) -> None:
    """`-S`: an interpreter without site-packages."""
    shutil.copy(REPO / "train.py", tmp_path)
    (tmp_path / "src").symlink_to(REPO / "src")
    told = [sys.executable, "-S", "-E", str(tmp_path / "train.py"), "--help"]
    missing = run_in(tmp_path, told)
    assert missing.code == 1
    assert "Traceback" not in missing.text
    assert f"make -C {tmp_path} run" in missing.err
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "eke").touch()
    assert f". {tmp_path}/.venv/bin/activate" in run_in(tmp_path, told).err


def test_help_fits_a_screen_and_names_every_group(capsys) -> None:
    assert cli.main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    for group in ("model", "precision", "optimizer", "tracker", "sweep"):
        assert group in shown.split()
    assert len(shown.splitlines()) <= 60


@pytest.mark.parametrize("command", [[], ["train"]])
def test_version_is_printed(command, capsys) -> None:
    assert cli.main([*command, "--version"]) == 0
    assert capsys.readouterr().out == f"eke {eke.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        pytest.param([], 0, "eke train [overrides]", id="nothing"),
        pytest.param(["--help"], 0, "eke train [overrides]", id="help"),
        pytest.param(["nonsense"], 2, "eke nonsense", id="nonsense"),
        pytest.param(["plan", "model=tiny_bert"], 2, "-> task=masked_lm", id="plan, refused"),
        pytest.param(["plan", "batch.target=64", "--quick"], 0, "fits  ", id="plan"),
        pytest.param(
            ["plan", "hardware=h200", "model=llama_1b", "--quick"], 0, "H200", id="plan for a GPU"
        ),
        pytest.param(["train", "precison=bf16"], 2, "-> precision=bf16", id="train, refused"),
        pytest.param(["train", "plan_only=true"], 0, "fits  ", id="train, plan only"),
        pytest.param(["train", "--help"], 0, "precision", id="train, help"),
        pytest.param(["train", "--help", "memory"], 0, "empty_cache", id="train, help on a group"),
    ],
)
def test_eke_command_runs(arguments, code, said, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == code
    captured = capsys.readouterr()
    assert said in (captured.out if code == 0 else captured.err)
    assert (captured.err if code == 0 else captured.out) == ""
    assert list(tmp_path.iterdir()) == [], "planning and refusing write nothing"
