"""What this machine has, and which options of eke it can run; importable without torch."""

from eke.doctor.examination import Examination, examine
from eke.doctor.render import render

__all__ = ["Examination", "examine", "render"]
