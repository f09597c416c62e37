"""MkDocs hooks: links that leave docs/ become text, flowcharts pictures, guides come first."""

import json
import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

from diagrams import draw

_BOOSTS = {
    "troubleshooting.md": 8.0,
    "what-to-type.md": 8.0,
    "coming-from.md": 4.0,
    "how-to/interrupt.md": 8.0,
    "how-to/": 4.0,
    "tutorial/": 2.0,
    "installation.md": 2.0,
    "reference/": 0.3,
    "explanation/": 0.5,
    "architecture.md": 0.5,
}
"""Page or folder -> factor of its rank in the search. A task is asked more often than a key."""

_KEYS_IN, _KEY_BOOST = "reference/configuration/", 5.0
_keys: dict[str, dict[str, str]] = {}
"""Address of a key's row -> its name and text."""

_NOT_IN_SEARCH = ("reference/rules.md",)


def on_config(config: Any) -> Any:
    """Link each page to its source in the repository that pyproject.toml names.

    `repo_url` would make the theme ask GitHub for stars, so only `edit_uri` is set.
    """
    project = Path(config.config_file_path).with_name("pyproject.toml")
    urls = tomllib.loads(project.read_text())["project"].get("urls", {})
    repository = urls.get("Repository", urls.get("Source", ""))
    if repository:
        config.edit_uri = f"{repository.removesuffix('.git').rstrip('/')}/edit/main/docs/"
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rank the page in the search, and replace links that leave docs/ and flowcharts."""
    name = page.file.src_uri
    boost = next((value for place, value in _BOOSTS.items() if name.startswith(place)), 1.0)
    page.meta.setdefault("search", {"boost": boost, "exclude": name in _NOT_IN_SEARCH})
    folder = posixpath.dirname(name)

    def keep_text(match: re.Match[str]) -> str:
        outside = posixpath.normpath(posixpath.join(folder, match[2])).startswith("..")
        return match[1] if outside else match[0]

    markdown = re.sub(r"\[([^\]]*)\]\((\.\.[^)\s]*)\)", keep_text, markdown)
    return re.sub(r"^```mermaid\n(.*?)^```$", _picture, markdown, flags=re.DOTALL | re.MULTILINE)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Give each key of the reference an anchor, and remember its row for the search."""
    if not page.file.src_uri.startswith(_KEYS_IN):
        return html

    def anchored(match: re.Match[str]) -> str:
        key, texts = match[1], re.sub(r"<[^>]+>|\s+", " ", match[2])
        _keys[f"{page.url}#{key}"] = {"title": key, "text": texts}
        return match[0].replace("<td>", f'<td id="{key}">', 1)

    row = r"(?<=<tr>\n)<td><code>([a-z_]\w*(?:\.\w+)*)</code></td>\n(<td>.*?)</tr>"
    return re.sub(row, anchored, html, flags=re.DOTALL)


def on_post_build(config: Any, **_: Any) -> None:
    """Add the keys to the search, before the plugin `offline` reads its index."""
    path = Path(config.site_dir) / "search" / "search_index.json"
    index = json.loads(path.read_text())
    index["docs"] += [
        {"location": place, **texts, "boost": _KEY_BOOST} for place, texts in _keys.items()
    ]
    path.write_text(json.dumps(index))


def _picture(match: re.Match[str]) -> str:
    return f'<div class="diagram">{draw(match[1])}</div>'
