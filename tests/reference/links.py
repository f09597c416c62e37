"""Links and anchors of markdown pages."""

import re
from pathlib import Path


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE):
        kept = "".join(c for c in heading.lower() if c.isalnum() or c in " -_")
        found.add(kept.strip().replace(" ", "-"))
    return found | set(re.findall(r'<a id="([^"]+)"', page.read_text()))


def links(page: Path) -> list[str]:
    """Targets of a page's links within the repository, with their anchors."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return [
        target
        for target in re.findall(r"\]\(([^)\s]+)\)", text)
        if not re.match(r"[a-z]+:", target)
    ]
