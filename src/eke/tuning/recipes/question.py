"""What a recipe wants, and what has become of it. No torch, no files: configuration and device.

What the rules say of a choice, so that no recipe leads to a refusal nobody has caused.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from eke.common.errors import ConfigError, Problem
from eke.config.schema import Config
from eke.estimate.memory import Forecast, forecast
from eke.hardware import Device
from eke.plan.planner import Decision, Plan, possible_batches, replan
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
            own = problem.key.partition(".")[0] in sections
            if key not in self.warned and (own or problem.id not in NO_BENEFIT):
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
        {(p.id, p.key): p for p in refused},
        {(p.id, p.key): p for p in warned},
    )


@dataclass(frozen=True)
class Candidate:
    """One answer to a question, as somebody would type it."""

    overrides: tuple[str, ...]
    """Of one section or several; the first one names what is decided."""
    reason: str
    """Why, in one clause with its numbers and their source."""


@dataclass(frozen=True)
class Wish:
    """A question that a recipe answers, with its answers, the best one first."""

    decides: tuple[str, ...]
    """Groups and key paths: where the user has typed one of them, the answer is his."""
    candidates: tuple[Candidate, ...]
    shrinks: bool = False
    """An answer is taken only if the forecast's peak is lower with it."""
    otherwise: str = ""
    """Why there is no candidate and what is there stays. Where it is empty nothing is said, nor of
    candidates that no rule lets through."""


@dataclass(frozen=True)
class Choice:
    """What a recipe decided in place of the user."""

    override: str
    """As somebody would type it; empty where what is there stays."""
    decision: Decision


@dataclass(frozen=True)
class Situation:
    """All that a recipe may look at."""

    config: Config
    """With what has been chosen so far."""
    device: Device
    num_nodes: int
    cores: int
    """Of this machine, for each process."""
    bfloat16_units: tuple[str, ...]
    """Of this machine's CPU."""
    base: Plan | None = None
    """Of the configuration without the recipe; None while nothing but the device is looked at."""

    @property
    def plan(self) -> Plan:
        """The base plan; only asked for once there is one."""
        assert self.base is not None, "the first questions are about the device alone"
        return self.base

    @cached_property
    def found(self) -> Found:
        """What the rules say of the configuration so far."""
        return findings(self.config, self.device, self.num_nodes)

    @cached_property
    def smallest(self) -> Config:
        """The configuration; with batch=auto, cut into the smallest micro-batch rules allow."""
        return self._first_allowed(reverse=False)

    @cached_property
    def whole(self) -> Config:
        """The configuration; with batch=auto, as few micro-batches as rules allow."""
        return self._first_allowed(reverse=True)

    @cached_property
    def forecast(self) -> Forecast | None:
        """Of the smallest micro-batch."""
        return self.forecast_of(self.smallest)

    @cached_property
    def forecast_whole(self) -> Forecast | None:
        """Of the largest micro-batch."""
        return self.forecast_of(self.whole)

    def forecast_of(self, config: Config) -> Forecast | None:
        """By formulas alone, so that the same command always chooses the same; None: no plan."""
        try:
            return forecast(replan(self.plan, config))
        except ConfigError:
            return None

    def _first_allowed(self, reverse: bool) -> Config:
        if self.config.batch.per_device is not None:
            return self.config
        each = possible_batches(self.config)[:: -1 if reverse else 1]
        for config in each:
            if not findings(config, self.device, self.num_nodes).refused:
                return config
        return each[0]


Ask = Callable[[Situation], Wish | None]
"""A question; None where it does not arise."""
Search = Callable[[Situation, Callable[[str], bool], "Change"], list[Candidate]]
"""A choice of several techniques at once.

Args: the situation; whether the user has decided about a path; how overrides change things.
"""
Change = Callable[[Situation, tuple[str, ...]], Situation | None]
"""A situation with overrides; None where they cannot be composed with what was typed."""


@dataclass(frozen=True)
class Recipe:
    """A named selection that adapts to the device, the model and what was typed."""

    name: str
    first: tuple[Ask, ...]
    """Questions about the device and the packages, asked before there is a plan."""
    then: tuple[Ask, ...]
    """Questions that look at the plan."""
    search: Search | None = None
    """Asked last: what is needed to make it fit."""
    conclusion: Callable[[Situation], str] | None = None
    """What has become of memory, in a row of its own."""
    menu: tuple[tuple[str, ...], ...] = ()
    """Overrides that may come up: composed together, each section once, to save time."""


def by_section(overrides: tuple[str, ...]) -> Mapping[str, tuple[str, ...]]:
    """The overrides of each section, in their order."""
    sections: dict[str, tuple[str, ...]] = {}
    for text in overrides:
        section = text.partition("=")[0].partition(".")[0]
        sections[section] = (*sections.get(section, ()), text)
    return sections
