"""What the installed torch was built for, read from its files: importing it takes seconds."""

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TorchBuild:
    """One installed build of torch."""

    version: str
    """`2.13.0+cpu`"""
    cuda: str | None
    """CUDA version it was built with; None for a build without CUDA."""


def torch_build() -> TorchBuild | None:
    """The installed torch; None when there is none or its `version.py` reads unlike any known."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.origin:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    return parse_version_file(text)


def parse_version_file(text: str) -> TorchBuild | None:
    """Read torch's `version.py`: `__version__ = '2.13.0+cpu'`, `cuda: Optional[str] = None`."""
    version = re.search(r"^__version__\s*(?::[^=]*)?=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    cuda = re.search(r"^cuda\s*(?::[^=]*)?=\s*(?:None|['\"]([^'\"]*)['\"])", text, re.MULTILINE)
    if version is None or cuda is None:
        return None
    return TorchBuild(version.group(1), cuda.group(1) or None)
