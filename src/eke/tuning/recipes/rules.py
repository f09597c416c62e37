"""What the rules say of a choice, so that no recipe leads to a refusal nobody has caused."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from eke.common.errors import Problem
from eke.config.schema import Config
from eke.hardware import Device
from eke.rules import NO_BENEFIT, NOT_BY_SIZE, Facts, check

Key = tuple[str, str]
"""Rule and path: one rule may be about several groups."""


@dataclass(frozen=True)
class Found:
    """Findings of the rules about one configuration."""

    refused: Mapping[Key, Problem]
    warned: Mapping[Key, Problem]

    def new_in(self, later: "Found", sections: Collection[str]) -> Problem | None:
        """What a change has brought about, a refusal first; None where it is all right.

        Args:
            later: findings with the change.
            sections: that it changes.
        """
        for key, problem in later.refused.items():
            if key not in self.refused:
                return problem
        for key, problem in later.warned.items():
            own = problem.path.partition(".")[0] in sections
            if key not in self.warned and (own or problem.rule not in NO_BENEFIT):
                return problem
        return None


def findings(config: Config, device: Device, num_nodes: int) -> Found:
    """What the rules say of it here, packages included, as if the device were present.

    A plan for another device is thus one for this environment, which is what would be run there.

    Args:
        config: of the run.
        device: that it runs on, or is planned for.
        num_nodes: machines that it can use.
    """
    facts = Facts(config, replace(device, present=True), planning=False, num_nodes=num_nodes)
    # What does not fit yet, a recipe may mend; and the rules about that take their time.
    refused, warned = check(facts, NOT_BY_SIZE)
    return Found(
        {(p.rule, p.path): p for p in refused},
        {(p.rule, p.path): p for p in warned},
    )
