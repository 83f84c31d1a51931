"""devices.py: strings that real devices report -> the right peak per torch device, or none."""

import csv
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import refusal

import devices
import processes
import program
from config import TrainConfig
from program import UserError

# Vendors' datasheets and product pages, collected independently of devices.TABLE.
FIGURES = Path(__file__).parent / "accelerators.csv"

REPORTED = [  # name, arch, units that torch reports, GiB, bf16 TFLOP/s; more in accelerators.csv
    ("NVIDIA GH200 480GB", "9.0", 132, 94.5, 989.4),
    ("AMD Instinct MI250X/MI250", "gfx90a:sramecc+:xnack-", 104, 64, 181.05),
    ("amd instinct MI250X /MI250", "gfx90a", 110, 64, 191.5),
    ("AMD Instinct MI210", "gfx90a", 104, 64, 181.0),
    ("", "gfx90a:sramecc+:xnack-", 110, 64, 191.5),
    ("AMD Radeon Graphics", "gfx942", 304, None, 1307.4),
    ("AMD Instinct MI300X VF", "gfx942", 304, 192, 1307.4),
    ("AMD Instinct MI300X", "gfx942", 38, 24, 1307.4 / 8),  # CPX: one card, eight devices
    ("Radeon RX 7900 XTX", "gfx1100", 48, 24, 122.9),  # work-group processors
    ("AMD Radeon Graphics", "gfx1100", 48, 48, 122.6),  # memory tells the W7900 from the XTX
]


@pytest.mark.parametrize("name, arch, units, memory, tflops", REPORTED)
def test_a_reported_device_has_its_peak(name, arch, units, memory, tflops):
    assert devices.lookup(name, arch, units, memory).bf16_tflops == pytest.approx(tflops)


UNKNOWN = [
    ("NVIDIA GeForce RTX 4090 Laptop GPU", "8.9", 76, 16),
    ("NVIDIA L40", "8.9", 142, 44.5),  # an L40S but for the name, with half its peak
    ("NVIDIA GB300", "10.3", 152, 288),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "9.0", 16, 9.8),
    ("", "gfx950", 256, 288),  # an MI350X or an MI355X
    ("AMD Instinct MI308X", "gfx942", 80, 192),
    ("Some New Thing", "gfx1300", 100, 100),
]


@pytest.mark.parametrize("name, arch, units, memory", UNKNOWN)
def test_an_unknown_device_has_no_peak(name, arch, units, memory):
    assert devices.lookup(name, arch, units, memory) is None


def test_every_figure_equals_the_collected_table():
    ours = {row.name: row for row in devices.TABLE}
    compared = {"H200 NVL"}  # it is in the H200's note
    for row in csv.DictReader(FIGURES.open()):
        if "(card)" not in row["name"]:
            require_equal(ours[row["name"]], row)
            compared.add(row["name"])
    assert compared == set(ours)


def require_equal(device, row: dict) -> None:
    """row: of accelerators.csv. Of two memory sizes (16/32) either counts; of a range, its end."""
    name = device.name
    assert device.arch == row["gcnArch_or_cc"], name
    assert device.units == int(row["cu_or_sm_per_torch_device"] or 0), name
    assert (device.bf16_tflops or 0) == float(row["dense_bf16_tflops"]), name
    assert (device.fp16_tflops or 0) == float(row["dense_fp16_tflops"]), name
    assert f"{device.memory_gb:g}" in row["hbm_gb"].split("/"), name
    assert device.bandwidth_gbs == float(row["bw_gbs"]), name
    watts = re.match(r"(?:\d+-)?(\d+)", row["tdp_w"])
    assert device.watts == (float(watts[1]) if watts else None), name

    both_ways = 200 if device.per_card == 2 else float(row["interconnect_gbs_bidir"])
    assert 2 * (device.link_gbs or 0) == both_ways, name
    if row["vendor"] != "Google":
        require_found_by_name(device, row["device_name_strings"])


def require_found_by_name(device, names: str) -> None:
    """A name that it reports (`A|B|(a remark)`) finds it; no such name finds another peak."""
    found = []
    for name in names.split("|"):
        found.append(devices.lookup(name, device.arch, device.units, device.memory_gb))
    assert device in found, device.name
    for other in filter(None, found):
        assert other.fp16_tflops == pytest.approx(device.fp16_tflops, rel=5e-4), device.name


def test_a_partition_has_its_share_and_no_known_link():
    whole = devices.by_name("mi300x")
    part = devices.lookup("AMD Instinct MI300X", "gfx942", 38)
    assert (part.memory_gb, part.watts, part.per_card, part.link_gbs) == (192 / 8, 750 / 8, 8, None)
    assert part.fp16_tflops == part.bf16_tflops == whole.fp16_tflops / 8


TYPED = {
    "mi250": "MI250 GCD",
    "MI250X": "MI250X GCD",
    "mi250x-gcd": "MI250X GCD",
    "a100": "A100 SXM 80GB",
    "A100 PCIe 40GB": "A100 PCIe 40GB",
    "h100": "H100 SXM",
    "h100-nvl": "H100 NVL",
    "7900_xtx": "RX 7900 XTX",
    "tpu-v5p": "TPU v5p",
}


def test_names_on_a_command_line():
    assert {text: devices.by_name(text).name for text in TYPED} == TYPED


def test_names_that_drivers_report_are_names_on_a_command_line():
    """Without the number of units a name may be of two rows, whose peaks differ by 6 %."""
    for row in csv.DictReader(FIGURES.open()):
        for name in row["device_name_strings"].split("|"):
            if "(" in name or name == "-":  # a remark
                continue
            found = devices.by_name(name)
            assert found.arch == row["gcnArch_or_cc"], name
            peak = float(row["dense_fp16_tflops"])
            assert (found.fp16_tflops or 0) == pytest.approx(peak, rel=0.06), name


def test_a_misspelt_name_gets_the_nearest_ones():
    nearest = {"mi300": "no accelerator 'mi300' .* mi300", "h10": "h100"}
    nearest |= dict.fromkeys(["", "gcd", "80gb", "sxm"], "a100")  # no model
    begin_like_a_row = ["NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 4090 D"]
    nearest |= dict.fromkeys(begin_like_a_row, "did you mean 4090")
    for text, words in nearest.items():
        with pytest.raises(UserError, match=words):
            devices.by_name(text)


def test_of_reads_the_properties_that_torch_reports(monkeypatch):
    def properties_of(name: str, units: int, gib: int, **arch) -> SimpleNamespace:
        memory = gib * 2**30
        return SimpleNamespace(name=name, multi_processor_count=units, total_memory=memory, **arch)

    mi250 = properties_of("", 104, 64, gcnArchName="gfx90a:sramecc+:xnack-")
    h100 = properties_of("NVIDIA H100 80GB HBM3", 132, 79, major=9, minor=0)
    mi100 = properties_of("AMD Instinct MI100", 120, 32, gcnArchName="gfx908")
    cuda = torch.device("cuda", 0)
    cases = [(mi250, "6.4.4", 181.05), (h100, None, 989.4), (mi100, "6.4.4", 92.3)]
    for properties, hip, tflops in cases:
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, p=properties: p)
        assert devices.identify(cuda).bf16_tflops == tflops
        assert devices.peak_flops("auto", cuda, torch.bfloat16) == tflops * 1e12
    assert devices.peak_flops("auto", cuda, torch.float16) == 184.6e12  # MI100: twice its bf16
    assert devices.peak_flops("auto", cuda, torch.float32) is None  # not in the table: MFU is n/a
    assert devices.identify(torch.device("cpu")) is None


def test_peak_flops_of_a_cpu_is_what_the_user_sets_or_measures():
    cpu = torch.device("cpu")
    assert devices.peak_flops(181.05, cpu, torch.float32) == pytest.approx(181.05e12)
    assert 1e8 < devices.peak_flops("measure", cpu, torch.float32) < 1e14


@pytest.mark.gpu
def test_this_gpu_is_known_and_reaches_a_plausible_share_of_its_peak():
    device = torch.device("cuda", 0)
    peak = devices.peak_flops("auto", device, torch.bfloat16)
    if peak is not None:
        assert 0.3 * peak < devices.measure_peak(device, torch.bfloat16) < 1.02 * peak


@pytest.mark.parametrize(
    "features, has_bf16",
    [
        ({"amx_tile": True, "amx_bf16": True}, True),
        ({"avx2": True, "avx512_bf16": False}, False),
        ({"bf16": True}, False),  # of ARM: not known to be faster
    ],
)
def test_the_precision_of_a_cpu_follows_from_its_features(monkeypatch, features, has_bf16):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features, raising=False)
    assert devices.computes_in_bf16(torch.device("cpu")) == has_bf16


# --- A GPU that cannot be used


@pytest.fixture
def dev(tmp_path, monkeypatch):
    """`dev(*names)`: a folder with these device files, and no variable that hides GPUs."""
    for maker in ("CUDA", "HIP", "ROCR"):
        monkeypatch.delenv(f"{maker}_VISIBLE_DEVICES", raising=False)

    def make(*names):
        for name in names:
            (tmp_path / name).touch()
        return str(tmp_path)

    return make


@pytest.mark.parametrize(
    "names, cuda, hip, words, has_its_build",
    [
        (["null", "nvidiactl", "nvidia-uvm", "dri"], "13.0", None, "^$", False),
        (["nvidia0"], "13.0", None, r"^torch for CUDA 13\.0 cannot .*nvidia-smi fails", True),
        (["nvidia3", "kfd"], "12.8", None, r"^torch for CUDA 12\.8 cannot .*nvidia-smi", True),
        (["nvidia0", "kfd"], None, "6.4", r"^torch for ROCm 6\.4 cannot .*rocminfo fails", True),
        (["kfd"], None, None, "GPU is AMD's, but torch is built for CPUs: .*INSTALL", False),
        (["nvidia0"], None, "6.4", "GPU is NVIDIA's, but torch is built for AMD: .*INSTALL", False),
    ],
)
def test_why_a_gpu_is_not_used(dev, monkeypatch, names, cuda, hip, words, has_its_build):
    folder = dev(*names)
    why, found = devices.unused_gpu(folder, cuda, hip)
    assert re.search(words, why) and "\n" not in why and found == has_its_build
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):  # hidden on purpose
        for value in ("", "-1"):
            with monkeypatch.context() as hidden:
                hidden.setenv(variable, value)
                assert devices.unused_gpu(folder, cuda, hip) == ("", False)


def test_a_gpu_that_one_may_not_open_names_the_groups(dev, monkeypatch):
    folder = dev("kfd")
    monkeypatch.setattr(os, "access", lambda path, mode: path != f"{folder}/kfd")
    why, _ = devices.unused_gpu(folder, None, "6.4")
    assert why.startswith(f"you may not open {folder}/kfd: sudo usermod -aG render,video")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="torch can use this machine's GPU")
@pytest.mark.parametrize(
    "device, ranks, cuda, words",
    [
        ("auto", 1, "13.0", "note: using the CPU: torch for CUDA 13.0 cannot use the GPU"),
        ("auto", 1, "", "note: using the CPU: the GPU is NVIDIA's, but torch is built for CPUs"),
        ("auto", 2, "13.0", None),
        ("cuda", 1, "", None),
        ("cpu", 1, "13.0", ""),
    ],
)
def test_a_launch_beside_a_gpu_that_torch_cannot_use(
    dev, monkeypatch, capsys, device, ranks, cuda, words
):
    """It takes the CPU with a note, or is refused (None)."""
    folder, unused_gpu = dev("nvidia0"), devices.unused_gpu
    monkeypatch.setattr(devices, "unused_gpu", lambda *_: unused_gpu(folder, cuda, None))
    program.say_once.cache_clear()
    if words is None:
        with pytest.raises(UserError, match="the GPU"):
            processes.pick_device(device, 0, ranks, ranks)
        return
    assert processes.pick_device(device, 0, ranks, ranks).type == "cpu"
    said = capsys.readouterr().err
    assert said.startswith(words) and said.count("\n") == bool(words)


@pytest.fixture
def gpu(monkeypatch):
    """`gpu(...)`: as if torch saw this GPU. `fault`: the error that its first kernel raises."""

    def see(arch, fault=None):
        def ones(size, device):
            raise fault

        is_amd = arch.startswith("gfx")
        facts = {"name": "Big GPU", "gcnArchName": f"{arch}:sramecc+:xnack-"}
        if not is_amd:
            facts["major"], facts["minor"] = map(int, arch.split("."))
        properties = SimpleNamespace(**facts)
        monkeypatch.setattr(torch.version, "hip", "6.4" if is_amd else None)
        monkeypatch.setattr(torch, "ones", ones)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)

    return see


CUDA = torch.device("cuda", 3)
FULL = "CUDA error: out of memory"
BUSY = "CUDA error: all CUDA-capable devices are busy or unavailable"
OLD = "CUDA error: no kernel image is available for execution on the device"


@pytest.mark.parametrize(
    "arch, fault, words",
    [
        ("6.1", OLD, r"no kernels for cuda:3 \(Big GPU\): .*INSTALL\.md.*DEVICES=-1$"),
        ("gfx1031", "HIP error: invalid device function", "no kernels for cuda:3 .*INSTALL"),
        ("9.0", FULL, r"^cuda:3 \(Big GPU\) has no memory free: .*nvidia-smi"),
        ("gfx90a", "HIP out of memory. Tried to allocate 2.00 MiB.", "rocm-smi --showpids"),
        ("9.0", BUSY, r"cannot be opened \(CUDA error: all .* unavailable\): see nvidia-smi"),
    ],
)
def test_a_gpu_that_cannot_be_opened_is_one_line(gpu, arch, fault, words):
    gpu(arch, fault=RuntimeError(f"{fault}\nKernel errors might be reported later\n"))
    assert re.search(words, refusal(devices.open_gpu, CUDA))


@pytest.mark.parametrize(
    "arch, has_bf16",
    [("8.0", True), ("gfx908", True), ("gfx1250", True), ("7.5", False), ("gfx1030", False)],
)
def test_bf16_on_a_gpu_that_only_emulates_it(gpu, monkeypatch, arch, has_bf16):
    """`auto` trains in fp32 there. What the user or a checkpoint says counts, with a hint."""
    gpu(arch)
    torch_says = arch.startswith("gfx") or float(arch) >= 8  # of AMD's GPUs always yes
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: torch_says)
    assert devices.computes_in_bf16(CUDA) == has_bf16
    precision, reason = devices.choose_precision(TrainConfig(precision="auto"), CUDA)
    assert precision == ("bf16" if has_bf16 else "fp32")
    assert has_bf16 or reason == "bf16 is not known to be fast on this device"

    doubt = ", though bf16 is not known to be fast on this device"
    hint = "" if has_bf16 else f"{doubt}: consider --precision=fp32"
    chosen = devices.choose_precision(TrainConfig(precision="bf16"), CUDA)
    kept = devices.choose_precision(TrainConfig(precision="auto"), CUDA, saved="bf16")
    assert chosen == ("bf16", "as set" + hint) and kept == ("bf16", "as in the checkpoint" + hint)
    fp32 = devices.choose_precision(TrainConfig(precision="fp32"), CUDA)
    assert fp32 == ("fp32", "as set")
