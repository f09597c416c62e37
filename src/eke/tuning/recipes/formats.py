"""Which 16-bit format a device multiplies fast, and whether that is worth it."""

from eke.hardware import Device
from eke.tuning.recipes.question import Candidate, Situation, Wish

DECIDES = ("precision", "precision.compute", "precision.weights", "precision.float8")

BFLOAT16_CAPABILITY = (8, 0)
FLOAT16_CAPABILITY = (7, 0)
"""First generations with tensor cores for the format: whitepapers in eke.hardware.datasheets."""

FLOAT8_CAPABILITY = (8, 9)
FLOAT8_WIDTH = 2048
"""Narrower layers lose by float8: 0.80 times as fast for a product of 1024 x 2048 x 1024,
https://github.com/pytorch/ao/blob/main/torchao/float8/README.md."""
FLOAT8_HINT = (
    "precision=fp8, other numerics, may be faster: 70.3 instead of 52.3 thousand tokens/s for 1B "
    "parameters on an H100 (llm-foundry, scripts/train/benchmarking)"
)

STAYS = "it stays as it is"

CPU_WIDTH = 256
"""Hidden size from which bfloat16 is taken on a CPU with units for it: a choice. At 64 autocast's
copies cost more than the products save, at 128 it was unsure (docs/lab.md, "recipes that adapt");
at 512 it was 2.3 times as fast."""


def half(situation: Situation) -> Wish:
    """16-bit operands where the device is faster with them."""
    device = situation.device
    if device.kind == "cpu":
        return _on_cpu(situation)
    candidates = []
    if _has(device, "bfloat16", BFLOAT16_CAPABILITY):
        candidates.append(Candidate(("precision=bf16",), _gain(situation, "bfloat16")))
    if _has(device, "float16", FLOAT16_CAPABILITY):
        why = _gain(situation, "float16")
        if not candidates:
            why += ", and it has no units for bfloat16"
        candidates.append(Candidate(("precision=fp16",), why))
    slow = f"{device.name} has no tensor cores: 16 bits would be no faster"
    return Wish(DECIDES, tuple(candidates), otherwise=slow)


def _on_cpu(situation: Situation) -> Wish:
    name, units = situation.device.name, situation.bfloat16_units
    width = situation.config.model.hidden_size or 0
    if not units:
        return Wish(DECIDES, (), otherwise=f"{name} has no units for bfloat16 (/proc/cpuinfo)")
    flags = ", ".join(units)
    if width < CPU_WIDTH:
        why = f"{name} has {flags}, and a model {width} wide is too narrow to gain by them"
        return Wish(DECIDES, (), otherwise=f"{why}, below {CPU_WIDTH} (docs/lab.md)")
    why = f"{name} multiplies bfloat16 in units of its own ({flags})"
    return Wish(DECIDES, (Candidate(("precision=bf16",), why),), otherwise=STAYS)


def _has(device: Device, dtype: str, since: tuple[int, int]) -> bool:
    """By the datasheet; of a device without one by its generation."""
    if device.peak_flops:
        return device.peak(dtype) is not None
    return (device.capability or (0, 0)) >= since


def _gain(situation: Situation, dtype: str) -> str:
    """How much faster, with both numbers."""
    device = situation.device
    narrow, wide = device.peak(dtype), device.peak("float32")
    if narrow is None or wide is None:
        return f"{device.name} has tensor cores for {dtype}; its peaks are not known"
    return (
        f"{device.name} multiplies {dtype} matrices {narrow / wide:.1f} times as fast as float32 "
        f"({narrow / 1e12:.4g} and {wide / 1e12:.4g} TFLOP/s by the datasheet)"
    )


def half_and_hint(situation: Situation) -> Wish:
    """The same, and where float8 may be faster still, a word about it: numerics of another kind."""
    wish = half(situation)
    fast = (
        situation.device.kind == "cuda"
        and (situation.device.capability or (0, 0)) >= FLOAT8_CAPABILITY
    )
    if not fast or (situation.config.model.hidden_size or 0) < FLOAT8_WIDTH:
        return wish
    hinted = tuple(Candidate(c.overrides, f"{c.reason}; {FLOAT8_HINT}") for c in wish.candidates)
    return Wish(wish.decides, hinted, otherwise=wish.otherwise)
