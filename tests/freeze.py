"""Record what eke decides, to compare two versions of its source.

Usage:
    python tests/freeze.py record BEFORE           (in the old checkout)
    python tests/freeze.py record AFTER --reports-of BEFORE/runs   (in the new one)
    python tests/freeze.py compare BEFORE AFTER

Recorded are plans, rejected commands, sweeps, the files of real runs and reports of their records:
keys, numbers, identifiers and overrides. Sentences are reduced to `TEXT`, `machine` is dropped, and
measured values of real runs are reduced to their type. `RENAMED` lists intended changes of names.
"""

import argparse
import contextlib
import importlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
INPUTS = TESTS / "frozen"
"""One command line a row: `plans.txt`, `rejected.txt`, `sweeps.txt`, `runs.txt`."""

NUM_TRACED = 50
RENAMED: dict[str, str] = {}
"""Old name -> new name, of keys and identifiers that a change renames on purpose."""

OF_THE_MACHINE = ("machine", "source", "available_bytes", "capacity")
"""Keys that are not compared. A verdict on a CPU still depends on the memory that is free."""

MEASURED = ("metrics.jsonl", "record.json", "attempts.json")
OVERRIDES = re.compile(r"^([~+]{0,2}[\w./@-]+=\S*\s*)+$")


def commands(name: str) -> list[list[str]]:
    """The command lines of one input file."""
    lines = (INPUTS / f"{name}.txt").read_text().splitlines()
    return [shlex.split(line) for line in lines if line and not line.startswith("#")]


@contextlib.contextmanager
def empty_home() -> Iterator[Path]:
    """A home folder, caches and a current folder with nothing in them."""
    with tempfile.TemporaryDirectory() as folder:
        kept, before = dict(os.environ), Path.cwd()
        for name in [n for n in kept if n.startswith(("XDG_", "EKE_", "WANDB_", "HF_"))]:
            del os.environ[name]
        os.environ |= {"HOME": folder, "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1"}
        os.chdir(folder)
        Path("text.txt").write_text("\n".join(f"Line {n} of a text." for n in range(2000)))
        try:
            yield Path(folder)
        finally:
            os.chdir(before)
            os.environ.clear()
            os.environ.update(kept)


def load_main() -> Callable[[list[str]], int]:
    """eke's entry point; what it raises is kept in `PROBLEMS`, whichever module defines it."""
    main: Callable[[list[str]], int] = importlib.import_module("eke.cli").main
    for module in [m for name, m in sys.modules.items() if name.startswith("eke.")]:
        error = getattr(module, "ConfigError", None)
        if isinstance(error, type) and not hasattr(error, "original_init"):
            _watch(error)
    return main


PROBLEMS: list[dict[str, Any]] = []


def _watch(error: Any) -> None:
    error.original_init = original = error.__init__

    def init(self: Any, problems: Any) -> None:
        original(self, problems)
        PROBLEMS[:] = [_problem(p) for p in self.problems]

    error.__init__ = init


def _problem(problem: Any) -> dict[str, Any]:
    """Identifier, key, value and overrides of a problem, by the names of either version."""
    try:
        typed = shlex.split(str(problem.fix).split("   (")[0])
    except ValueError:  # text with an apostrophe
        typed = []
    told = typed if all(map(OVERRIDES.match, typed)) else []
    key = getattr(problem, "key", None) or problem.path
    return {
        "id": getattr(problem, "id", None) or getattr(problem, "rule", ""),
        "key": without_text(key),
        "value": without_text(problem.value),
        "overrides": told,
    }


def answer(main: Callable[[list[str]], int], *words: str) -> dict[str, Any]:
    """Exit code of a command, its JSON if it prints some, and the problems that it found."""
    out, err = io.StringIO(), io.StringIO()
    PROBLEMS.clear()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(words))
    try:
        printed = json.loads(out.getvalue())
    except ValueError:
        printed = None
    if code == 2:  # a version may print its problems as JSON as well
        printed = None
    return {"exit": code, "json": without_text(printed), "problems": list(PROBLEMS)}


def without_text(value: Any, key: str = "") -> Any:
    """A value with sentences reduced to `TEXT`, without what depends on the machine."""
    if isinstance(value, dict):
        kept = {k: without_text(v, k) for k, v in value.items() if k not in OF_THE_MACHINE}
        return dict(sorted(kept.items()))
    if isinstance(value, list):
        return [without_text(each, key) for each in value]
    if isinstance(value, str) and re.search(r"\s", value) and not OVERRIDES.match(value):
        return "TEXT"
    return value.replace(str(Path.cwd()), "FOLDER") if isinstance(value, str) else value


def shape_of(value: Any) -> Any:
    """Keys and types of a value that holds measurements."""
    if isinstance(value, dict):
        return {k: shape_of(v) for k, v in sorted(value.items()) if k != "machine"}
    if isinstance(value, list):
        return [shape_of(value[0])] if value else []
    return type(value).__name__


def record_runs(folder: Path) -> dict[str, Any]:
    """Start each run of `runs.txt` in a process of its own; its files, losses and outcome."""
    found: dict[str, Any] = {}
    for words in commands("runs"):
        done = subprocess.run(
            [sys.executable, "-m", "eke", "train", *words, f"paths.runs={folder}"],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(TESTS.parent / "src")},
        )
        found[shlex.join(words)] = {"exit": done.returncode}
    for run in sorted(p for p in folder.iterdir() if p.is_dir() and p.name[0] != "."):
        found[run.name] = {"files": sorted(tree(run))}
        if (file := run / "record.json").exists():
            record = json.loads(file.read_text())
            found[run.name] |= {
                "record": shape_of(record),
                "outcome": record["outcome"],
                "losses": record.get("loss"),
                "steps_done": record.get("steps_done"),
            }
    return found


def tree(folder: Path) -> Iterator[str]:
    """Relative names of the files of a run, without numbers that differ from run to run."""
    for file in folder.rglob("*"):
        if "wandb" not in file.parts and file.is_file():
            yield re.sub(r"\d{9,}", "N", str(file.relative_to(folder)))


def record(folder: Path, reports_of: Path | None, parts: list[str]) -> None:
    """Write one JSON file a part into `folder`."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    runs = (reports_of or folder / "runs").resolve()
    with empty_home():
        main = load_main()
        for name, flags in (("plans", ["--quick"]), ("rejected", ["--quick"]), ("traced", [])):
            if name not in parts:
                continue
            rows = commands("plans")[:: 1000 // NUM_TRACED] if name == "traced" else commands(name)
            found = {
                shlex.join(words): answer(main, "plan", "--json", *flags, *words) for words in rows
            }
            write(folder / f"{name}.json", found)
        if "sweeps" in parts:
            rows = commands("sweeps")
            found = {
                shlex.join(w): answer(main, "plan", "-m", "--json", "--quick", *w) for w in rows
            }
            write(folder / "sweeps.json", found)
        if "runs" in parts:
            write(folder / "runs.json", record_runs(folder / "runs"))
        if "reports" in parts:
            main(["report", str(runs), "--quiet", "--formats", "json", "--output", str(folder)])
            report = json.loads((folder / "report.json").read_text())
            (folder / "report.json").unlink()
            write(folder / "reports.json", {"report": without_text(report)})


def write(file: Path, found: dict[str, Any]) -> None:
    """One line a command, so that two files can be compared by `diff`, too."""
    rows = [f"{json.dumps(k)}: {json.dumps(v, sort_keys=True)}" for k, v in found.items()]
    file.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    sys.stderr.write(f"{file}: {len(found)}\n")


def differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """Where two values differ, as `path: old -> new`."""
    if isinstance(old, dict) and isinstance(new, dict):
        renamed = {RENAMED.get(key, key): value for key, value in old.items()}
        for key in sorted({*renamed, *new}):
            missing = object()
            pair = renamed.get(key, missing), new.get(key, missing)
            if missing in pair:
                yield f"{path}.{key}: {'added' if pair[0] is missing else 'removed'}"
            else:
                yield from differences(*pair, f"{path}.{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, pair in enumerate(zip(old, new, strict=True)):
            yield from differences(*pair, f"{path}[{index}]")
    elif (RENAMED.get(old, old) if isinstance(old, str) else old) != new:
        yield f"{path}: {old!r} -> {new!r}"


def compare(before: Path, after: Path) -> int:
    """Print what differs; returns 1 if anything does."""
    count = 0
    for file in sorted(before.glob("*.json")):
        if not (after / file.name).exists():
            sys.stdout.write(f"{file.name}: not recorded in {after}\n")
            continue
        old, new = (json.loads((f / file.name).read_text()) for f in (before, after))
        found = list(differences(old, new))
        count += len(found)
        sys.stdout.write(f"{file.name}: {len(old)} entries, {len(found)} differences\n")
        sys.stdout.writelines(f"  {each}\n" for each in found[:40])
    return int(count > 0)


PARTS = ("plans", "rejected", "sweeps", "runs", "reports", "traced")


def main() -> int:
    """Parse the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--reports-of", type=Path)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    options = parser.parse_args()
    if options.action == "compare":
        return compare(*options.folders)
    sys.path.insert(0, str(TESTS.parent / "src"))
    record(options.folders[0], options.reports_of, options.parts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
