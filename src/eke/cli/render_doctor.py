"""An examination as text for a terminal."""

import textwrap
from collections.abc import Iterator

from eke.cli.examination import Examination
from eke.cli.probe_options import OptionFinding
from eke.common.units import format_bytes
from eke.hardware.gpus import GpuReport, GpuState

GLUE = "\N{NO-BREAK SPACE}"
"""Becomes a blank once the lines are broken."""

LABEL = 14
"""Columns of what a line is about."""


def render(found: Examination, width: int = 100) -> str:
    """Sections machine, packages, GPUs and options, none wider than `width` columns."""
    sections = (
        ("machine", _machine(found)),
        ("software", _software(found)),
        ("GPUs", _gpus(found.gpus)),
        ("options", _options(found.options)),
    )
    lines = []
    for title, rows in sections:
        lines += ["", title]
        for label, text in rows:
            lines += _wrapped(label, text, width)
    return "\n".join(lines[1:])


def _wrapped(label: str, text: str, width: int) -> list[str]:
    start = f"  {label:<{LABEL}}"
    if len(label) >= LABEL:
        start = f"  {label} "
    rest = " " * (LABEL + 2)
    # Rows of a matrix keep their columns.
    if "\t" in text:
        return [start + text.replace("\t", "")]
    lines = textwrap.wrap(
        text, max(width, 40), initial_indent=start, subsequent_indent=rest, break_on_hyphens=False
    )
    return [line.replace(GLUE, " ") for line in lines] or [start.rstrip()]


def _machine(found: Examination) -> Iterator[tuple[str, str]]:
    yield "system", f"{found.os}, Python {found.python}"
    cores = f"{found.num_cores} cores usable"
    if found.num_machine_cores and found.num_machine_cores != found.num_cores:
        cores += f" of {found.num_machine_cores}"
    yield "CPU", f"{found.cpu}, {cores}"
    memory = format_bytes(found.memory_bytes) if found.memory_bytes else "unknown"
    yield "memory", f"{memory} for this process, container limits included"
    free = format_bytes(found.runs_free_bytes) if found.runs_free_bytes else "unknown"
    refused = "" if found.runs_writable else ", and may not be written"
    yield "runs folder", f"{found.runs}: {free} free{refused}"
    for risk in found.runs_risks:
        yield "warning", risk
    yield "C++ compiler", found.compiler or "none: inductor on a CPU, torchao and offload need one"
    yield "trains on", found.device.note


def _software(found: Examination) -> Iterator[tuple[str, str]]:
    torch = found.torch
    if "error" in torch:
        yield "torch", f"does not start: {torch['error']}"
    else:
        cuda = f"CUDA {torch['built_for_cuda']}" if torch["built_for_cuda"] else "CPU only"
        words = [f"{torch['version']} built for {cuda}"]
        if torch["cuda_available"]:
            words.append(f"sees {torch['num_gpus']} GPUs, cuDNN {torch['cudnn']}")
            words.append(f"NCCL {torch['nccl']}")
        yield "torch", ", ".join(words)
    rest = {name: version for name, version in found.versions.items() if name != "torch"}
    yield "installed", "  ".join(f"{name}{GLUE}{version}" for name, version in rest.items())
    yield "not installed", "  ".join(found.missing) or "nothing that eke can use"
    key = "found" if found.wandb_key else "none: tracker.mode=online needs one, offline does not"
    yield "W&B API key", key


def _gpus(report: GpuReport) -> Iterator[tuple[str, str]]:
    if report.absent:
        yield "none", report.absent
        return
    yield "driver", f"{report.driver or 'unknown'}, up to CUDA {report.cuda_driver or 'unknown'}"
    for gpu in report.gpus:
        yield f"GPU {gpu.index}", "; ".join(_gpu(gpu))
    if len(report.gpus) > 1:
        yield from _matrix(report)


def _gpu(gpu: GpuState) -> Iterator[str]:
    """What is known of one GPU, clause by clause."""
    yield gpu.name
    if gpu.capability:
        yield "compute capability {}.{}".format(*gpu.capability)
    amounts = (
        ("", gpu.used_bytes, gpu.memory_bytes, format_bytes, "in use"),
        ("", gpu.power_w, gpu.power_limit_w, _whole, "W"),
        ("SM clock ", gpu.sm_clock_mhz, gpu.max_sm_clock_mhz, _whole, "MHz"),
        ("", gpu.temperature_c, None, _whole, "degrees Celsius"),
        ("", gpu.utilisation_percent, None, _whole, "% busy"),
        ("", gpu.num_processes, None, _whole, "processes"),
    )
    for what, now, most, show, unit in amounts:
        if now is not None:
            limit = f" of {show(most)}" if most is not None else ""
            yield f"{what}{show(now)}{limit} {unit}"
    for name, state in (("persistence mode", gpu.persistence), ("ECC", gpu.ecc)):
        if state is not None:
            yield f"{name} {'on' if state else 'off'}"
    if gpu.throttled_by:
        yield f"slowed down by {', '.join(gpu.throttled_by)}"


def _whole(number: float) -> str:
    return f"{number:.0f}"


def _matrix(report: GpuReport) -> Iterator[tuple[str, str]]:
    """As `nvidia-smi topo -m`: NV4 is four NVLinks; SYS, NODE, PHB, PXB, PIX are PCIe paths."""
    links, numbers = report.links or {}, [gpu.index for gpu in report.gpus]
    yield "", "\t" + "".join(f"{f'GPU {n}':>7}" for n in numbers)
    for one in numbers:
        cells = ["X" if one == other else links.get(f"{one}-{other}", "?") for other in numbers]
        yield f"GPU {one}", "\t" + "".join(f"{cell:>7}" for cell in cells)
    without = [pair for pair, works in (report.p2p or {}).items() if not works]
    told = f"not between {', '.join(without)}" if without else "between all"
    yield "peer access", told


def _options(findings: tuple[OptionFinding, ...]) -> Iterator[tuple[str, str]]:
    groups = dict.fromkeys(finding.group for finding in findings)
    for group in groups:
        mine = [finding for finding in findings if finding.group == group]
        usable = [finding.option for finding in mine if finding.usable and not finding.beside]
        yield group, "  ".join(usable) or "none"
        for finding in mine:
            if finding.beside:
                yield "", f"{finding.option} with {' '.join(finding.beside)}"
            if finding.why:
                verdict = "mind" if finding.usable else "not"
                fix = f" -> {finding.fix}" if finding.fix else ""
                yield "", f"{verdict} {finding.option}: {finding.why}{fix}"
