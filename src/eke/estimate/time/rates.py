"""Rates of a device per second, as low, expected and high: priors from published sources.

Expected efficiencies of A100, H100 and H200 are fitted to half of the rows in
benchmarks/llm_foundry.tsv and tried on the other half; no other number is fitted to rows that
`benchmarks/step_time.py` compares with (sources: docs/explanation/step_time.md).
"""

from dataclasses import dataclass
from math import sqrt

from eke.config.schema import PeerToPeer
from eke.hardware import Device
from eke.plan.planner import Plan
from eke.plan.record import CalibratedStep


@dataclass(frozen=True)
class Span:
    """A quantity as low, expected and high; the unit is its owner's."""

    low: float
    expected: float
    high: float

    def __post_init__(self) -> None:
        assert 0 <= self.low <= self.expected <= self.high, self

    def __add__(self, other: "Span") -> "Span":
        return Span(self.low + other.low, self.expected + other.expected, self.high + other.high)

    def __mul__(self, factor: float) -> "Span":
        return Span(self.low * factor, self.expected * factor, self.high * factor)

    def by(self, other: "Span") -> "Span":
        """The product, low with low and high with high."""
        return Span(self.low * other.low, self.expected * other.expected, self.high * other.high)

    def over(self, rate: "Span") -> "Span":
        """Time of an amount at a rate: the least of it at the highest rate is the low end."""
        return Span(self.low / rate.high, self.expected / rate.expected, self.high / rate.low)

    def inverse(self, amount: float) -> "Span":
        """How many of `amount` a second: the shortest time has the highest rate."""
        low, expected, high = self.high, self.expected, max(self.low, 1e-12)
        return Span(amount / low, amount / expected, amount / high)


NOTHING = Span(0.0, 0.0, 0.0)


def exactly(amount: float) -> Span:
    """A known quantity."""
    return Span(amount, amount, amount)


def highest(one: Span, other: Span) -> Span:
    """The larger of two, end by end."""
    return Span(
        max(one.low, other.low), max(one.expected, other.expected), max(one.high, other.high)
    )


@dataclass(frozen=True)
class StepTime:
    """Predicted time of one plan: an estimate."""

    step_s: Span
    """Seconds of one optimizer step."""
    samples_per_s: Span
    """Over all devices."""
    tokens_per_s: Span
    """Over all devices; padding counts."""
    parts: dict[str, float]
    """Expected seconds of each part of a step (`PARTS`); hidden time is not in it, so that they add
    up to `step_s.expected`, but for a calibration's correction."""
    limit: str
    """The largest of them, formatted."""
    mfu: Span | None
    """Share of the datasheet's peak; None where FLOPs or peak are not known."""
    total_s: Span
    """All optimizer steps of the run; without start, evaluation and checkpoints."""
    gpu_hours: Span
    """`total_s` x devices; of CPUs, processes."""
    basis: str
    """Source of the device's rates."""
    notes: tuple[str, ...] = ()
    """Effects not modelled, or only roughly, one clause each."""
    calibrated: CalibratedStep | None = None
    """Correction by finished runs; None if they were not looked at."""


@dataclass(frozen=True)
class Unknown:
    """No estimate, and what would give one."""

    reason: str
    """In one line."""


PARTS = {
    "compute": "matrix multiplications",
    "memory": "memory bandwidth",
    "optimizer": "the optimizer's memory traffic",
    "host": "the host's kernel launches",
    "transfers": "transfers to and from the host",
    "communication": "communication between devices",
}
"""Part of a step -> what it is limited by."""


def span_between(low: float, high: float) -> Span:
    """A range of which only the ends are published: their geometric mean is expected."""
    return Span(low, sqrt(low * high), high)


TENSOR_CORES = span_between(0.404, 0.80)
"""Share of the datasheet's peak that matrix multiplications reach on tensor cores. High: large
products on an H200, 790 of 989 TFLOP/s. Low: whole training steps of a 760M model on an H100
(MosaicML llm-foundry, scripts/train/benchmarking/README.md), whose products alone were faster."""

CUDA_CORES = span_between(0.53, 1.0)
"""The same in float32 without tensor cores. Low: whole steps of BERT-large on a V100-32GB by a loop
of NVIDIA's own (NVIDIA/DeepLearningExamples, PyTorch/LanguageModeling/BERT, 2020: 8.36 of 15.7)."""

FUSED_ATTENTION = span_between(0.28, 0.72)
"""FlashAttention-2's forward and backward pass on an A100: 88 to 225 of 312 TFLOP/s for short and
long causal sequences (Dao 2023, arXiv:2307.08691, figures 4 to 7)."""

CLASSES = {
    (8, 0): (Span(0.571, 0.717, 0.9), Span(0.24, 0.319, 0.72)),
    (9, 0): (Span(0.404, 0.607, 0.80), Span(0.13, 0.178, 0.75)),
}
"""Compute capability -> shares of the peak in matrix multiplications and in fused attention, of
A100, and of H100 and H200: `python benchmarks/llm_foundry.py`. Two efficiencies make the term for
size: the longer the rows, the more of a step is attention. Low ends of products are whole steps
(llm-foundry: 1B on A100, 760M on H100), the high end of A100's is 79 % in a whole step of 13B, of
which 88 % are products. High ends of attention: FlashAttention-2 and -3 (arXiv:2307.08691, and
arXiv:2407.08608: 740 of 989); its low ends are three quarters of what was fitted, an assumption."""

FLOAT8 = Span(0.8, 1.1, 1.35)
"""Speed of linear layers in float8 over 16 bits: 0.8 where they are narrow, 1.35 for a 1B model on
H100 (pytorch/ao, torchao/float8/README.md; llm-foundry)."""

BANDWIDTH = Span(0.688, 0.794, 1.0)
"""Share of the datasheet's memory bandwidth: 220 of 320 GB/s on a T4, 69 to 84 % on five others,
their median expected (Jia et al. 2018, arXiv:1804.06826; 2019, arXiv:1903.07486). The high end is
the datasheet: caches hold what is read again at once."""

LAUNCH_S = span_between(5e-6, 35e-6)
"""Seconds of the host for one kernel. Low: PyTorch's dispatcher and the driver, 5 to 8 us. High: a
forward pass of Llama-1B at 1 x 128 tokens, 18.3 ms (Hugging Face Accelerate,
benchmarks/torch.compile/README.md) for its 522 kernels, Python modules included."""

LINK = Span(0.4, 0.75, 0.89)
"""Share of a link's datasheet rate in one direction. High: 56 of 63 GB/s between GPUs over PCI
Express 5. The low end, for many small exchanges, is an assumption."""

WORKSTATION_BYTES_PER_S = 1.25e9
"""Between machines whose device comes in no server with adapters: 10GBASE-T, an assumption."""

DISK = Span(0.5e9, 3e9, 7.9e9)
"""Bytes per second of a local NVMe disk. High: PCI Express 4 with four lanes. An assumption."""

HOST_UPDATE_S = Span(0.1e-9, 0.25e-9, 1.39e-9)
"""Seconds per number of AdamW on the host: 0.22 s for 1e9 numbers to 2.6 s for 1e10 by DeepSpeed's
CPU-Adam, 1.39 s for 1e9 by PyTorch's (Ren et al. 2021, arXiv:2101.06840, table 4). The low end, for
newer processors, is an assumption."""

TRAINER_S = Span(0.0, 2.2e-3, 5e-3)
"""Seconds per micro-batch that HF Trainer's own loop adds on the host: 2.2 ms were measured for
BERT-large (docs/lab/time.md); twice that is an assumption."""

COLLECTIVE_S = Span(10e-6, 30e-6, 100e-6)
"""Seconds to start one exchange: an assumption."""


@dataclass(frozen=True)
class Rates:
    """Of one device, per second."""

    tensor: Span
    """FLOP/s of matrix multiplications in the plan's format."""
    attention: Span
    """FLOP/s of fused attention."""
    float8: Span | None
    """FLOP/s of linear layers in float8."""
    optimizer: Span
    """FLOP/s of the optimizer's own products."""
    memory: Span
    """Bytes."""
    host: Span
    """Bytes over PCI Express."""
    link: Span
    """Bytes to other devices."""
    peak: float
    """FLOP/s by the datasheet."""


def rates_of(plan: Plan) -> Rates | None:
    """Rate of the plan's device in its formats; None if not in a datasheet."""
    device, name = plan.device, plan.compute.matmul
    if plan.compute.tf32 and name == "float32":
        name = "tf32"
    peak = device.peak(name) or (device.peak("float32") if name == "tf32" else None)
    if peak is None and name == "bfloat16":
        # Without units for bfloat16 products are emulated in float32 (Volta, Turing).
        peak, name = device.peak("float32"), "float32"
    if peak is None or device.memory_bytes_per_s is None or device.kind == "cpu":
        return None
    known = CLASSES.get(device.capability or (0, 0), (TENSOR_CORES, FUSED_ATTENTION))
    cores, attention = (CUDA_CORES, CUDA_CORES) if name == "float32" else known
    tensor = cores * peak
    pcie = LINK * (device.host_bytes_per_s or 15.75e9)
    narrow = device.peak("bfloat16") or peak
    return Rates(
        tensor=tensor,
        attention=attention * peak,
        float8=tensor.by(FLOAT8) if plan.compute.float8 != "off" else None,
        optimizer=known[0] * narrow,
        memory=BANDWIDTH * device.memory_bytes_per_s,
        host=pcie,
        link=_link(plan, device, pcie),
        peak=peak,
    )


def network_of(plan: Plan) -> tuple[float, str]:
    """Bytes per second between machines, all adapters of one together, and where that is from."""
    configured, own = plan.config.hardware.network_gbit_per_s, plan.device.network_bytes_per_s
    if configured is not None:
        return configured * 1e9 / 8, "as configured"
    if own is None:
        return WORKSTATION_BYTES_PER_S, "an assumption; hardware.network_gbit_per_s=N says another"
    why = f"as in NVIDIA's or Amazon's machines with {plan.device.name}"
    return own * plan.processes_per_node, f"{why}; hardware.network_gbit_per_s=N says another"


def _link(plan: Plan, device: Device, pcie: Span) -> Span:
    """Between the devices of one run: a ring crosses to the next machine over all its adapters."""
    own = pcie
    through_host = plan.config.distributed.p2p is PeerToPeer.off
    if device.link_bytes_per_s is not None and not through_host:
        own = LINK * (device.link_bytes_per_s / 2)
        is_soldered = "SXM" in device.name or "HBM" in device.name
        if not is_soldered and not device.name.endswith(("H200", "B200")):
            # An optional bridge between two cards.
            own = Span(min(pcie.low, own.low), own.expected, own.high)
    if plan.config.distributed.num_nodes == 1:
        return own
    net = LINK * network_of(plan)[0]
    return Span(*map(min, (net.low, net.expected, net.high), (own.low, own.expected, own.high)))
