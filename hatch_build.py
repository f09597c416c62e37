"""Build hook: the URLs of the package, from the repository that builds it."""

import os
import subprocess
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Urls(MetadataHookInterface):
    """Set `urls` from GitHub Actions, else from git's remote `origin` if it is on the web."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the URLs to the metadata, none if the repository has no address."""
        address = _repository(self.root)
        pages = {"Documentation": "docs/index.md", "Changelog": "CHANGELOG.md"}
        metadata["urls"] = {
            "Repository": address,
            "Issues": f"{address}/issues",
            **{name: f"{address}/blob/main/{page}" for name, page in pages.items()},
        } if address else {}  # fmt: skip


def _repository(root: str) -> str:
    if name := os.environ.get("GITHUB_REPOSITORY"):
        return f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{name}"
    if not (Path(root) / ".git").exists():
        return ""
    command = ["git", "-C", root, "config", "--get", "remote.origin.url"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # git is not installed
        return ""
    address = found.stdout.strip().removesuffix(".git")
    return address if address.startswith("https://") and "@" not in address else ""
