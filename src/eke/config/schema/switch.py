"""A choice that may be left to the plan."""

from enum import Enum


class Switch(Enum):
    """Leave it to the plan, or force it."""

    auto = "auto"
    on = "on"
    off = "off"
