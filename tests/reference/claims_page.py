"""notes/claims.md: what the five guides say, with a verdict and its evidence."""

from collections import Counter
from pathlib import Path

from reference.claims import (
    VERDICTS,
    Claim,
    Evidence,
    Guide,
    Section,
    read_answers,
    read_guides,
    read_sections,
)
from reference.claims_anatomy import anatomy_table
from reference.claims_evidence import provenance, shown
from reference.claims_tables import answers_table, measured_table
from reference.gpu import where_seen

HEAD = """\
# What the guides say, and what is true of it

Generated from `notes/claims/*.yaml` and the records in `results/`; change those and run
`EKE_UPDATE=1 pytest tests/conf/test_claims.py`. No number of eke's is entered by hand: each is read
from the record named with it.

Quotations are short; the rest is paraphrase. A number is a GPU's only where a record of one
is named. A CPU's records show which bytes a technique keeps in tensors: those of weights,
gradients and states are the same on a GPU, those of activations depend on its kernels. They say
nothing about speed on a GPU.
"""


def claims_page(results: Path) -> str:
    """The whole page, ending in a newline."""
    guides, sections = read_guides(), read_sections()
    parts = [
        HEAD,
        _guides(guides),
        _verdicts(sections),
        answers_table(read_answers(), guides, results),
        measured_table(results),
        *(_section(section, guides, results) for section in sections),
        _records(sections),
    ]
    return "\n".join(parts)


def _guides(guides: list[Guide]) -> str:
    lines = ["## The five guides\n"]
    lines += [f"- **{g.key}**: [{g.title}]({g.url}), {g.edition}" for g in guides]
    return "\n".join(lines) + "\n"


def _verdicts(sections: list[Section]) -> str:
    counts = Counter(claim.verdict for section in sections for claim in section.claims)
    lines = ["## Verdicts\n", "| verdict | what it means | claims |", "| --- | --- | --- |"]
    lines += [f"| {name} | {meaning} | {counts[name]} |" for name, meaning in VERDICTS.items()]
    return "\n".join([*lines, f"| | all | {counts.total()} |"]) + "\n"


def _section(section: Section, guides: list[Guide], results: Path) -> str:
    names = [
        f"{heading} ({guide.key})"
        for guide in guides
        for heading, key in guide.headings.items()
        if key == section.key
    ]
    lines = [f"## {section.title}\n", f"In the guides: {'; '.join(names)}.\n"]
    lines += [f"{section.about}\n"] if section.about else []
    lines += [anatomy_table(results)] if section.key == "anatomy" else []
    lines += [_claim(claim, results) for claim in section.claims]
    return "\n".join(lines) + "\n"


def _claim(claim: Claim, results: Path) -> str:
    lines = [
        f"- **{claim.verdict}** · {claim.kind} · {', '.join(claim.guides)}: {claim.says}",
        f"  {claim.why}",
    ]
    if claim.evidence:
        lines.append(f"  *Evidence:* {'; '.join(_evidence(each) for each in claim.evidence)}.")
    if claim.seen:
        found = [f"`{option}` {where_seen(option, results)}" for option in claim.seen]
        lines.append(f"  *Seen:* {'; '.join(found)}.")
    if claim.measure:
        lines.append(f"  *To measure:* `{claim.measure}`")
    return "\\\n".join(lines)


def _evidence(evidence: Evidence) -> str:
    if evidence.record:
        file = evidence.record.partition("#")[0]
        return f"{shown(evidence)} ([{Path(file).stem}](../{file}))"
    if evidence.test:
        file, _, name = evidence.test.partition("::")
        return f"[{name}](../{file})"
    return f"<{evidence.source}>"


def _records(sections: list[Section]) -> str:
    files = {
        each.record.partition("#")[0]
        for section in sections
        for claim in section.claims
        for each in claim.evidence
        if each.record
    }
    lines = [
        "## The records\n",
        "| record | machine | last measured | libraries |",
        "| --- | --- | --- | --- |",
    ]
    for file in sorted(files):
        made = provenance(file)
        lines.append(f"| [{Path(file).name}](../{file}) | {made.machine} | {made.date} "
                     f"| {made.libraries} |")  # fmt: skip
    return "\n".join(lines) + "\n"
