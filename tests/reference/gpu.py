"""What the committed records show of GPUs: `gpu_tests_*.json` and `gpu_runs_*.json` in results/."""

import json
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reference.seen import describe, read_seen

Content = dict[str, Any]


@dataclass(frozen=True)
class OnGpu:
    """All that was run on one kind of GPU."""

    device: str
    tests: dict[str, str]
    """`test_FILE.py::test_NAME[PARAMETER]` -> passed, failed or skipped."""
    runs: dict[str, Content]
    """Name of a single run -> its record."""
    versions: dict[str, str]
    file: str
    """Of the single runs, empty where there are none."""

    def outcomes(self, command: str) -> dict[str, list[str]]:
        """Outcome -> the tests that are of `group=option` by their name or parameter.

        Tests of refusals (`test_gpu_refusals.py`, `..._is_refused`) run nothing with the option.
        """
        option = command.partition("=")[2]
        found: dict[str, list[str]] = {}
        for test, outcome in self.tests.items():
            name, _, parameter = test.partition("::")[2].partition("[")
            pieces = re.split(r"[-,:=\s]+", parameter.rstrip("]"))
            named = outcome == "passed" and re.search(rf"_{re.escape(option)}(?:_|$)", name)
            if (named or option in pieces) and option != "none" and "refus" not in test:
                found.setdefault(outcome, []).append(test.partition("::")[2])
        return found

    def trained(self, command: str) -> list[str]:
        """Names of the single runs with this override that ended well."""
        ended = {name: run for name, run in self.runs.items() if run["outcome"] == "ok"}
        return [name for name, run in ended.items() if command in run["overrides"]]

    def saw(self, command: str) -> bool:
        """Whether the option ran there, in a test that passed or in a single run."""
        return bool(self.outcomes(command).get("passed") or self.trained(command))


def read_gpus(folder: Path) -> list[OnGpu]:
    """Every kind of GPU of which there are tests or single runs, by name."""
    parts: dict[str, dict[str, Any]] = {}
    for kind in ("tests", "runs"):
        for path in sorted(folder.glob(f"gpu_{kind}_*.json")):
            content = json.loads(path.read_text())
            own = parts.setdefault(content["device"], {})
            own[kind] = own.get(kind, {}) | content[kind]
            own["versions"] = own.get("versions", {}) | content.get("versions", {})
            if kind == "runs":
                own["file"] = path.name
    return [
        OnGpu(device, own.get("tests", {}), own.get("runs", {}), own["versions"],
              own.get("file", ""))
        for device, own in sorted(parts.items())
    ]  # fmt: skip


def where_seen(command: str, results: Path) -> str:
    """`ran on CPU; trained on NVIDIA H100`, `ran in tests on ...`, or `never seen running`."""
    ran, gpus = describe(command, read_seen(results)), read_gpus(results)
    words = [] if ran.startswith("never") else [ran]
    for each in gpus:
        if each.saw(command):
            words.append(
                f"{'trained' if each.trained(command) else 'ran in tests'} on {each.device}"
            )
    return "; ".join(words) or ran


# ------------------------------------------------------------------------- errors of forecasts


def errors(runs: list[Content]) -> Iterator[tuple[float, Content]]:
    """Expected over measured step time, less one, and the estimate, of runs that have both."""
    for run in runs:
        found, steady = run["timing"]["predicted_step_s"], run["timing"]["steady_step_s"]
        if found and steady:
            yield found["expected"] / steady["median"] - 1, {**found, "measured": steady["median"]}


def kinds(gpu: OnGpu) -> dict[str, list[Content]]:
    """Runs by what decides how right a step's estimate is: compiled, or bound by launches."""
    groups: dict[str, list[Content]] = {"compiled": [], "not compiled": [], "host": []}
    for run in gpu.runs.values():
        predicted = run["timing"]["predicted_step_s"] or {}
        if any(text.startswith("compile=") for text in run["overrides"]):
            groups["compiled"].append(run)
        elif "host" in str(predicted.get("limit")):
            groups["host"].append(run)
        else:
            groups["not compiled"].append(run)
    groups["limited by the host's kernel launches"] = groups.pop("host")
    return {name: found for name, found in groups.items() if found}


def time_rows(folder: Path) -> list[tuple[str, str, str, str]]:
    """Rows of accuracy.md: where it was measured, truth in the range, its width, errors."""
    rows = []
    for gpu in read_gpus(folder):
        for name, runs in kinds(gpu).items():
            found = list(errors(runs))
            if not found:
                continue
            inside = sum(each["low"] <= each["measured"] <= each["high"] for _, each in found)
            width = statistics.median(each["high"] / each["low"] for _, each in found)
            where = f"single runs on {gpu.device} (`results/{gpu.file}`), {name}"
            within = f"{inside} of {len(found)}"
            rows.append((where, within, f"{width:.2g} (median)", span(e for e, _ in found)))
    return rows


def memory_rows(folder: Path) -> list[tuple[str, str, str]]:
    """Rows of accuracy.md: runs, the whole GPU's memory within the bounds, peaks' errors."""
    rows = []
    for gpu in read_gpus(folder):
        for name, runs in kinds(gpu).items():
            memory = [run["memory"] for run in runs]
            formulas = [m for m in memory if m["predicted"]["method"] == "closed_form"]
            if not formulas:
                continue
            bounds = [(m["predicted"]["low"], m["predicted"]["high"]) for m in formulas]
            whole = [m["measured"]["stages"]["training"] for m in formulas]
            inside = [low <= used <= high for used, (low, high) in zip(whole, bounds, strict=True)]
            off = span(
                m["predicted"]["allocated_bytes"] / m["measured"]["peak_allocated_bytes"] - 1
                for m in formulas
            )
            where = f"single runs on {gpu.device} (`results/{gpu.file}`), {name}"
            rows.append((where, f"{sum(inside)} of {len(inside)}", f"peak of tensors {off}"))
    return rows


def span(values: Iterator[float]) -> str:
    """The least and the largest error, signed: `-4.2 to +49 %`."""
    found = sorted(100 * each for each in values)
    ends = [f"{each:+.{0 if abs(each) >= 10 else 1}f}" for each in (found[0], found[-1])]
    return f"{' to '.join(dict.fromkeys(ends))} %"


# ------------------------------------------------------------------------------------- README


def speeds(folder: Path) -> str:
    """Of README: the fastest run of each model with billions of weights, on each GPU."""
    words = []
    for gpu in read_gpus(folder):
        best: dict[str, tuple[float, str]] = {}
        for run in gpu.runs.values():
            typed = dict(text.split("=", 1) for text in run["overrides"])
            if "model" in typed:
                adapters = f" peft={typed['peft']}" if "peft" in typed else ""
                name = f"`model={typed['model']}{adapters}`"
                best[name] = max(
                    best.get(name, (0.0, "")), (run["throughput"]["tokens_per_s"], name)
                )
        listed = ", ".join(f"{name} {speed:,.0f} tokens/s" for speed, name in best.values())
        words += [f"On one {gpu.device}: {listed}."] if listed else []
    return "\n".join(words)


def never_seen(options: list[str], folder: Path) -> list[str]:
    """The options, each `group=option`, that no record has seen running anywhere."""
    return [option for option in options if where_seen(option, folder).startswith("never")]
