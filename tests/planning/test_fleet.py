"""planning/fleet.py: the fleet of flags, of a machine that has a name, and its network."""

import pytest

import devices
import program
from planning.fleet import MACHINES, FleetArgs, fleet_of
from program import UserError


def test_every_machine_is_a_fleet_whose_links_add_up_to_its_network():
    """`8 x 400 Gb/s` are 400 GB/s."""
    for name, machine in MACHINES.items():
        found = fleet_of(FleetArgs(machine=name, devices=2 * machine.node_size))
        assert found.device == devices.by_name(machine.device), name
        assert (found.node_size, found.network_gbs) == (machine.node_size, machine.network_gbs)
        words = machine.links.split(" Gb/s")[0].split(" x ")
        gigabits = float(words[-1]) * (int(words[0]) if len(words) == 2 else 1)
        assert machine.network_gbs == gigabits / 8, name


@pytest.mark.parametrize("device, node_size, gbs", [
    ("mi250x", 4, 50),
    ("h100", 8, 400),
    ("4090", 2, 25),
])  # fmt: skip
def test_a_network_grows_with_the_devices_of_a_node(device, node_size, gbs):
    found = fleet_of(FleetArgs(device=device, devices=64, node_size=node_size))
    assert found.network_gbs == gbs
    assert f"{gbs / node_size:g} for each device" in found.network_note
    assert ("a guess" in found.network_note) == (device == "4090")


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


@pytest.mark.parametrize(
    "device, network, questioned", [("mi250", 800, True), ("h100", 1200, False)]
)
def test_a_network_in_gigabits_is_questioned(capsys, device, network, questioned):
    program.say_once.cache_clear()
    found = fleet_of(FleetArgs(device=device, devices=64, network=network))
    assert found.network_gbs == network  # it is taken nevertheless
    said = capsys.readouterr().err
    assert said.count("\n") == questioned
    assert not questioned or "--network=100" in said
