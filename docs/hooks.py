"""MkDocs hook: the site holds docs/ only, so links to other files of the repository become text."""

import posixpath
import re
from typing import Any


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace each link that leaves docs/ by its text."""
    folder = posixpath.dirname(page.file.src_uri)

    def keep_text(match: re.Match[str]) -> str:
        outside = posixpath.normpath(posixpath.join(folder, match[2])).startswith("..")
        return match[1] if outside else match[0]

    return re.sub(r"\[([^\]]*)\]\((\.\.[^)\s]*)\)", keep_text, markdown)
