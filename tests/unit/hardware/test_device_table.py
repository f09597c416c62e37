"""The table agrees with its folder of options, and with arithmetic on the vendor's own shapes."""

import pytest

from eke.common.paths import conf_folder
from eke.hardware import DEVICES, Device, device_option
from eke.hardware.datasheets import with_datasheet


def test_every_option_but_auto_and_cpu_has_a_device_and_no_device_lacks_an_option():
    options = {path.stem for path in (conf_folder() / "hardware").glob("*.yaml")}
    assert options - {"auto", "cpu"} == set(DEVICES)


@pytest.mark.parametrize("option", DEVICES, ids=str)
def test_every_device_is_declared_with_a_source(option: str):
    device = DEVICES[option]
    assert device.kind == "cuda"
    assert not device.present
    assert device.source.startswith("https://")
    assert device.memory_bytes is not None
    assert device.capability is not None


@pytest.mark.parametrize("option", DEVICES, ids=str)
def test_a_format_has_a_peak_exactly_where_the_matrix_units_have_it(option: str):
    device = DEVICES[option]
    ampere_or_newer = device.capability is not None and device.capability >= (8, 0)
    assert device.peak("float32") is not None
    assert device.peak("float16") is not None
    assert (device.peak("bfloat16") is not None) == ampere_or_newer
    assert (device.peak("tf32") is not None) == ampere_or_newer


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


@pytest.mark.parametrize("option", SHAPES, ids=str)
def test_peak_follows_from_the_chip_dense_and_accumulated_in_float32(option: str):
    multiply_adds, clock_ghz = SHAPES[option]
    expected = 2 * multiply_adds * clock_ghz * 1e9
    assert DEVICES[option].peak("float16") == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        pytest.param("Tesla V100-SXM2-16GB", "v100_16", id="v100"),
        pytest.param("NVIDIA TITAN RTX", "titan_rtx", id="titan-new-driver"),
        pytest.param("TITAN RTX", "titan_rtx", id="titan-old-driver"),
        pytest.param("GeForce RTX 3090", "rtx3090", id="3090-old-driver"),
        pytest.param("A100-SXM4-40GB", "a100_40", id="a100-old-driver"),
        pytest.param("NVIDIA H100 80GB HBM3", "h100", id="h100-sxm"),
        pytest.param("NVIDIA L40S", "l40s", id="l40s"),
        pytest.param("NVIDIA L40", None, id="l40"),
        pytest.param("NVIDIA A10", None, id="a10"),
        pytest.param("NVIDIA GB200", "gb200", id="gb200"),
        pytest.param("NVIDIA H100 PCIe", None, id="h100-pcie"),
        pytest.param("NVIDIA H100 NVL", None, id="h100-nvl"),
        pytest.param("NVIDIA GeForce RTX 3090 Ti", None, id="3090-ti"),
        pytest.param("NVIDIA GeForce RTX 4090 Laptop GPU", None, id="4090-laptop"),
        pytest.param("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None, id="a-slice"),
        pytest.param("AMD EPYC", None, id="cpu"),
    ],
)
def test_a_driver_name_is_one_model_or_none(name: str, option: str | None):
    assert device_option(name) == option


def test_another_memory_size_of_the_same_chip_has_the_same_peaks():
    found = [with_datasheet(Device("cuda", f"Tesla V100-SXM2-{n}GB")) for n in (16, 32)]
    assert found[0].peak_flops == found[1].peak_flops
    assert found[0].memory_bytes_per_s == found[1].memory_bytes_per_s == 900e9
    assert device_option("Tesla V100-SXM2-32GB") is None


def test_an_unknown_model_has_no_peaks():
    unknown = Device("cuda", "NVIDIA H100 PCIe")
    assert with_datasheet(unknown) == unknown


def test_another_memory_has_a_bandwidth_of_its_own():
    card = with_datasheet(Device("cuda", "NVIDIA A100 80GB PCIe"))
    assert card.peak_flops == DEVICES["a100_80"].peak_flops
    assert card.memory_bytes_per_s == 1935e9


def test_every_device_of_the_table_has_its_bandwidths():
    for option, device in DEVICES.items():
        assert device.memory_bytes_per_s, option
        assert device.host_bytes_per_s, option
        # The memory of a GPU is faster than any way out of it.
        assert device.memory_bytes_per_s > (device.link_bytes_per_s or 0), option
        assert device.memory_bytes_per_s > device.host_bytes_per_s, option
