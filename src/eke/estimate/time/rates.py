"""Rates of a device per second, as low, expected and high values from published sources.

Expected efficiencies of A100, H100 and H200 are fitted to half of the rows in
benchmarks/llm_foundry.tsv and tested on the other half. No other number is fitted to rows that
`benchmarks/step_time.py` compares with (sources: notes/step_time.md).
"""

from dataclasses import astuple, dataclass
from math import sqrt

from eke.config.schema import PeerToPeer
from eke.hardware import Device
from eke.plan.planner import Plan
from eke.plan.record import CalibratedStep


@dataclass(frozen=True)
class Span:
    """A quantity as low, expected and high value, in the unit of its owner."""

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
        """Return the product, low with low and high with high."""
        return Span(self.low * other.low, self.expected * other.expected, self.high * other.high)

    def over(self, rate: "Span") -> "Span":
        """Return the time of an amount at a rate, with the low end at the highest rate."""
        return Span(self.low / rate.high, self.expected / rate.expected, self.high / rate.low)

    def inverse(self, amount: float) -> "Span":
        """Return `amount` per this span: a rate for a time, a time for a rate. Ends are swapped."""
        low, expected, high = self.high, self.expected, max(self.low, 1e-12)
        return Span(amount / low, amount / expected, amount / high)


ZERO_SPAN = Span(0.0, 0.0, 0.0)


def exact_span(amount: float) -> Span:
    """Return a known quantity as a span."""
    return Span(amount, amount, amount)


def highest(one: Span, other: Span) -> Span:
    """Return the larger of two spans, end by end."""
    return Span(*map(max, astuple(one), astuple(other)))


@dataclass(frozen=True)
class StepTime:
    """Estimated time of one plan."""

    step_s: Span
    samples_per_s: Span
    """Samples per second over all devices."""
    tokens_per_s: Span
    """Tokens per second over all devices, padding included."""
    parts: dict[str, float]
    """Expected seconds by part (`STEP_PARTS`) before calibration, without hidden time."""
    limit: str
    """Limit of the largest part, as text."""
    mfu: Span | None
    """Share of the datasheet's peak. None if FLOPs or peak are unknown."""
    total_s: Span
    """Seconds of all optimizer steps of the run, without start, evaluation and checkpoints."""
    gpu_hours: Span
    """`total_s` x devices, for CPUs `total_s` x processes."""
    basis: str
    """Source of the device's rates."""
    notes: tuple[str, ...] = ()
    """Effects that are not modelled, or only roughly, one clause each."""
    calibrated: CalibratedStep | None = None
    """Correction by finished runs. None if they were not considered."""


@dataclass(frozen=True)
class Unknown:
    """A missing estimate."""

    reason: str
    """Reason and remedy in one line."""


STEP_PARTS = {
    "compute": "matrix multiplications",
    "memory": "memory bandwidth",
    "optimizer": "the optimizer's memory traffic",
    "host": "the host's kernel launches",
    "transfers": "transfers to and from the host",
    "communication": "communication between devices",
}
"""Limit by part of a step, as text."""


def _span_between(low: float, high: float) -> Span:
    """Return a range whose expected value is the geometric mean of its published ends."""
    return Span(low, sqrt(low * high), high)


_TENSOR_CORES = _span_between(0.404, 0.80)
"""Share of the datasheet's peak in matrix multiplications on tensor cores. High: large products on
an H200, 790 of 989 TFLOP/s. Low: entire training steps of a 760M model on an H100 (MosaicML
llm-foundry, scripts/train/benchmarking/README.md), in which products are faster."""

_CUDA_CORES = _span_between(0.53, 1.0)
"""The same in float32 without tensor cores. Low: entire steps of BERT-large on a V100-32GB by
NVIDIA's loop (NVIDIA/DeepLearningExamples, PyTorch/LanguageModeling/BERT, 2020: 8.36 of 15.7)."""

_FUSED_ATTENTION = _span_between(0.28, 0.72)
"""Share of the peak in fused attention: FlashAttention-2's forward and backward pass on an A100, 88
to 225 of 312 TFLOP/s for causal sequences (Dao 2023, arXiv:2307.08691, figures 4 to 7)."""

_CLASSES = {
    (8, 0): (Span(0.571, 0.717, 0.9), Span(0.24, 0.319, 0.72)),
    (9, 0): (Span(0.404, 0.607, 0.80), Span(0.13, 0.178, 0.75)),
}
"""Shares of the peak in matrix multiplications and in fused attention by compute capability, for
A100, and for H100 and H200 (`python benchmarks/llm_foundry.py`). Together they model the effect of
size, since longer rows have more attention. Low ends of products are entire steps (llm-foundry: 1B
on A100, 760M on H100). The high end of A100 is 79 % in an entire step of 13B, with 88 % products.
High ends of attention: FlashAttention-2 and -3 (arXiv:2307.08691, and arXiv:2407.08608: 740 of
989). Low ends of attention are three quarters of the fit, an assumption."""

_FLOAT8 = Span(0.8, 1.1, 1.35)
"""Speed of float8 linear layers relative to 16 bits: 0.8 for narrow layers, 1.35 for a 1B model on
H100 (pytorch/ao, torchao/float8/README.md; llm-foundry)."""

_BANDWIDTH = Span(0.688, 0.794, 1.0)
"""Share of the datasheet's memory bandwidth: 220 of 320 GB/s on a T4, 69 to 84 % on five others,
whose median is expected (Jia et al. 2018, arXiv:1804.06826; 2019, arXiv:1903.07486). High: the
datasheet, since caches hold data that is soon read again."""

LAUNCH_S = _span_between(5e-6, 35e-6)
"""Host seconds per kernel. Low: PyTorch's dispatcher and the driver, 5 to 8 us. High: a forward
pass of Llama-1B at 1 x 128 tokens, 18.3 ms (Hugging Face Accelerate,
benchmarks/torch.compile/README.md) for its 522 kernels, including Python modules."""

_LINK = Span(0.4, 0.75, 0.89)
"""Share of a link's datasheet rate in one direction. High: 56 of 63 GB/s between GPUs over PCI
Express 5. The low end, for many small exchanges, is an assumption."""

WORKSTATION_BYTES_PER_S = 1.25e9
"""Bytes per second between nodes of a device not sold in servers: 10GBASE-T, an assumption."""

DISK = Span(0.5e9, 3e9, 7.9e9)
"""Bytes per second of a local NVMe disk. High: PCI Express 4 with four lanes. An assumption."""

HOST_UPDATE_S = Span(0.1e-9, 0.25e-9, 1.39e-9)
"""Seconds per parameter of AdamW on the host: 0.22 to 0.26 ns by DeepSpeed's CPU-Adam, 1.39 ns by
PyTorch's (Ren et al. 2021, arXiv:2101.06840, table 4). Low, for newer CPUs: an assumption."""

TRAINER_S = Span(0.0, 2.2e-3, 5e-3)  # the high end is an assumption
"""Host seconds per micro-batch of HF Trainer's loop: 2.2 ms for BERT-large (notes/lab/time.md)."""

COLLECTIVE_S = Span(10e-6, 30e-6, 100e-6)
"""Seconds to start one collective: an assumption."""


@dataclass(frozen=True)
class Rates:
    """Rates of one device per second."""

    tensor: Span
    """FLOP/s of matrix multiplications in the plan's format."""
    attention: Span
    """FLOP/s of fused attention."""
    float8: Span | None
    """FLOP/s of linear layers in float8."""
    optimizer: Span
    """FLOP/s of the optimizer's own products."""
    memory: Span
    """Bytes of device memory."""
    host: Span
    """Bytes over PCI Express."""
    link: Span
    """Bytes to other devices."""
    peak: float
    """Datasheet FLOP/s."""


def rates_of(plan: Plan) -> Rates | None:
    """Return the rates of the plan's device in its formats, None without a datasheet."""
    device, name = plan.device, plan.compute.matmul
    if plan.compute.tf32 and name == "float32":
        name = "tf32"
    peak = device.peak(name) or (device.peak("float32") if name == "tf32" else None)
    if peak is None and name == "bfloat16":
        # Without bfloat16 units, products are emulated in float32 (Volta, Turing).
        peak, name = device.peak("float32"), "float32"
    if peak is None or device.memory_bytes_per_s is None or device.kind == "cpu":
        return None
    known = _CLASSES.get(device.capability or (0, 0), (_TENSOR_CORES, _FUSED_ATTENTION))
    cores, attention = (_CUDA_CORES, _CUDA_CORES) if name == "float32" else known
    tensor = cores * peak
    pcie = _LINK * (device.host_bytes_per_s or 15.75e9)
    narrow = device.peak("bfloat16") or peak
    return Rates(
        tensor=tensor,
        attention=attention * peak,
        float8=tensor.by(_FLOAT8) if plan.compute.float8 != "off" else None,
        optimizer=known[0] * narrow,
        memory=_BANDWIDTH * device.memory_bytes_per_s,
        host=pcie,
        link=_link(plan, device, pcie),
        peak=peak,
    )


def network_of(plan: Plan) -> tuple[float, str]:
    """Return the bytes per second between nodes, over all adapters of a node, and their source."""
    configured, own = plan.config.hardware.network_gbit_per_s, plan.device.network_bytes_per_s
    if configured is not None:
        return configured * 1e9 / 8, "as configured"
    if own is None:
        return WORKSTATION_BYTES_PER_S, "an assumption (to set it: hardware.network_gbit_per_s=N)"
    why = f"as in NVIDIA's or Amazon's servers with {plan.device.name}"
    return own * plan.processes_per_node, f"{why} (to set it: hardware.network_gbit_per_s=N)"


def _link(plan: Plan, device: Device, pcie: Span) -> Span:
    """Return the rate between a run's devices. A ring uses all adapters of a node."""
    own = pcie
    through_host = plan.ranks.p2p is PeerToPeer.off
    if device.link_bytes_per_s is not None and not through_host:
        own = _LINK * (device.link_bytes_per_s / 2)
        is_soldered = "SXM" in device.name or "HBM" in device.name
        if not is_soldered and not device.name.endswith(("H200", "B200")):
            # An optional bridge between two cards.
            own = Span(min(pcie.low, own.low), own.expected, own.high)
    if plan.ranks.num_nodes == 1:
        return own
    net = _LINK * network_of(plan)[0]
    return Span(*map(min, (net.low, net.expected, net.high), (own.low, own.expected, own.high)))
