"""Words of each page of the site, and how many it may have."""

import re
from pathlib import Path

TOLERANCE = 1.2
"""A page may exceed its budget by a fifth."""

BUDGETS = {
    "index.md": 250,
    "installation.md": 500,
    "what-to-type.md": 900,
    "tutorial/first-run.md": 500,
    "tutorial/afternoon.md": 800,
    "tutorial/classify.md": 450,
    "how-to/data.md": 1200,
    "how-to/forecast.md": 900,
    "how-to/fit.md": 500,
    "how-to/models.md": 1300,
    "how-to/own-code.md": 650,
    "how-to/several-gpus.md": 700,
    "how-to/interrupt.md": 400,
    "how-to/sweeps.md": 1000,
    "how-to/slurm.md": 1000,
    "how-to/report.md": 900,
    "how-to/trackers.md": 600,
    "how-to/editor.md": 300,
    "how-to/security.md": 500,
    "troubleshooting.md": 1500,
    "coming-from.md": 3000,
    "reference/command-line.md": 900,
    "reference/configuration/": 9000,
    "reference/techniques.md": 5000,
    "reference/recipes.md": 500,
    "reference/rules.md": 6000,
    "reference/measured.md": 1500,
    "reference/glossary.md": 450,
    "reference/formats.md": 1200,
    "architecture.md": 800,
    "explanation/": 2500,
}
"""Page or folder of docs/ -> words. A new page brings its budget."""


def words(page: Path) -> int:
    """Words of text and tables. Code blocks and front matter do not count."""
    text = re.sub(r"\A---\n.*?\n---\n", "", page.read_text(), flags=re.DOTALL)
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^(?: {4}|\t).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"<!--.*?-->|\]\([^)]*\)", " ", text, flags=re.DOTALL)
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def budget_of(name: str) -> str | None:
    """Entry of `BUDGETS` for a page, None without one."""
    return next((each for each in BUDGETS if f"{name}/".startswith(f"{each.rstrip('/')}/")), None)
