"""Whether a run is compiled: by regions, as a whole for CUDA graphs, or not for want of time."""

from dataclasses import dataclass, replace

from eke.common.published_slowdowns import COMPILED
from eke.common.units import format_seconds
from eke.estimate.memory import Verdict
from eke.estimate.time import compile_seconds
from eke.models.sizes import is_ragged
from eke.tuning.recipes.formats import STAYS
from eke.tuning.recipes.question import Candidate, Situation, Wish

REGIONAL = ("compile=inductor", "compile.regional=true")

COMPILE_GAIN = 1 / COMPILED.slowdown
"""The speed of compiled layers over that of the others."""

LAUNCHES_PER_LAYER = 116
"""Operations of a BERT layer, forward and backward, under autocast: 2789 in 24 layers
(docs/lab.md, "recipes that adapt")."""
LAUNCH_S = 5e-6
"""The host's time for one: an estimate, the lower end of what PyTorch needs on today's hosts."""


@dataclass(frozen=True)
class Least:
    """Seconds of the whole run in one process that nothing can go below, as it is."""

    device: float
    """All FLOPs at the datasheet's peak."""
    host: float
    """All launches, one by one."""

    @property
    def seconds(self) -> float:
        """The longer of the two: one waits for the other."""
        return max(self.device, self.host)

    @property
    def saved_by_graphs(self) -> float:
        """The host's time beyond the device's; 0 where the host is not the limit."""
        return max(0.0, self.host - self.device)

    @property
    def saved_by_layers(self) -> float:
        """What faster kernels take off."""
        return self.seconds * (1 - 1 / COMPILE_GAIN)


def compiler(situation: Situation) -> Wish | None:
    """Regional compilation where the run is long; CUDA graphs where the host is the limit."""
    config = situation.config
    if situation.device.kind != "cuda":
        return None
    least = least_of(situation)
    if least is None:
        return _no_compiler("how long the run takes is not known")
    if is_ragged(config):
        return _no_compiler("each new length would be compiled again")
    if config.model.family == "other":
        return _no_compiler("the layers of this architecture are not known")
    if replace(config.compile, option="inductor").replays_graphs:
        return _whole_model(situation, least)
    if not _pays(situation, least, regional=True):
        return _no_compiler(_not_earned(situation, least, regional=True))
    regional = Candidate(REGIONAL, _earned(least))
    bound = launch_bound(situation, least)
    if bound is None or not _at_once(situation):
        return Wish(("compile",), (regional,), otherwise=STAYS)
    graphs = Candidate(
        ("compile=inductor", "compile.mode=reduce_overhead"),
        f"{bound}: CUDA graphs launch them at once",
    )
    return Wish(("compile",), (graphs, regional), otherwise=STAYS)


def least_of(situation: Situation) -> Least | None:
    """What the run takes at the least; None: not known."""
    plan, config = situation.plan, situation.config
    peak = situation.device.peak(config.precision.compute.value)
    layers = config.model.num_hidden_layers
    if peak is None or plan.size.flops_per_sample is None or layers is None:
        return None
    steps = plan.steps.total
    samples = plan.batch.samples_per_step / (plan.batch.world_size * plan.batch.devices)
    pieces = plan.batch.accumulation if config.batch.per_device is not None else 1
    return Least(
        device=steps * plan.size.flops_per_sample * samples / peak,
        host=steps * LAUNCH_S * LAUNCHES_PER_LAYER * layers * pieces,
    )


def launch_bound(situation: Situation, least: Least) -> str | None:
    """That the host takes longer to launch a step's kernels than the device needs for them.

    None too where graphs would save less than compiling the whole model takes.
    """
    if least.saved_by_graphs <= spent(situation, regional=False):
        return None
    steps = situation.plan.steps.total
    return (
        f"a step's kernels take the host {least.host / steps * 1e3:.1f} ms to launch (an estimate, "
        f"{LAUNCH_S * 1e6:g} us each), the device {least.device / steps * 1e3:.1f} ms at its peak"
    )


def spent(situation: Situation, *, regional: bool) -> float:
    """Seconds that the compiler is expected to take, once per run and without any cache."""
    how = replace(situation.config.compile, option="inductor", regional=regional)
    config = replace(situation.config, compile=how)
    return compile_seconds(replace(situation.plan, config=config))


def _pays(situation: Situation, least: Least, *, regional: bool) -> bool:
    return least.saved_by_layers >= spent(situation, regional=regional)


def _not_earned(situation: Situation, least: Least, *, regional: bool) -> str:
    seconds = spent(situation, regional=regional)
    return (
        f"the run takes {format_seconds(least.seconds)} at the least, and compiling pays from "
        f"{format_seconds(seconds / (1 - 1 / COMPILE_GAIN))} on ({seconds:.2g} s saved at a gain "
        f"of {COMPILE_GAIN - 1:.0%}, torchtitan's for a Llama of 8B)"
    )


def _earned(least: Least) -> str:
    return (
        f"{COMPILE_GAIN - 1:.0%} faster in torchtitan's Llama of 8B parameters on H100s, and the "
        f"run, {format_seconds(least.seconds)} at the least, earns its compilation back"
    )


def _no_compiler(why: str) -> Wish:
    return Wish(("compile",), (), otherwise=why)


def _whole_model(situation: Situation, least: Least) -> Wish:
    """With a mode that was typed and replays CUDA graphs, which rules keep from single layers."""
    mode = f"compile.mode={situation.config.compile.mode.value}"
    if not _pays(situation, least, regional=False):
        return _no_compiler(_not_earned(situation, least, regional=False))
    if not _at_once(situation):
        return _no_compiler(f"{mode} takes all samples of a step at once, which may not fit")
    whole = Candidate(("compile=inductor",), f"{_earned(least)}; {mode} takes the whole model")
    return Wish(("compile",), (whole,), otherwise=STAYS)


def _at_once(situation: Situation) -> bool:
    """Whether batch=auto surely takes all samples of a step at once, as CUDA graphs need.

    Of a micro-batch that was typed, the rules say so.
    """
    if situation.config.batch.per_device is not None:
        return True
    found = situation.forecast_whole
    return found is not None and found.verdict is Verdict.fits
