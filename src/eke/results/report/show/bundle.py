"""Vega, Vega-Lite and vega-embed as one script for a page that loads nothing.

vl-convert carries them; putting them together takes seconds, so that the result is kept.
"""

import hashlib
from importlib import metadata
from pathlib import Path
from typing import Any

from eke.common.files import own_folder, read_text, write_atomic
from eke.data.sources import cache_folder


def vega_script() -> str:
    """The script; it sets `window.vegaEmbed`."""
    version = metadata.version("vl-convert-python")
    path = cache_folder() / "report" / f"vega-{version}.js"
    script = _kept(path)
    if script is None:
        import vl_convert  # 80 MB on disk, and needed for the page alone

        bundle: Any = vl_convert.javascript_bundle  # its own types ask for a snippet (1.9)
        script = str(bundle())
        _keep(path, script)
    # Inside of a page, these would end the script.
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _kept(path: Path) -> str | None:
    """What is kept, if it is whole: its hash is its first line."""
    try:
        digest, _, script = read_text(path).partition("\n")
    except (OSError, ValueError):
        return None
    return script if digest == _digest(script) else None


def _keep(path: Path, script: str) -> None:
    try:
        own_folder(path.parent)
        write_atomic(path, f"{_digest(script)}\n{script}")
    except OSError:
        return  # made anew another time


def _digest(script: str) -> str:
    return hashlib.sha256(script.encode()).hexdigest()
