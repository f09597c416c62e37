"""Facts about own code that a separate process finds before the run is planned."""

from dataclasses import dataclass, field

from eke.common.errors import Fix, Problem


@dataclass(frozen=True)
class Found:
    """A problem in JSON values."""

    key: str
    value: str
    why: str
    fix: list[str]
    remark: str
    id: str

    @classmethod
    def of(cls, problem: Problem) -> "Found":
        """Return a problem as JSON values."""
        fix = problem.fix
        return cls(problem.key, problem.value, problem.why, [*fix.words], fix.remark, problem.id)

    def problem(self) -> Problem:
        """Return the problem."""
        return Problem(self.key, self.value, self.why, Fix(*self.fix, remark=self.remark), self.id)


@dataclass(frozen=True)
class OwnFacts:
    """Sizes of the model and the data set."""

    problems: list[Found] = field(default_factory=list)
    failure: str = ""
    """How the process ended without an answer."""
    shapes: list[list[int]] = field(default_factory=list)
    """Shape of each parameter of the model."""
    layers: list[str] = field(default_factory=list)
    """Class names of repeated layers."""
    num_layers: int = 0
    flops_per_sample: int | None = None
    """FLOPs of a training step per sample, None if they cannot be counted."""
    train_length: int | None = None
    """Number of training samples, None for a stream."""
    eval_length: int | None = None
    samples: str = ""
    """Hash of 64 samples of each split."""
