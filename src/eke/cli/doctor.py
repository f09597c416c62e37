"""`eke doctor`: report this machine's properties and usable options, as text or JSON."""

import contextlib
import copy
import dataclasses
import json
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from eke.cli import make_parser
from eke.common.paths import user_path
from eke.common.process_env import SAFE_PATH, child_environment
from eke.common.text import format_bytes
from eke.config.compose import compose
from eke.config.compose.catalogue import Catalogue, make_catalogue
from eke.config.schema import Config
from eke.hardware import Device, detect, usable_cores
from eke.hardware.cpu import cpu_name, memory_limit
from eke.hardware.fingerprint import PACKAGES, installed_versions
from eke.hardware.nvidia import GpuReport, GpuState, report_gpus
from eke.models.families import family_of
from eke.plan.record import EXIT_OK
from eke.rules import RuleInputs, check
from eke.rules.tracker import has_wandb_key

LEFT_OUT = ("data", "task", "batch", "schedule", "hardware", "recipe", "experiment", "sweep")
"""Groups that do not depend on the machine, or need a user's path."""

NEEDS_MORE = {("model", "pretrained")}
"""Options without a default for a required value."""


@dataclass(frozen=True)
class _OptionFinding:
    """Result of the rules for one option on this machine, with defaults everywhere else."""

    group: str
    option: str
    usable: bool
    why: str = ""
    """Problem or warning of the option, "" if there is none."""
    fix: str = ""
    overrides: tuple[str, ...] = ()
    """Fix as overrides, possibly empty."""


def find_options(device: Device) -> tuple[_OptionFinding, ...]:
    """Check the options that depend on the machine with the rules for runs."""
    catalogue = make_catalogue()
    base = compose(["tracker=none"]).config  # the default tracker's package may be missing
    # Problems of all options, for example a full disk.
    everywhere = {
        problem.id for problems in check(RuleInputs(base, device)) for problem in problems
    }
    findings = []
    pairs = [
        (g, o) for g, options in catalogue.options.items() if g not in LEFT_OUT for o in options
    ]
    for group, option in (pair for pair in pairs if pair not in NEEDS_MORE):
        refused, warned = check(RuleInputs(_with_option(catalogue, base, group, option), device))
        own = [p for p in (*refused, *warned) if p.id not in everywhere][:1]
        usable = not any(problem in refused for problem in own)
        words = [(problem.why, str(problem.fix), problem.overrides) for problem in own]
        findings.append(_OptionFinding(group, option, usable, *next(iter(words), ())))
    return tuple(findings)


def _with_option(catalogue: Catalogue, base: Config, group: str, option: str) -> Config:
    """Return the default configuration with another option. Hydra would take 0.1 s."""
    config = copy.deepcopy(base)
    setattr(config, group, _section(catalogue, group, option))
    tasks = family_of(config).tasks
    if config.task.option not in tasks:
        config.task = _section(catalogue, "task", tasks[0])
    return config


def _section(catalogue: Catalogue, group: str, option: str) -> Any:
    """Return the values of an option as its schema class."""
    schema = OmegaConf.structured(catalogue.schema_class(group, option))
    merged = OmegaConf.merge(schema, catalogue.values(group, option))
    for key in OmegaConf.missing_keys(merged):
        OmegaConf.update(merged, key, "runs")  # the folder of offload=nvme
    return OmegaConf.to_object(merged)


_TIMEOUT_S = 60.0
"""Time limit in seconds. Importing torch takes 2 s, but far longer from a cold network disk."""

_QUESTIONS = """
import json, torch
cuda = torch.cuda.is_available()
found = {
    "version": torch.__version__,
    "built_for_cuda": torch.version.cuda,
    "cuda_available": cuda,
    "num_gpus": torch.cuda.device_count() if cuda else 0,
    "cudnn": torch.backends.cudnn.version() if cuda else None,
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
    "threads": torch.get_num_threads(),
    "cpu_capability": torch.backends.cpu.get_cpu_capability(),
}
print("\\n" + json.dumps(found))
"""


def ask_torch(questions: str = _QUESTIONS) -> subprocess.Popen[str]:
    """Query torch in another process, so that a crash or slow import does not stop the report."""
    return subprocess.Popen(
        [sys.executable, SAFE_PATH, "-c", questions],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=child_environment(),
        text=True,
    )


def torch_answer(process: subprocess.Popen[str], timeout_s: float = _TIMEOUT_S) -> dict[str, Any]:
    """Return the properties reported by torch, or `error` with the reason."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"error": f"importing torch took more than {timeout_s:g} s"}
    if process.returncode:
        return {"error": (err.strip().splitlines() or [f"exit code {process.returncode}"])[-1]}
    found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return found


_WANTED = (*PACKAGES, "datasets", "nvidia-ml-py")


def inspect_machine() -> dict[str, Any]:
    """Examine this machine without raising for missing components. Keys as in `--json`."""
    process = ask_torch()
    device = detect()
    options = find_options(device)
    versions = installed_versions(_WANTED)
    runs = user_path("runs")
    folder = next(place for place in (runs, *runs.parents) if place.exists())
    return {
        "os": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
        "missing": [name for name in _WANTED if name not in versions],
        "cpu": cpu_name(),
        "num_cores": usable_cores(),  # of this process, like the memory
        "num_machine_cores": os.cpu_count(),
        "memory_bytes": memory_limit(),
        # In the search order of inductor and torch's extensions.
        "compiler": next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None),
        "runs": str(runs),
        "runs_free_bytes": shutil.disk_usage(folder).free,
        "runs_writable": os.access(folder, os.W_OK),
        "runs_risks": list(_find_risks(runs)),
        "wandb_key": has_wandb_key(),  # without the key itself
        "gpus": report_gpus(),
        "device": device,
        "torch": torch_answer(process),
        "options": options,
    }


def _find_risks(runs: Path) -> Iterator[str]:
    """Yield risks to the runs in a folder from other users, each with its prevention."""
    me = os.geteuid()
    if me == 0:
        yield "root trusts links and folders of every user. Train as another user"
    try:
        mode, found = runs.stat().st_mode, list(os.scandir(runs))
    except OSError:
        return
    if mode & 0o022 and not mode & stat.S_ISVTX:
        fix = f"chmod +t {shlex.quote(str(runs))}"
        yield f"other users can rename and delete runs in {runs} (no sticky bit): {fix}"
    owners = set()
    for entry in found:
        with contextlib.suppress(OSError):
            owners.add(entry.stat(follow_symlinks=False).st_uid)
    if others := ", ".join(map(str, sorted(owners - {me}))):
        yield f"{runs} has folders of other users (uid {others}). Their runs cannot be resumed"


_NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"
"""Sign that becomes a space after the lines are wrapped."""

_LABEL = 14


def render_examination(found: dict[str, Any], width: int = 100) -> str:
    """Format the report, at most `width` columns wide."""
    sections = (
        ("machine", _machine(found)),
        ("software", _software(found)),
        ("GPUs", _gpus(found["gpus"])),
        ("options", _options(found["options"])),
    )
    lines = []
    for title, rows in sections:
        lines += ["", title]
        for label, text in rows:
            start = f"  {label:<{_LABEL - 1}} "
            lines += textwrap.wrap(
                text, max(width, 40), initial_indent=start,
                subsequent_indent=" " * (_LABEL + 2), break_on_hyphens=False,
            ) or [start.rstrip()]  # fmt: skip
    return "\n".join(lines[1:]).replace(_NO_BREAK_SPACE, " ")


def _machine(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "system", f"{found['os']}, Python {found['python']}"
    cores = f"{found['num_cores']} cores usable"
    if found["num_machine_cores"] and found["num_machine_cores"] != found["num_cores"]:
        cores += f" of {found['num_machine_cores']}"
    yield "CPU", f"{found['cpu']}, {cores}"
    memory = format_bytes(found["memory_bytes"]) if found["memory_bytes"] else "unknown"
    yield "memory", f"{memory} for this process, with container limits"
    refused = "" if found["runs_writable"] else ", not writable"
    yield "runs folder", f"{found['runs']}: {format_bytes(found['runs_free_bytes'])} free{refused}"
    for risk in found["runs_risks"]:
        yield "warning", risk
    missing = "none. inductor on a CPU, torchao and offload need one"
    yield "C++ compiler", found["compiler"] or missing
    yield "trains on", found["device"].note


def _software(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    torch = found["torch"]
    if "error" in torch:
        yield "torch", f"fails to start: {torch['error']}"
    else:
        cuda = f"CUDA {torch['built_for_cuda']}" if torch["built_for_cuda"] else "CPU only"
        words = [f"{torch['version']} built for {cuda}"]
        if torch["cuda_available"]:
            words.append(f"detects {torch['num_gpus']} GPUs, cuDNN {torch['cudnn']}")
            words.append(f"NCCL {torch['nccl']}")
        yield "torch", ", ".join(words)
    rest = {name: version for name, version in found["versions"].items() if name != "torch"}
    yield (
        "installed",
        "  ".join(f"{name}{_NO_BREAK_SPACE}{version}" for name, version in rest.items()),
    )
    yield "not installed", "  ".join(found["missing"]) or "none"
    key = "found" if found["wandb_key"] else "none. Only tracker.mode=online needs one"
    yield "W&B API key", key


def _gpus(report: GpuReport) -> Iterator[tuple[str, str]]:
    if report.absent:
        yield "none", report.absent
        return
    yield "driver", f"{report.driver or 'unknown'}, up to CUDA {report.cuda_driver or 'unknown'}"
    for gpu in report.gpus:
        yield f"GPU {gpu.index}", ", ".join(_gpu(gpu))


def _gpu(gpu: GpuState) -> Iterator[str]:
    yield gpu.name
    if gpu.capability:
        yield "compute capability {}.{}".format(*gpu.capability)
    if gpu.used_bytes is not None and gpu.memory_bytes is not None:
        yield f"{format_bytes(gpu.used_bytes)} of {format_bytes(gpu.memory_bytes)} in use"
    amounts = (
        ("", gpu.power_w, gpu.power_limit_w, "W"),
        ("SM clock ", gpu.sm_clock_mhz, gpu.max_sm_clock_mhz, "MHz"),
        ("", gpu.temperature_c, None, "degrees Celsius"),
        ("", gpu.utilisation_percent, None, "% busy"),
        ("", gpu.num_processes, None, "processes"),
    )
    for what, now, most, unit in amounts:
        if now is not None:
            limit = f" of {most:.0f}" if most is not None else ""
            yield f"{what}{now:.0f}{limit} {unit}"
    if gpu.throttled_by:
        yield f"slowed down by {', '.join(gpu.throttled_by)}"


def _options(findings: tuple[_OptionFinding, ...]) -> Iterator[tuple[str, str]]:
    for group in dict.fromkeys(finding.group for finding in findings):
        mine = [finding for finding in findings if finding.group == group]
        yield group, "  ".join(each.option for each in mine if each.usable) or "none"
        for each in mine:
            if each.why:
                verdict = "warning" if each.usable else "invalid"
                fix = f" -> {each.fix}" if each.fix else ""
                yield "", f"{verdict} {each.option}: {each.why}{fix}"


_DESCRIPTION = """\
Reports GPUs, cores, memory and packages of this machine, and for every group the options that
can run on it. It does not train or change anything.
"""


def main(arguments: Sequence[str]) -> int:
    """Print the report. Return 0, or 2 for invalid arguments."""
    parser = make_parser("doctor", _DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    found = inspect_machine()
    if options.json:
        text = json.dumps(found, indent=2, default=dataclasses.asdict)
    else:
        text = render_examination(found, min(100, shutil.get_terminal_size().columns))
    sys.stdout.write(text + "\n")
    return EXIT_OK
