"""devices.py: strings that real devices report -> the right peak per torch device, or none."""

from types import SimpleNamespace

import pytest
import torch

import devices
from config import UserError

REPORTED = [  # name, arch, units that torch reports, GiB, bf16 TFLOP/s
    ("NVIDIA A100-SXM4-40GB", "8.0", 108, 39.4, 312),
    ("NVIDIA A100 80GB PCIe", "8.0", 108, 79.2, 312),
    ("NVIDIA H100 80GB HBM3", "9.0", 132, 79.1, 989.4),
    ("NVIDIA H100 PCIe", "9.0", 114, 79.1, 756.5),
    ("NVIDIA H100 NVL", "9.0", 132, 93.1, 835.5),
    ("NVIDIA H200", "9.0", 132, 139.8, 989.4),
    ("NVIDIA H200 NVL", "9.0", 132, 139.8, 836),
    ("NVIDIA GH200 480GB", "9.0", 132, 94.5, 989.4),
    ("NVIDIA B200", "10.0", 148, 179, 2250),
    ("NVIDIA GB200", "10.0", 152, 185, 2500),
    ("NVIDIA GeForce RTX 4090", "8.9", 128, 23.6, 165.2),
    ("AMD Instinct MI250X/MI250", "gfx90a:sramecc+:xnack-", 104, 64, 181.05),
    ("AMD Instinct MI250X/MI250", "gfx90a:sramecc+:xnack-", 110, 64, 191.5),
    ("AMD Instinct MI250X / MI250", "gfx90a", 104, 64, 181.05),
    ("amd instinct MI250X /MI250", "gfx90a", 110, 64, 191.5),
    ("AMD Instinct MI250", "gfx90a", 104, 64, 181.05),
    ("AMD Instinct MI250X", "gfx90a", 110, 64, 191.5),
    ("AMD Instinct MI210", "gfx90a", 104, 64, 181.0),
    ("", "gfx90a:sramecc+:xnack-", 104, 64, 181.05),
    ("", "gfx90a:sramecc+:xnack-", 110, 64, 191.5),
    ("", "gfx908:sramecc+:xnack-", 120, 32, 92.3),
    ("AMD Radeon Graphics", "gfx942", 304, 192, 1307.4),
    ("AMD Radeon Graphics", "gfx942", 304, None, 1307.4),
    ("AMD Instinct MI300X VF", "gfx942", 304, 192, 1307.4),
    ("AMD Instinct MI325X", "gfx942", 304, 256, 1307.4),
    ("AMD Instinct MI350X", "gfx950", 256, 288, 2306.9),
    ("AMD Instinct MI355X", "gfx950", 256, 288, 2516.6),
    ("AMD Instinct MI300X", "gfx942", 38, 24, 1307.4 / 8),  # CPX: one card, eight devices
    ("Radeon RX 7900 XTX", "gfx1100", 48, 24, 122.9),  # work-group processors
    ("AMD Radeon RX 7900 XTX", "gfx1100", 96, 24, 122.9),
    ("AMD Radeon Graphics", "gfx1100", 48, 48, 122.6),  # memory tells the W7900 from the XTX
    ("AMD Radeon RX 9070 XT", "gfx1201", 32, 16, 195),
]


@pytest.mark.parametrize("name, arch, units, memory, tflops", REPORTED)
def test_a_reported_device_has_its_peak(name, arch, units, memory, tflops):
    assert devices.lookup(name, arch, units, memory).bf16_tflops == pytest.approx(tflops)


UNKNOWN = [
    ("NVIDIA GeForce RTX 4090 Laptop GPU", "8.9", 76, 16),
    ("NVIDIA GeForce RTX 3090 Ti", "8.6", 84, 24),
    ("NVIDIA L40", "8.9", 142, 44.5),  # shares everything but the name with the L40S, and has half its peak
    ("NVIDIA GB300", "10.3", 152, 288),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "9.0", 16, 9.8),
    ("", "gfx950", 256, 288),  # an MI350X or an MI355X
    ("AMD Radeon Graphics", "gfx1150", 8, 32),
    ("", "gfx1250", 256, 432),
    ("Some New Thing", "gfx1300", 100, 100),
]


@pytest.mark.parametrize("name, arch, units, memory", UNKNOWN)
def test_an_unknown_device_has_no_peak(name, arch, units, memory):
    assert devices.lookup(name, arch, units, memory) is None


def test_v100_is_known_and_has_no_bf16_peak():
    assert devices.lookup("Tesla V100-SXM2-32GB", "7.0", 80, 31.7).bf16_tflops is None


def test_units_times_clock_for_an_amd_device_without_a_row():
    assert devices.lookup("AMD Instinct MI308X", "gfx942", 80).bf16_tflops == pytest.approx(80 * 2100 * 2048 / 1e6)
    assert devices.lookup("", "gfx1101", 30, 16, clock_mhz=2430).bf16_tflops == pytest.approx(74.6, rel=2e-3)
    assert devices.lookup("", "gfx950", 256, 288, clock_mhz=2400).bf16_tflops == pytest.approx(2516.6, rel=2e-3)


def test_the_tables_amd_peaks_equal_units_times_clock():
    for row in devices.TABLE:
        per_clock, clock = devices.PER_CLOCK.get(row.arch, (0, 0))
        if clock:
            assert row.bf16_tflops == pytest.approx(row.units * clock * per_clock / 1e6, rel=2e-3), row.name


@pytest.mark.parametrize("text, name", [
    ("mi250", "MI250 GCD"), ("MI250X", "MI250X GCD"), ("mi300x", "MI300X"), ("a100", "A100 SXM 80GB"),
    ("h100", "H100 SXM"), ("h100-nvl", "H100 NVL"), ("A100 PCIe 40GB", "A100 PCIe 40GB"), ("7900_xtx", "RX 7900 XTX"),
])  # fmt: skip
def test_names_on_a_command_line(text, name):
    assert devices.by_name(text).name == name


def test_a_misspelt_name_gets_the_nearest_ones():
    with pytest.raises(UserError, match="no accelerator 'mi300' .* mi300"):
        devices.by_name("mi300")
    with pytest.raises(UserError, match="h100"):
        devices.by_name("h10")
    with pytest.raises(UserError, match="a100"):
        devices.by_name("")


def test_of_reads_the_properties_that_torch_reports(monkeypatch):
    mi250 = SimpleNamespace(
        name="", gcnArchName="gfx90a:sramecc+:xnack-", multi_processor_count=104, total_memory=64 * 2**30
    )
    h100 = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, total_memory=79 * 2**30
    )
    for properties, hip, tflops in ((mi250, "6.4.4", 181.05), (h100, None, 989.4)):
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, p=properties: p)
        assert devices.of(torch.device("cuda", 0)).bf16_tflops == tflops
        assert devices.peak_flops("auto", torch.device("cuda", 0), torch.bfloat16) == tflops * 1e12
    assert devices.of(torch.device("cpu")) is None


def test_peak_flops_of_a_cpu_is_what_the_user_sets_or_measures():
    cpu = torch.device("cpu")
    assert devices.peak_flops("auto", cpu, torch.float32) is None
    assert devices.peak_flops(181.05, cpu, torch.float32) == pytest.approx(181.05e12)
    assert 1e8 < devices.peak_flops("measure", cpu, torch.float32) < 1e14


def test_the_demonstration_prints_every_row(capsys):
    devices.main()
    out = capsys.readouterr().out
    assert all(row.name in out for row in devices.TABLE) and "this machine" in out


@pytest.mark.gpu
def test_this_gpu_is_known_and_reaches_a_plausible_share_of_its_peak():
    device = torch.device("cuda", 0)
    peak = devices.peak_flops("auto", device, torch.bfloat16)
    assert peak is None or 0.3 * peak < devices.measure_peak(device, torch.bfloat16) < 1.02 * peak
