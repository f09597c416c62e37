"""Draw the picture of README from a report's figures.

    python tools/report_picture.py runs/report.json    # keep its figures, and draw
    python tools/report_picture.py                     # draw again

Input: `report.json` of `eke report`. Output: results/readme_report.json and docs/assets/report.svg.
"""

import json
import sys
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "results" / "readme_report.json"
PICTURE = ROOT / "docs" / "assets" / "report.svg"
MEASURES = {
    "speed": "throughput.samples_per_s",
    "memory": "memory.measured.peak_allocated_bytes",
}
COLOURS = {"speed": "#3568a8", "memory": "#c4762b"}
WIDTH, ROW, LEFT, SCALE = 720, 44, 210, 380


def read_figures(report: dict[str, Any]) -> dict[str, Any]:
    """Return the ratios to the baseline of each configuration, and a caption."""
    rows = report["configurations"]
    (base,) = [row["estimates"] for row in rows if row["is_baseline"]]
    tested = [row["ratios"].get(MEASURES["speed"], {}) for row in rows if not row["is_baseline"]]
    is_decided = all(each.get("decision", "not decided") != "not decided" for each in tested)
    found = []
    for row in rows:
        ratios = {n: row["estimates"][k]["value"] / base[k]["value"] for n, k in MEASURES.items()}
        if not is_decided:
            ratios["speed"] = None
        found.append({"name": row["configuration"], **ratios})
    caption = report["verdict"][0]
    if not is_decided:
        least = min(found, key=lambda each: each["memory"])
        caption = (
            f"{least['name']} needs {least['memory']:.2f}x the memory of {found[0]['name']}. "
            "Speeds are not shown: the repeats did not decide all of them."
        )
    machine = report["machines"][0]["facts"]["device"]
    command = " ".join(report["commands"][0])
    return {"command": command, "device": machine, "caption": caption, "rows": found}


def draw(figures: dict[str, Any]) -> str:
    """Return an SVG with two bars per configuration: speed and memory, baseline = 1."""
    rows, high = figures["rows"], max(r[n] or 0 for r in figures["rows"] for n in MEASURES)
    height = 64 + ROW * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'font-family="sans-serif" font-size="14">',
        f"<title>{escape(figures['caption'])}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for at, name in enumerate(n for n in MEASURES if rows[0][n] is not None):
        x = LEFT + 110 * at
        parts.append(f'<rect x="{x}" y="14" width="12" height="12" fill="{COLOURS[name]}"/>')
        parts.append(f'<text x="{x + 18}" y="25" fill="#222">{name}</text>')
    for number, row in enumerate(rows):
        y = 42 + ROW * number
        parts.append(
            f'<text x="{LEFT - 10}" y="{y + 20}" text-anchor="end" fill="#222">'
            f"{escape(row['name'])}</text>"
        )
        for at, name in enumerate(MEASURES):
            if row[name] is None:
                continue
            length, top = row[name] / high * SCALE, y + 16 * at
            parts.append(
                f'<rect x="{LEFT}" y="{top}" width="{length:.1f}" height="13" '
                f'fill="{COLOURS[name]}"/><text x="{LEFT + length + 6:.1f}" y="{top + 12}" '
                f'fill="#222">{row[name]:.2f}x</text>'
            )
    at = LEFT + SCALE / high
    parts.append(f'<path d="M{at:.1f} 36V{height - 16}" stroke="#888" stroke-dasharray="3 3"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(arguments: list[str]) -> None:
    """Store the figures of a report if one is given, and draw the picture."""
    for path in arguments:
        figures = read_figures(json.loads(Path(path).read_text()))
        FIGURES.write_text(json.dumps(figures, indent=2) + "\n")
    PICTURE.write_text(draw(json.loads(FIGURES.read_text())))


if __name__ == "__main__":
    main(sys.argv[1:])
