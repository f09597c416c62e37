"""docs/reference/rules.md: each rule with a command that breaks it and the answer."""

from collections import Counter
from pathlib import Path

import pytest
from unit.rules.cases import CASES, facts_of, prepare
from unit.rules.necessity import SHOWN, Kind

from eke.rules import RULES, Rule, Verdict, check

HEAD = """\
# Rules

What eke knows to be impossible, unsafe or useless, before anything is loaded. Each rule is shown
here by a command that breaks it, with what eke answers, and has a test that types the fix. What
shows that it is needed is said of each (`tests/unit/rules/necessity.py`). Generated:
`EKE_UPDATE=1 pytest tests/conf/test_reference.py`.

One rule more, `does_not_fit`, looks at the finished plan: [forecast](../how-to/forecast.md).
"""

TITLES = {
    Verdict.impossible: "Incompatible, or something required is missing: refused",
    Verdict.unsafe: "Unsafe: runs, with a warning",
    Verdict.no_benefit: "No benefit: runs as asked for, and saves nothing, with a warning",
    Verdict.no_effect: "No effect: runs as if it had not been asked for, with a warning",
}

DEPENDS_ON_THE_MACHINE = {"runs_has_space", "more_workers_than_cores", "more_processes_than_cores"}
"""Rules whose reason has a number of this machine in it."""


def rules_page(tmp: Path) -> str:
    """The whole page, ending in a newline; `tmp` is a folder for what the commands name."""
    parts = [HEAD, _evidence()]
    for verdict in Verdict:
        rules = {rule.id: rule for rule in RULES if rule.verdict is verdict}  # one per group, some
        if rules:
            parts.append(f"## {TITLES[verdict]}\n")
            parts += [_section(rule, tmp / rule.id) for rule in rules.values()]
    return "\n".join(parts)


def _evidence() -> str:
    """How many rules are shown to be needed in which way."""
    counts = Counter(shown.kind for shown in SHOWN.values())
    rows = [f"| {kind.value} | {counts[kind]} |" for kind in Kind if counts[kind]]
    return "\n".join(["| Shown to be needed by | rules |", "|---|---|", *rows, ""])


def _shown_by(rule: Rule) -> str:
    """What happens without a rule, and the test that sees it."""
    shown = SHOWN[rule.id]
    parts = [shown.kind.value, shown.reason, f"`{shown.test}`" if shown.test else ""]
    return "; ".join(part for part in parts if part)


def _section(rule: Rule, tmp: Path) -> str:
    tmp.mkdir()
    with pytest.MonkeyPatch.context() as monkeypatch:
        prepare(rule.id, tmp, monkeypatch)
        overrides, device = CASES[rule.id]
        refused, warned = check(facts_of(CASES[rule.id], tmp))
        problem = next(p for p in refused + warned if p.id == rule.id)
    typed = " ".join(overrides).format(tmp="FOLDER")
    planned = "a CPU" if device.kind == "cpu" else device.name
    lines = [f"### {rule.id.replace('_', ' ')}\n", f"`{typed}` on {planned}\n"]
    if rule.id not in DEPENDS_ON_THE_MACHINE:
        lines.append(f"- **{problem.key} = {problem.value}** {problem.why}")
        lines.append(f"- **instead** `{problem.fix}`")
    lines.append(f"- **source** {_linked(rule.source)}")
    if rule.versions:
        lines.append(f"- **holds for** {rule.versions}")
    lines.append(f"- **shown by** {_shown_by(rule)}")
    return "\n".join(lines).replace(str(tmp), "FOLDER") + "\n"


def _linked(text: str) -> str:
    return " ".join(f"<{w}>" if w.startswith("https://") else w for w in text.split())
