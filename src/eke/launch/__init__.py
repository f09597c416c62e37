"""From plans to processes; torch is never imported here."""

from eke.launch.folder import Place, claim, find_place
from eke.launch.single import place_of, run_single

__all__ = ["Place", "claim", "find_place", "place_of", "run_single"]
