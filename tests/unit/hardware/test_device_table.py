"""The table agrees with its folder of options, and with arithmetic on the vendor's own shapes."""

import pytest

from eke.common.paths import conf_folder
from eke.hardware import DEVICES, Device, device_option
from eke.hardware.datasheets import add_datasheet_specs


def test_device_options_and_device_table_match():
    options = {path.stem for path in (conf_folder() / "hardware").glob("*.yaml")}
    assert options - {"auto", "cpu"} == set(DEVICES)


def test_every_device_has_a_source_and_peaks():
    for option, device in DEVICES.items():
        assert (device.kind, device.present) == ("cuda", False), option
        assert device.source.startswith("https://"), option
        assert device.memory_bytes is not None, option
        assert device.capability is not None, option
        ampere_or_newer = device.capability >= (8, 0)
        assert device.peak("float32") is not None, option
        assert device.peak("float16") is not None, option
        assert (device.peak("bfloat16") is not None) == ampere_or_newer, option
        assert (device.peak("tf32") is not None) == ampere_or_newer, option


# Tensor cores and multiply-adds per core and clock (float16 operands, float32 accumulation, dense)
# of the architecture whitepapers; boost clocks in GHz. A headline number, sparse or accumulated in
# float16, would be off by two. V100: 640 x 64. TU102: 576 x 64, T4: 320 x 64. GA102: 328 x 64 (half
# of its 128). AD102: 512 x 64 (half of 128), L4: 232 x 128. GB202: 680 x 64
# (half of 128), in an RTX PRO 752 x 128. A100: 432 x 256. H100: 528 x 512. MI300X: 304 x 1,024.
SHAPES = {
    "v100_16": (640 * 64, 1.530),
    "titan_rtx": (576 * 64, 1.770),
    "t4": (320 * 64, 1.590),
    "rtx3090": (328 * 64, 1.695),
    "rtx4090": (512 * 64, 2.520),
    "a100_40": (432 * 256, 1.410),
    "a100_80": (432 * 256, 1.410),
    "l4": (232 * 128, 2.040),
    "rtx5090": (680 * 64, 2.407),
    "rtx_pro_6000": (752 * 128, 2.617),
    "h100": (528 * 512, 1.830),
    "h200": (528 * 512, 1.830),
    "mi300x": (304 * 1024, 2.100),
}


def test_peak_is_dense_with_float32_accumulation():
    expected = {option: 2 * count * ghz * 1e9 for option, (count, ghz) in SHAPES.items()}
    found = {option: DEVICES[option].peak("float16") for option in SHAPES}
    assert found == pytest.approx(expected, rel=0.01)


MODELS = {
    "Tesla V100-SXM2-16GB": "v100_16",
    "NVIDIA TITAN RTX": "titan_rtx",
    "TITAN RTX": "titan_rtx",  # of an older driver, as the next two
    "GeForce RTX 3090": "rtx3090",
    "A100-SXM4-40GB": "a100_40",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA L40S": "l40s",
    "NVIDIA GB200": "gb200",
    **dict.fromkeys(("NVIDIA L40", "NVIDIA A10", "NVIDIA H100 PCIe", "NVIDIA H100 NVL")),
    **dict.fromkeys(("NVIDIA GeForce RTX 3090 Ti", "NVIDIA GeForce RTX 4090 Laptop GPU")),
    **dict.fromkeys(("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "AMD EPYC", "Tesla V100-SXM2-32GB")),
}


def test_driver_name_matches_one_model_or_none():
    assert {name: device_option(name) for name in MODELS} == MODELS


def test_other_memory_size_has_equal_peaks():
    found = [add_datasheet_specs(Device("cuda", f"Tesla V100-SXM2-{n}GB")) for n in (16, 32)]
    assert found[0].peak_flops == found[1].peak_flops
    assert found[0].memory_bytes_per_s == found[1].memory_bytes_per_s == 900e9


def test_other_memory_has_its_own_bandwidth():
    unknown = Device("cuda", "NVIDIA H100 PCIe")
    assert add_datasheet_specs(unknown) == unknown
    card = add_datasheet_specs(Device("cuda", "NVIDIA A100 80GB PCIe"))
    assert card.peak_flops == DEVICES["a100_80"].peak_flops
    assert card.memory_bytes_per_s == 1935e9


def test_every_device_of_the_table_has_its_bandwidths():
    for option, device in DEVICES.items():
        assert device.memory_bytes_per_s, option
        assert device.host_bytes_per_s, option
        # The memory of a GPU is faster than any way out of it.
        assert device.memory_bytes_per_s > (device.link_bytes_per_s or 0), option
        assert device.memory_bytes_per_s > device.host_bytes_per_s, option
