"""planning/fleet.py: the fleet of flags, of a machine that has a name, and its network."""

import pytest

import devices
import program
from planning import fleet
from planning.fleet import MACHINES, FleetArgs, fleet_of
from program import UserError


def test_every_machine_is_a_fleet_of_its_own_figures():
    for name, machine in MACHINES.items():
        found = fleet_of(FleetArgs(machine=name, devices=2 * machine.node_size))
        assert found.device == devices.by_name(machine.device), name
        assert found.node_size == machine.node_size
        assert found.network_gbs == machine.network_gbs
        assert machine.links in found.network_note


def test_links_add_up_to_the_network_of_a_machine():
    """`8 x 400 Gb/s` are 400 GB/s."""
    for name, machine in MACHINES.items():
        words = machine.links.split(" Gb/s")[0].split(" x ")
        gigabits = float(words[-1]) * (int(words[0]) if len(words) == 2 else 1)
        assert machine.network_gbs == gigabits / 8, name


@pytest.mark.parametrize("device, node_size, gbs", [
    ("mi250", 8, 100),
    ("mi250x", 4, 50),
    ("h100", 8, 400),
    ("a100", 8, 200),
    ("gb200", 4, 200),
    ("4090", 2, 25),
])  # fmt: skip
def test_a_network_grows_with_the_devices_of_a_node(device, node_size, gbs):
    found = fleet_of(FleetArgs(device=device, devices=64, node_size=node_size))
    assert found.network_gbs == gbs
    assert f"{gbs / node_size:g} for each device" in found.network_note
    assert ("a guess" in found.network_note) == (device == "4090")


def test_every_family_with_a_network_is_in_the_table():
    for family in fleet.NETWORK_GBS:
        assert any(row.name.startswith(family) for row in devices.TABLE), family


def test_flags_override_a_machine():
    args = FleetArgs(machine="frontier", devices=64, node_size=4, network=30, memory_gb=48)
    found = fleet_of(args)
    assert (found.node_size, found.network_gbs, found.network_note) == (4, 30, "")
    assert found.device.memory_gb == 48
    half = fleet_of(FleetArgs(machine="frontier", devices=64, node_size=4))
    assert half.network_gbs == 50
    larger = fleet_of(FleetArgs(machine="perlmutter", device="a100-80gb"))
    assert (larger.device.memory_gb, larger.node_size) == (80, 4)
    with pytest.raises(UserError, match="--machine=lumi has MI250X GCD: remove --device=h100"):
        fleet_of(FleetArgs(machine="lumi", device="h100"))


@pytest.mark.parametrize("device, network, questioned", [
    ("mi250", 800, True),
    ("mi250", 300, False),
    ("h100", 1200, False),
])  # fmt: skip
def test_a_network_in_gigabits_is_questioned(capsys, device, network, questioned):
    program.say_once.cache_clear()
    found = fleet_of(FleetArgs(device=device, devices=64, network=network))
    err = capsys.readouterr().err
    assert found.network_gbs == network  # it is taken nevertheless
    assert (f"if these are Gb/s, divide by 8: --network={network / 8:g}" in err) == questioned
    assert err.count("\n") == questioned
