"""The split of a step that benchmarks/anatomy.py measured, as a table."""

import json
from pathlib import Path
from typing import Any

KINDS = {
    "contraction": "contractions",
    "normalisation": "normalisations",
    "elementwise": "element-wise",
    "other": "other",
}


def anatomy_table(results: Path) -> str:
    """Every full-size `anatomy_*.json`: median share of each kind, and backward over forward.

    In brackets the 10th and 90th percentile of the steps.
    """
    heads = [*(f"{name} (backward/forward)" for name in KINDS.values()), "all, backward/forward"]
    lines = [
        f"| machine | model | {' | '.join(heads)} |",
        "| --- " * (len(heads) + 2) + "|",
    ]
    for file in sorted(results.glob("anatomy_*.json")):
        content = json.loads(file.read_text())
        if content["size"]["name"] != "full":
            continue  # too small: the host's own time is most of it
        device = content["hardware"]["device"]
        for case in content["cases"].values():
            name = f"{case['model']}, attention={case['attention']}"
            lines.append(f"| {device} | {name} | {' | '.join(_cells(case))} |")
    return "\n".join(lines) + "\n"


def _cells(case: dict[str, Any]) -> list[str]:
    ratios = case["backward_over_forward"]
    cells = []
    for kind in KINDS:
        share, ratio = case["share"][kind], ratios.get(kind)
        text = f"{share['median']:.1%} [{share['p10']:.1%} {share['p90']:.1%}]"
        cells.append(f"{text} ({ratio['median']:.2f})" if ratio else text)
    whole = ratios["all"]
    return [*cells, f"{whole['median']:.2f} [{whole['p10']:.2f} {whole['p90']:.2f}]"]
