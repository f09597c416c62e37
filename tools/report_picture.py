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
    """Return the ratios to the baseline of each configuration, and the report's verdict."""
    rows = report["configurations"]
    (base,) = [row["estimates"] for row in rows if row["is_baseline"]]
    found = [
        {"name": row["configuration"], "repeats": row["outcomes"]["ok"]}
        | {n: row["estimates"][key]["value"] / base[key]["value"] for n, key in MEASURES.items()}
        for row in rows
    ]
    machine = report["machines"][0]["facts"]["device"]
    command = " ".join(report["commands"][0])
    return {"command": command, "device": machine, "verdict": report["verdict"], "rows": found}


def draw(figures: dict[str, Any]) -> str:
    """Return an SVG with two bars per configuration: speed and memory, baseline = 1."""
    rows, high = figures["rows"], max(max(r["speed"], r["memory"]) for r in figures["rows"])
    height = 64 + ROW * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'font-family="sans-serif" font-size="14">',
        f"<title>{escape(figures['verdict'][0])}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for at, name in enumerate(MEASURES):
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
