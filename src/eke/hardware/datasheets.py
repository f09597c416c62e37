"""Datasheet values of devices, for plans without the device.

Peaks are dense (half of a datasheet's value with sparsity), for matrix multiplications with float32
accumulation, as in training: on a GeForce that halves the advertised float16 peak. `float32` uses
the regular cores, `tf32` the tensor cores with float32 operands. Formats without matrix units have
no entry.

Bandwidths of memory and of NVLink (both directions together) are from the same datasheets. GeForce
and TITAN need a bridge for NVLink. PCI Express with 16 lanes has 15.75, 31.5 and 63 GB/s per
direction in generations 3, 4 and 5: 8, 16 and 32 GT/s, 128 of 130 bits (PCI-SIG). Two GPUs of a
GB200 or GB300 share 450 GB/s per direction to their host.

Network is the bandwidth per device of common machines. From data sheets: DGX-1 (four adapters of
100 Gbit/s, eight V100), DGX A100 (eight of 200), DGX H100, H200 and B200 (eight of 400), GB200 and
GB300 NVL72 (one of 400 or 800 per GPU). Amazon: g4dn.metal, g5.48xlarge, g6.48xlarge (100 Gbit/s
for eight T4, A10G, L4), g6e.48xlarge (400 for eight L40S). Azure: `ND_MI300X_v5` (one of 400 per
device). An MI300X has seven links of 128 GB/s (Infinity Fabric).

Memory is `memory.total` of nvidia-smi with drivers from R510 on. It is below the advertised size if
error correction uses a part (T4, A10G, L4) or the vendor counts in powers of ten.
"""

from dataclasses import dataclass, replace

from eke.common.text import GIB, MIB


@dataclass(frozen=True)
class Device:
    """Kind of device that a run can be planned for, and its number."""

    kind: str
    """`cuda` or `cpu`: torch's device type."""
    name: str
    """Name from the vendor's driver or the operating system."""
    count: int = 1
    memory_bytes: int | None = None
    """Memory of one device, or for a CPU the limit of this process including cgroups."""
    available_bytes: int | None = None
    """Memory available when detected, None for GPUs and for runs that start later."""
    host_memory_bytes: int | None = None
    """Memory of a GPU's machine (declared GPUs: a machine with eight), None if unknown."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability, for AMD the equivalent in torch (gfx942: 9.4), None for a CPU."""
    peak_flops: tuple[tuple[str, float], ...] = ()
    """Dense datasheet peak in FLOP/s by format: `float32`, `tf32`, `float16`, `bfloat16`."""
    memory_bytes_per_s: float | None = None
    """Datasheet memory bandwidth, None if unknown, as for a CPU."""
    link_bytes_per_s: float | None = None
    """Datasheet bandwidth of all NVLinks, both directions together, None without NVLink."""
    host_bytes_per_s: float | None = None
    """Bandwidth of PCI Express with 16 lanes in one direction."""
    network_bytes_per_s: float | None = None
    """Network bandwidth per device in a common machine."""
    source: str = ""
    present: bool = True
    """True if this machine has the device, which may be only declared."""
    note: str = ""
    """Origin and limitations of the device, printed in the plan."""

    @property
    def is_nvidia(self) -> bool:
        """True if CUDA's libraries support the device. In torch AMD's devices are also `cuda`."""
        return self.kind == "cuda" and not self.name.startswith("AMD ")

    def peak(self, dtype: str) -> float | None:
        """Return the dense peak in FLOP/s for a format, None if unknown."""
        return dict(self.peak_flops).get(dtype)


_IMAGES = "https://images.nvidia.com"
_GEFORCE, _EN_ZZ = f"{_IMAGES}/aem-dam/Solutions/geforce", f"{_IMAGES}/aem-dam/en-zz/Solutions"
_DATA_CENTER = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center"

_VOLTA = f"{_IMAGES}/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"
# The Titan RTX equals the whitepaper's Quadro RTX 6000 (full TU102 at 1770 MHz). Unlike a GeForce
# it accumulates in float32 at the full rate.
_TURING = (
    f"{_EN_ZZ}/design-visualization/technologies/turing-architecture/"
    "NVIDIA-Turing-Architecture-Whitepaper.pdf"
)
_T4 = f"{_DATA_CENTER}/tesla-t4/t4-tensor-core-datasheet-951643.pdf"
_GA102 = f"{_EN_ZZ}/geforce/ampere/pdf/NVIDIA-ampere-GA102-GPU-Architecture-Whitepaper-V1.pdf"
_ADA = f"{_GEFORCE}/ada/nvidia-ada-gpu-architecture.pdf"
_A100 = f"{_DATA_CENTER}/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
_H100 = "https://resources.nvidia.com/en-us-tensor-core/gtc22-whitepaper-hopper"
# Same chip and clocks as the H100 SXM: 1979 TFLOP/s with sparsity in bfloat16.
_H200 = "https://www.nvidia.com/en-us/data-center/h200/"
# Per board of eight, with sparsity: 36 PFLOP/s in 16 bits, 18 in tf32; 600 TFLOP/s float32.
_HGX = "https://www.nvidia.com/en-us/data-center/hgx/"
# Per 72 GPUs, with sparsity: 360 PFLOP/s in 16 bits, 180 in tf32; 5,760 TFLOP/s float32.
_GB200 = "https://www.nvidia.com/en-us/data-center/gb200-nvl72/"
_GB300 = "https://www.nvidia.com/en-us/data-center/gb300-nvl72/"
_MI300X = (
    "https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs/data-sheets/"
    "amd-instinct-mi300x-data-sheet.pdf"
)
_L4 = "https://www.nvidia.com/en-us/data-center/l4/"
_L40S = "https://www.nvidia.com/en-us/data-center/l40s/"
# Amazon's variant of the A10, faster in float32 and about half as fast on the tensor cores.
_A10G = (
    "https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf"
)
_BLACKWELL = f"{_GEFORCE}/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
_PRO_BLACKWELL = (
    "https://www.nvidia.com/content/dam/en-zz/Solutions/design-visualization/"
    "quadro-product-literature/NVIDIA-RTX-Blackwell-PRO-GPU-Architecture-v1.0.pdf"
)


_GRACE = 0
"""NVLink-C2C to a Grace processor instead of PCI Express."""

_HOST_GIB = {"V100": 488, "A100": 1152, "H100": 2048, "H200": 2048, "B200": 2048}
"""GiB of Amazon's p3.16xlarge, p4d, p4de, p5, p5en, p6-b200 (aws.amazon.com/ec2/instance-types)."""

_HOST_GB_PER_S = {3: 15.75, 4: 31.5, 5: 63.0, _GRACE: 225.0}
"""Generation of PCI Express with 16 lanes -> GB/s to the host in one direction."""


def _gpu(
    name: str,
    memory_mib: int,
    capability: tuple[int, int],
    source: str,
    speeds: tuple[float, float | None, int, float | None],
    tflops: tuple[float, float | None, float],
) -> Device:
    """Return a declared device.

    `speeds` are GB/s of memory and NVLink, the generation of PCI Express and Gbit/s of the network.
    `tflops` are TFLOP/s of float32, tf32 and 16 bits. Without tf32 there is no bfloat16.
    """
    memory, link, generation, network = speeds
    float32, tf32, float16 = tflops
    peaks = {"float32": float32, "tf32": tf32, "float16": float16, "bfloat16": tf32 and float16}
    return Device(
        kind="cuda",
        name=name,
        memory_bytes=memory_mib * MIB,
        capability=capability,
        peak_flops=tuple((dtype, peak * 1e12) for dtype, peak in peaks.items() if peak),
        memory_bytes_per_s=memory * 1e9,
        link_bytes_per_s=link * 1e9 if link else None,
        host_memory_bytes=_HOST_GIB.get(name.split()[1][:4], 0) * GIB or None,
        host_bytes_per_s=_HOST_GB_PER_S[generation] * 1e9,
        network_bytes_per_s=network / 8 * 1e9 if network else None,
        source=source,
        present=False,
    )


_A100_PEAKS, _HOPPER_PEAKS = (19.5, 156.0, 312.0), (66.9, 494.7, 989.4)
_NVL72_PEAKS = (80.0, 1250.0, 2500.0)
_RTX_PRO = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"

DEVICES: dict[str, Device] = {
    "v100_16": _gpu(
        "Tesla V100-SXM2-16GB", 16384, (7, 0), _VOLTA, (900, 300, 3, 50), (15.7, None, 125.0)
    ),
    "titan_rtx": _gpu(
        "TITAN RTX", 24576, (7, 5), _TURING, (672, 100, 3, None), (16.3, None, 130.5)
    ),
    "t4": _gpu("Tesla T4", 15360, (7, 5), _T4, (320, None, 3, 12.5), (8.1, None, 65.0)),
    # 16-bit peaks with float16 accumulation: 3090 142, 4090 330.3, 5090 419.
    "rtx3090": _gpu(
        "NVIDIA GeForce RTX 3090", 24576, (8, 6), _GA102, (936, 112.5, 4, None), (35.6, 35.6, 71.0)
    ),
    "rtx4090": _gpu(
        "NVIDIA GeForce RTX 4090", 24564, (8, 9), _ADA, (1008, None, 4, None), (82.6, 82.6, 165.2)
    ),
    "rtx5090": _gpu(
        "NVIDIA GeForce RTX 5090", 32607, (12, 0), _BLACKWELL, (1792, None, 5, None),
        (104.8, 104.8, 209.5),
    ),
    "rtx_pro_6000": _gpu(
        _RTX_PRO, 97887, (12, 0), _PRO_BLACKWELL, (1792, None, 5, None), (126.0, 251.9, 503.8)
    ),
    "a10g": _gpu("NVIDIA A10G", 23028, (8, 6), _A10G, (600, None, 4, 12.5), (35.0, 35.0, 70.0)),
    "l4": _gpu("NVIDIA L4", 23034, (8, 9), _L4, (300, None, 4, 12.5), (30.3, 60.0, 121.0)),
    "l40s": _gpu("NVIDIA L40S", 46068, (8, 9), _L40S, (864, None, 4, 50), (91.6, 183.0, 362.05)),
    "a100_40": _gpu(
        "NVIDIA A100-SXM4-40GB", 40960, (8, 0), _A100, (1555, 600, 4, 200), _A100_PEAKS
    ),
    "a100_80": _gpu(
        "NVIDIA A100-SXM4-80GB", 81920, (8, 0), _A100, (2039, 600, 4, 200), _A100_PEAKS
    ),
    "h100": _gpu("NVIDIA H100 80GB HBM3", 81559, (9, 0), _H100, (3350, 900, 5, 400), _HOPPER_PEAKS),
    "h200": _gpu("NVIDIA H200", 143771, (9, 0), _H200, (4800, 900, 5, 400), _HOPPER_PEAKS),
    "b200": _gpu(
        "NVIDIA B200", 183359, (10, 0), _HGX, (8000, 1800, 5, 400), (75.0, 1125.0, 2250.0)
    ),
    "gb200": _gpu("NVIDIA GB200", 189471, (10, 0), _GB200, (8000, 1800, _GRACE, 400), _NVL72_PEAKS),
    "gb300": _gpu("NVIDIA GB300", 284208, (10, 3), _GB300, (8000, 1800, _GRACE, 800), _NVL72_PEAKS),
    "mi300x": _gpu(
        "AMD Instinct MI300X", 196592, (9, 4), _MI300X, (5300, 896, 5, 400), (163.4, 653.7, 1307.4)
    ),
}  # fmt: skip
"""Option of `hardware=` -> device. `cpu` and `auto` are detected instead."""

# Models with the same datasheet peaks. H100 PCIe and NVL, V100 PCIe and laptop GPUs have other
# clocks, and no peaks here.
_SAME_PEAKS = {
    "V100-SXM2-32GB": "v100_16",
    "A100-PCIE-40GB": "a100_40",
    "A100 80GB PCIe": "a100_80",
    "RTX PRO 6000 Blackwell Server Edition": "rtx_pro_6000",
}
_OTHER_MEMORY = {  # bandwidths that differ, from datasheets
    "A100 80GB PCIe": 1935e9,
    "RTX PRO 6000 Blackwell Server Edition": 1597e9,
}


def _model(name: str) -> str:
    """Return a name without the brand, which only some drivers include: `A100-SXM4-40GB`."""
    for brand in ("NVIDIA ", "Tesla ", "GeForce "):
        name = name.removeprefix(brand)
    return name.strip()


def device_option(name: str) -> str | None:
    """Return the option for exactly the model with this driver name, None without one."""
    wanted = _model(name)
    return next((o for o, device in DEVICES.items() if _model(device.name) == wanted), None)


def add_datasheet_specs(device: Device) -> Device:
    """Add the peaks and bandwidths of the datasheet, if known, to a detected device."""
    option = device_option(device.name) or _SAME_PEAKS.get(_model(device.name))
    if option is None:
        return device
    known = DEVICES[option]
    return replace(
        device,
        peak_flops=known.peak_flops,
        memory_bytes_per_s=_OTHER_MEMORY.get(_model(device.name), known.memory_bytes_per_s),
        link_bytes_per_s=known.link_bytes_per_s,
        host_bytes_per_s=known.host_bytes_per_s,
        network_bytes_per_s=known.network_bytes_per_s,
        source=known.source,
    )
