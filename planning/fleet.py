"""The fleet: equal devices in equal nodes, and the bandwidth between any of its ranks.

    inside a node    the links of the device (NVLink, Infinity Fabric, PCIe)
    between nodes    a node's network, which all rings that leave the node share; the more nodes,
                     the less of it

Ranks are numbered so that tensor-parallel ranks are neighbours, data-parallel ranks come next and
pipeline stages are farthest apart. So a ring's ranks are a fixed stride apart, and its stride says
how many of them a node holds.

`fleet_of` turns flags into a fleet. What they leave out comes from a machine's row below, else it
is what nodes of such devices usually have.
"""

import difflib
import math
from dataclasses import dataclass, replace

import devices
import program
from config import Float, Int
from devices import Device
from program import UserError, require

UNKNOWN_LINK = 32.0  # GB/s each way: PCIe 4
# Nodes behind one switch do not disturb each other. Beyond, static routes collide, and leave 40 to
# 60 % of a network of 4,000 ports (Hoefler et al., "Multistage switches are not crossbars", 2008).
# We take 3 % for each doubling of the nodes beyond one switch: with the 70 % that collectives reach
# at best (step_time.Constants.link), 55 % are left on 4,096 nodes.
SWITCH_NODES = 16
COLLISIONS = 0.03
NODE_SIZE = 8  # torch devices of a node if nobody says
DOUBTFUL_NETWORK = 3.0  # times a device's usual network: above that, it may be in Gb/s

# GB/s, each way, that a node's network has for each of its torch devices, in the nodes of vendors
# and of large machines. The keys are what the names of a family begin with. NVIDIA's user guides:
# DGX A100 8 x 200 Gb/s; DGX H100, H200 and B200 8 x 400; DGX B300 8 x 800; GB200 NVL72 72 x 400.
# Frontier and LUMI: 4 x 200 Gb/s for 8 GCDs of MI250X. El Capitan and JUPITER: 4 x 200 for 4 MI300A
# or GH200. Azure's ND MI300X v5: 8 x 400; other nodes with AMD's boards of 8 are alike.
NETWORK_GBS = {
    "A100 SXM": 25,
    "H100 SXM": 50,
    "H200 SXM": 50,
    "B200": 50,
    "B300": 100,
    "GB200": 50,
    "GH200": 25,
    "MI250": 12.5,
    "MI300X": 50,
    "MI300A": 25,
    "MI325X": 50,
    "MI350X": 50,
    "MI355X": 50,
}
OTHER_NETWORK_GBS = 12.5  # of other devices: 100 Gb/s each, a guess

# Watts of one torch device with its share of the node: rated watts of a published node / its torch
# devices (4 cards x 2; 8 GPUs; 8 GPUs). The keys are what the names of a family begin with.
NODE_WATTS = {"MI250": 3000 / 8, "A100 SXM": 6500 / 8, "H100 SXM": 10200 / 8}
NODE_OVER_BOARD = 1.7  # node / board power of other devices: the mean of these three

# MosaicML, "Training LLMs at Scale with AMD MI250 GPUs" (2023): MPT-7B on nodes of 4 cards, with a
# global batch of 1536 sequences. {MI250 cards: TFLOP/s of one card, which is two torch devices}
PUBLISHED_MI250 = {4: 166, 128: 159}


@dataclass(frozen=True)
class Machine:
    """The nodes of a machine that exists."""

    device: str  # as on a command line
    node_size: int  # torch devices of a node
    network_gbs: float  # of a node, each way, GB/s
    links: str  # what that is made of, as published


# Nominal figures. Sources: OLCF's Frontier guide; LUMI's user guide (LUMI-G); arXiv 2104.04473
# (Selene); BigScience's README (Jean Zay: 135 of its 400 Gb/s arrived); JSC on JUPITER; arXiv
# 2407.21783 (Meta's Grand Teton); AWS's and Azure's pages; LLM Foundry's benchmarks (MosaicML's
# A100) and MosaicML's post on MI250 (2023). Rows "from memory" were not looked up.
MACHINES = {
    "frontier": Machine("mi250x", 8, 100, "4 x 200 Gb/s Slingshot"),
    "lumi": Machine("mi250x", 8, 100, "4 x 200 Gb/s Slingshot"),
    "perlmutter": Machine("a100-40gb", 4, 100, "4 x 200 Gb/s Slingshot, from memory"),
    "selene": Machine("a100-80gb", 8, 200, "8 x 200 Gb/s InfiniBand"),
    "jean-zay": Machine("a100-80gb", 8, 50, "4 x 100 Gb/s Omni-Path"),
    "jupiter": Machine("gh200", 4, 100, "4 x 200 Gb/s InfiniBand"),
    "eos": Machine("h100", 8, 400, "8 x 400 Gb/s InfiniBand, from memory"),
    "grand-teton": Machine("h100", 8, 400, "8 x 400 Gb/s RoCE"),
    "aws-p4d": Machine("a100-40gb", 8, 50, "4 x 100 Gb/s EFA"),
    "aws-p5": Machine("h100", 8, 400, "32 x 100 Gb/s EFA"),
    "azure-mi300x": Machine("mi300x", 8, 400, "8 x 400 Gb/s InfiniBand"),
    "mosaicml-a100": Machine("a100-40gb", 8, 200, "1600 Gb/s RoCE"),
    "mosaicml-h100": Machine("h100", 8, 400, "8 x 400 Gb/s, from memory"),
    "mosaicml-mi250": Machine("mi250", 8, 100, "800 Gb/s"),
}


@dataclass(frozen=True)
class Fleet:
    """Equal devices in equal nodes. Raises UserError if the device has no bf16 peak."""

    device: Device
    devices: int = 1  # torch devices in all, one global rank each
    node_size: int = 8  # torch devices of a node
    network_gbs: float = 100.0  # of a node, each way, GB/s
    network_note: str = ""  # where network_gbs is from, if nobody has set or measured it
    notes: tuple[str, ...] = ()  # what a plan says of measurements in these figures

    def __post_init__(self):
        no_peak = f"no bf16 peak known for {self.device.name}: there is nothing to plan with"
        fix = "name another --device, such as mi250, a100 or h100 (python devices.py lists them)"
        require(self.device.bf16_tflops, f"{no_peak}: {fix}")

    def check_split(self, tp: int, pp: int) -> None:
        """UserError unless tp x pp divide the devices, and tensor ranks are within a node."""
        replica = tp * pp  # ranks that hold one copy of the model
        below = self.devices // replica * replica
        nearest = f"{below} or {below + replica}" if below else f"{replica}"
        problem = f"devices {self.devices} is not a multiple of tp {tp} x pp {pp} = {replica}"
        require(self.devices == below, f"{problem}: set --devices={nearest}")

        can_be = [n for n in range(1, self.node_size + 1) if self.node_size % n == 0]
        nodes = f"tp {tp} does not divide the {self.node_size} devices of a node"
        apart = "some tensor ranks would be on two nodes"
        in_one_node = self.devices <= self.node_size or tp in can_be
        require(in_one_node, f"{nodes}: {apart}: tp can be {', '.join(map(str, can_be))}")

    @property
    def share_of_network(self) -> float:
        """Share of a node's network that routes leave when many nodes send at once.

        1 up to SWITCH_NODES.
        """
        nodes = self.devices / self.node_size
        doublings = max(0.0, math.log2(nodes / SWITCH_NODES))
        return (1 - COLLISIONS) ** doublings

    def bandwidth(self, n: int, stride: int) -> float:
        """Bytes/s of a ring of n ranks whose global ranks are `stride` apart.

        All rings that leave a node share its network, and with many nodes they collide.
        """
        ranks_in_node = max(1, min(n, self.node_size // stride))  # of this ring
        gbs = self.device.link_gbs or UNKNOWN_LINK
        if ranks_in_node < n:
            ranks_on_network = min(self.node_size, self.devices)
            network_gbs = self.network_gbs * self.share_of_network
            gbs = min(gbs, network_gbs * ranks_in_node / ranks_on_network)
        return gbs * 1e9


@dataclass
class FleetArgs:
    """The devices."""

    machine: str = ""  # frontier, lumi, ...: its device, node_size and network
    device: str = "auto"  # the kind: mi250, h100, ... (python devices.py lists them)
    devices: Int[1, 10**6] = 8  # how many torch devices (an MI250 card is two)
    node_size: Int[1, 10**4] = 0  # torch devices of a node (0: the machine's, else 8)
    network: Float[1e-3, 10**6] = 0.0  # GB/s of a node, each way (0: the machine's, or the usual)
    bandwidth: Float[1e-3, 10**6] = 0.0  # GB/s of a device's memory (0: the datasheet's)
    memory_gb: Float[1e-3, 10**6] = 0.0  # GiB of a device (0: the datasheet's)
    attention_efficiency: Float[1e-3, 1] = 0.0  # of the peak: 0.35 is 35 % (0: as in 2023)

    def check(self) -> None:
        """UserError if the machine is unknown."""
        if self.machine and self.machine not in MACHINES:
            near = difflib.get_close_matches(self.machine, MACHINES, n=3) or list(MACHINES)
            guess = f"did you mean {' or '.join(near)}?"
            raise UserError(f"no machine {program.quote(self.machine)}, {guess}")


def fleet_of(args: FleetArgs) -> Fleet:
    """The fleet of these settings.

    A network that cannot be one is questioned on standard error. Raises UserError if the device is
    unknown or contradicts the machine.
    """
    machine = MACHINES.get(args.machine)
    device = device_of_machine(machine, args) if machine else devices.by_name(args.device)
    usual_size = machine.node_size if machine else NODE_SIZE
    node_size = args.node_size or usual_size
    usual_gbs = of_family(NETWORK_GBS, device) or OTHER_NETWORK_GBS  # of a device
    each_gbs = machine.network_gbs / usual_size if machine else usual_gbs
    network_gbs = args.network or each_gbs * node_size

    note = ""
    if not args.network:
        source = f"a guess for {device.name}"
        if of_family(NETWORK_GBS, device):
            source = f"as usual with {device.name}"
        if machine:
            source = f"{args.machine}'s, {machine.links}, of which not all may arrive"
        each = f"network {network_gbs:g} GB/s a node, each way, {each_gbs:g} for each device"
        note = f"{each}: {source}: set --network, it matters more than any constant"
    elif args.network > DOUBTFUL_NETWORK * usual_gbs * node_size:
        gbs = f"--network={args.network:g} is {args.network:,.6g} GB/s a node, each way"
        fix = f"if these are Gb/s, divide by 8: --network={args.network / 8:g}"
        program.say_once("note", f"{gbs}: {fix}")
    device = replace(
        device,
        bandwidth_gbs=args.bandwidth or device.bandwidth_gbs,
        memory_gb=args.memory_gb or device.memory_gb,
        attention=args.attention_efficiency or device.attention,
    )
    return Fleet(device, args.devices, node_size, network_gbs, note)


def device_of_machine(machine: Machine, args: FleetArgs) -> Device:
    """The device of a machine, perhaps with more memory than most of its nodes have."""
    its_device = devices.by_name(machine.device)
    if args.device in devices.THIS_MACHINE:
        return its_device
    device = devices.by_name(args.device)
    same_family = device.name.split()[0] == its_device.name.split()[0]
    has = f"--machine={args.machine} has {its_device.name}"
    require(same_family, f"{has}: remove --device={args.device}")
    return device


def of_family(figures: dict[str, float], device: Device) -> float | None:
    """The figure of the family with which the device's name begins, or None."""
    found = [figure for family, figure in figures.items() if device.name.startswith(family)]
    return found[0] if found else None
