"""MkDocs hooks: links that leave docs/ become text, and flowcharts become pictures."""

import posixpath
import re
from typing import Any

from diagrams import draw


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace each link that leaves docs/ by its text, and each flowchart by an SVG."""
    folder = posixpath.dirname(page.file.src_uri)

    def keep_text(match: re.Match[str]) -> str:
        outside = posixpath.normpath(posixpath.join(folder, match[2])).startswith("..")
        return match[1] if outside else match[0]

    markdown = re.sub(r"\[([^\]]*)\]\((\.\.[^)\s]*)\)", keep_text, markdown)
    return re.sub(r"^```mermaid\n(.*?)^```$", _picture, markdown, flags=re.DOTALL | re.MULTILINE)


def _picture(match: re.Match[str]) -> str:
    return f'<div class="diagram">{draw(match[1])}</div>'
