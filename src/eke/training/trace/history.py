"""What happened to memory in a trace: births and deaths of storages, in order."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from eke.training.trace.allocator import Allocator

WEIGHTS, GRADIENTS, OPTIMIZER, MASTER = "weights", "gradients", "optimizer", "master"
STATES = (WEIGHTS, GRADIENTS, OPTIMIZER, MASTER)
ACTIVATIONS, LOGITS, AUTOCAST = "activations", "logits_and_loss", "autocast_cache"
BATCH, TEMPORARIES, WORKSPACES = "batch", "temporaries", "workspaces"

COMPONENTS = (
    WEIGHTS, GRADIENTS, OPTIMIZER, MASTER, ACTIVATIONS, LOGITS, AUTOCAST, BATCH, TEMPORARIES,
    WORKSPACES,
)  # fmt: skip
"""What a storage can be; `master`: float32 copies of narrower weights, `temporaries`: what is born
in a backward pass or an optimizer's step and does not outlive it, memory inside kernels too;
`workspaces`: what PyTorch keeps for cuBLAS."""

Event = tuple[int, int]
"""Number of a storage and its bytes, negative where it dies."""

EMPTY_CACHE: Event = (-1, 0)
"""The allocator gives unused memory back."""


@dataclass
class History:
    """Events by phase."""

    events: list[Event] = field(default_factory=list)
    phases: list[tuple[int, str]] = field(default_factory=list)
    """Position of the first event, and the phase that begins there."""
    components: list[str] = field(default_factory=list)
    """What each storage is, by its number."""

    def begin(self, phase: str) -> None:
        """A phase begins; one without a name is lived through and its peak not counted."""
        self.phases.append((len(self.events), phase))

    def born(self, num_bytes: int, component: str) -> int:
        """A storage comes into being; returns its number."""
        number = len(self.components)
        self.components.append(component)
        self.events.append((number, num_bytes))
        return number

    def died(self, number: int, num_bytes: int) -> None:
        """It is gone."""
        self.events.append((number, -num_bytes))

    def empty_cache(self) -> None:
        """The run gives its allocator's unused memory back here."""
        self.events.append(EMPTY_CACHE)

    def repeat(self, start: int, end: int) -> None:
        """What happened between two events happens again, but for what outlived the second one."""
        numbers: dict[int, int] = {}
        window = self.events[start:end]
        passing = {number for number, num_bytes in window if num_bytes < 0}
        for number, num_bytes in window:
            if num_bytes > 0 and number in passing:
                numbers[number] = self.born(num_bytes, self.components[number])
            elif number in numbers:
                self.died(numbers[number], -num_bytes)

    def spans(self) -> Iterator[tuple[str, list[Event]]]:
        """Each phase with its events, in order; a phase may come several times."""
        ends = [position for position, _ in self.phases[1:]] + [len(self.events)]
        for (start, phase), end in zip(self.phases, ends, strict=True):
            yield phase, self.events[start:end]


@dataclass(frozen=True)
class Peaks:
    """What an allocator had to hold."""

    allocated: dict[str, int]
    """Highest sum handed out in each phase."""
    reserved: dict[str, int]
    """Highest sum of segments up to the end of each phase's last occurrence."""
    components: dict[str, int]
    """What was alive at the highest sum of all: bytes of tensors, not rounded."""
    beside: dict[str, int]
    """Highest sum in each phase of what is neither a weight nor a gradient nor the optimizer's."""


def replay(history: History, allocator: Allocator) -> Peaks:
    """Let an allocator live through a history.

    Args:
        history: of one trace.
        allocator: with nothing allocated yet.
    """
    allocated: dict[str, int] = {}
    reserved: dict[str, int] = {}
    highest, highest_at, most, position = -1, 0, 0, 0
    for phase, events in history.spans():
        peak = allocator.allocated
        for number, num_bytes in events:
            position += 1
            if num_bytes > 0:
                allocator.malloc(number, num_bytes)
                peak = max(peak, allocator.allocated)
                most = max(most, allocator.reserved)
                if phase and allocator.allocated > highest:
                    highest, highest_at = allocator.allocated, position
            elif num_bytes < 0:
                allocator.free(number)
            else:
                allocator.empty_cache()
        if phase:
            allocated[phase] = max(allocated.get(phase, 0), peak)
            reserved[phase] = most
    return Peaks(allocated, reserved, _components(history, highest_at), _beside(history))


def _beside(history: History) -> dict[str, int]:
    """Of each phase the highest sum of tensors that are no training state, not rounded."""
    peaks: dict[str, int] = {}
    alive = 0
    for phase, events in history.spans():
        peak = alive
        for number, num_bytes in events:
            if number >= 0 and history.components[number] not in STATES:
                alive += num_bytes
                peak = max(peak, alive)
        if phase:
            peaks[phase] = max(peaks.get(phase, 0), peak)
    return peaks


def _components(history: History, end: int) -> dict[str, int]:
    """Bytes of what is alive after so many events, by what it is."""
    sums: dict[str, int] = defaultdict(int)
    for number, num_bytes in history.events[:end]:
        if number >= 0:
            sums[history.components[number]] += num_bytes
    return {component: sums[component] for component in COMPONENTS if sums[component]}
