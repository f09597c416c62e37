"""Where each option has been seen running: the records that benchmarks/techniques.py wrote."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reference.figures import figures

PLAIN = "precision=fp32"
"""The run that the others are compared with: every group at its default."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Seen:
    """One file of records: a machine and what ran there."""

    device: str
    """`CPU`, or the GPU's name."""
    versions: dict[str, str]
    outcomes: dict[str, Row]
    """`group=option` -> its record, as benchmarks/techniques.py writes it."""

    def row(self, command: str) -> Row:
        """The record of an option; empty when there is none."""
        return self.outcomes.get(command, {})

    def ran(self, command: str) -> bool:
        """Whether a run with this option ended well there."""
        return self.row(command).get("outcome") == "ok"

    def did_nothing(self, command: str) -> bool:
        """Whether a rule says that the option does nothing there, and the run shows nothing."""
        group = command.partition("=")[0]
        idle = [each["path"] for each in self.row(command).get("without_effect", ())]
        if group in idle:
            return True
        own = any(path.startswith(f"{group}.") for path in idle)
        return own and not figures(self.row(command), self.row(PLAIN))


def read_seen(folder: Path) -> list[Seen]:
    """Every `techniques_*.json`, CPUs first."""
    found = []
    for file in sorted(folder.glob("techniques_*.json"), key=lambda f: ("cpu" not in f.name, f)):
        content = json.loads(file.read_text())
        found.append(Seen(content["device"], content["versions"], content["outcomes"]))
    return found


def describe(command: str, seen: list[Seen]) -> str:
    """`ran on CPU`, `ran on CPU (without effect there), NVIDIA H200`, or `never seen running`."""
    devices = [
        each.device + (" (without effect there)" if each.did_nothing(command) else "")
        for each in seen
        if each.ran(command)
    ]
    return f"ran on {', '.join(devices)}" if devices else "never seen running"


def observations(command: str, seen: list[Seen]) -> list[str]:
    """Per machine a line of what the run saw of the option, or of why it could not run there."""
    lines = []
    for each in seen:
        row = each.row(command)
        if each.ran(command):
            always = "optimizer_bytes_per_parameter" if command.startswith("optimizer=") else ""
            found = figures(row, each.row(PLAIN), always)
            beside = f" (with `{' '.join(row['with'])}`)" if row["with"] else ""
            idle = [link(rule["rule"]) for rule in row["without_effect"]]
            found += [f"without effect there: {', '.join(idle)}"] if idle else []
            lines += [f"- **On {each.device}**{beside} {'; '.join(found)}"] if found else []
        elif row:
            rules = [link(rule) for rule in row.get("rules", ()) if rule]
            why = ", ".join(rules) or row["reason"]
            lines.append(f"- **On {each.device}** {row['outcome']}: {why}")
    return lines


def link(rule: str) -> str:
    """To the rule's section of docs/reference/rules.md."""
    return f"[{rule.replace('_', ' ')}](rules.md#{rule.replace('_', '-')})"
