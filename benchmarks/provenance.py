"""What every record of a benchmark says of where it was made."""

import os
from typing import Any

from eke.hardware import environment
from eke.hardware.cpu import cpu_name


def provenance() -> dict[str, Any]:
    """Time, Python and versions of libraries; JSON-ready."""
    where = environment()
    return {key: where[key] for key in ("time", "python", "versions")}


def machine() -> dict[str, Any]:
    """The processor, its cores and how busy they have been; JSON-ready."""
    load = round(os.getloadavg()[0], 1)
    return {"processor": cpu_name(), "cores": os.cpu_count(), "load_1min": load}
