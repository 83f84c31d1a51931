"""Memory that knows which warp read and wrote each word, and after how many barriers.

An access is a race if another warp has used the word since the last barrier, and one of the two
writes. Shared memory also knows what is in flight, and what the async proxy may see.
"""

from dataclasses import dataclass

import numpy as np
import torch
from ptx_program import Unsupported


class Fault(Exception):
    """The kernel does what a GPU must not do."""


STEP = 64  # a stamp is STEP * barriers so far + the warp
SEVERAL = STEP - 1  # in place of a warp
HOST, NEVER = -1, -2  # stamps: written before the launch; not written


@dataclass
class Clock:
    """The barriers of a launch so far, and those before its present block."""

    barriers: int = 0
    block_began: int = 0

    def stamp(self, warps):
        """An access by `warps`, now."""
        return STEP * self.barriers + warps


class Memory:
    """Words, with a stamp of the last write and of the last read of each."""

    def __init__(self, size: int, word: int, clock: Clock):
        self.words = np.zeros(-(-size // word), f"u{word}")
        self.word, self.clock = word, clock
        self.wrote = np.full(len(self.words), NEVER, "i4")
        self.read = np.full(len(self.words), HOST, "i4")

    def places(self, address, width: int):
        """The words at `address` (n,), of `width` bytes each: (n, width / word)."""
        if (address % width).any():
            raise Fault(f"an address is not a multiple of {width} bytes")
        first = address.astype("i8") // self.word
        if len(first) and (first.min() < 0 or first.max() + width // self.word > len(self.words)):
            raise Fault("an address is outside of memory")
        return first[:, None] + np.arange(width // self.word)

    def check_order(self, stamps, now, what: str) -> None:
        """A race unless the accesses at `stamps` come before those at `now`."""
        if ((stamps >= self.clock.stamp(0)) & (stamps != now)).any():
            raise Fault(f"race: a word is {what} another warp, with no barrier between")
        if ((stamps >= 0) & (stamps < STEP * self.clock.block_began)).any():
            raise Fault(f"race: a word is {what} another block")

    def load(self, places, warps):
        """The words at `places` (n, m), read by `warps` (n,)."""
        now = self.clock.stamp(warps)[:, None]
        wrote = self.wrote[places]
        if (wrote == NEVER).any():
            raise Fault("a word is read that is in no tensor, or that nothing has written")
        self.check_order(wrote, now, "read that was written by")
        earlier = self.read[places]
        by_others = (earlier >= self.clock.stamp(0)) & (earlier != now)
        self.read[places] = np.where(by_others, self.clock.stamp(SEVERAL), now)
        same_time = self.read[places] != now  # two warps in one instruction
        self.read[places[same_time]] = self.clock.stamp(SEVERAL)
        return self.words[places]

    def claim(self, places, warps):
        """Check that `warps` may write now. Returns the stamp of it."""
        now = self.clock.stamp(warps)[:, None]
        self.check_order(self.wrote[places], now, "written that was written by")
        self.check_order(self.read[places], now, "written that was read by")
        return now

    def store(self, places, warps, data):
        """Write words (n, m)."""
        self.wrote[places] = self.claim(places, warps)
        self.words[places] = data
        if (self.words[places] != data).any():  # equal data from several threads is harmless
            raise Fault("race: two threads write one word in the same instruction")


class GlobalMemory(Memory):
    """Copies of the tensors' storages, with a gap after each that belongs to none."""

    BEGIN, GAP = 1 << 40, 1 << 12  # bytes

    def __init__(self, tensors: list[torch.Tensor], word: int, clock: Clock):
        self.storages, size = {}, self.GAP
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.storages:
                self.storages[storage.data_ptr()] = size, storage
                size += (storage.nbytes() // self.GAP + 2) * self.GAP
        super().__init__(size, word, clock)
        for start, storage in self.storages.values():
            self.bytes_of(start, storage)[:] = host_bytes(storage)
            begin = start // word
            self.wrote[begin : begin + storage.nbytes() // word] = HOST

    def bytes_of(self, start: int, storage):
        """A storage's bytes in this memory."""
        return self.words.view("u1")[start : start + storage.nbytes()]

    def pointer(self, tensor: torch.Tensor) -> int:
        """Where the tensor's first element is on the GPU."""
        begin = tensor.untyped_storage().data_ptr()
        start, _ = self.storages[begin]
        return self.BEGIN + start + tensor.data_ptr() - begin

    def places(self, address, width: int):
        """As above; an address that is in no tensor is a Fault."""
        places = super().places(address - np.uint64(self.BEGIN), width)
        if (self.wrote[places] == NEVER).any():
            raise Fault("an address is outside of the kernel's tensors")
        return places

    def copy_back(self) -> None:
        """What the kernel has written becomes the tensors' data."""
        for start, storage in self.storages.values():
            host_bytes(storage)[:] = self.bytes_of(start, storage)


def host_bytes(storage):
    """A view of a CPU storage, (bytes,)."""
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()


# What the async proxy, by which wgmma reads, sees of a word: nothing yet if a copy is in flight,
# perhaps an old value if it was stored or copied since the last fence.proxy.async.
SHOWN, IN_FLIGHT, STORED, COPIED = range(4)


class SharedMemory(Memory):
    """Of one block. Copies and wgmma may be in flight."""

    def __init__(self, size: int, word: int, clock: Clock):
        super().__init__(size, word, clock)
        self.proxy = np.full(len(self.words), SHOWN, "u1")
        self.readers = np.zeros(len(self.words), "u1")  # wgmmas in flight that read a word

    def load(self, places, warps):
        """As above, by ordinary instructions and by wgmma."""
        if (self.proxy[places] == IN_FLIGHT).any():
            raise Fault("shared memory is read before its cp.async was waited for")
        return super().load(places, warps)

    def claim(self, places, warps):
        """As above."""
        if self.readers[places].any():
            raise Fault("shared memory is written before the wgmma that reads it was waited for")
        if (self.proxy[places] == IN_FLIGHT).any():
            raise Fault("shared memory is written before its cp.async was waited for")
        return super().claim(places, warps)

    def store(self, places, warps, data):
        """As above."""
        super().store(places, warps, data)
        self.proxy[places] = STORED

    def begin_copy(self, places, warps) -> None:
        """A cp.async by `warps` will write the words."""
        self.claim(places, warps)
        self.proxy[places] = IN_FLIGHT

    def end_copy(self, places, warps, data) -> None:
        """The warps have waited for it."""
        self.proxy[places] = COPIED
        super().store(places, warps, data)

    def begin_product(self, places, copies_need_fence: bool):
        """The words, which a wgmma of four warps reads from now on."""
        words = self.load(places, np.full(len(places), SEVERAL))
        states = self.proxy[places]
        if (states == STORED).any():
            raise Fault("wgmma reads what was stored, with no fence.proxy.async since")
        if copies_need_fence and (states == COPIED).any():
            raise Fault("wgmma reads what cp.async copied, with no fence.proxy.async since")
        self.readers[places] += 1
        return words

    def end_product(self, places) -> None:
        """It has been waited for: it read the words until now."""
        self.readers[places] -= 1
        self.read[places] = self.clock.stamp(SEVERAL)

    def fence_proxy(self) -> None:
        """Show the async proxy what has been written. Copies in flight are not."""
        self.proxy[self.proxy != IN_FLIGHT] = SHOWN


def swizzled(descriptor: int, rows: int, transposed: bool):
    """Addresses of the 16-byte pieces of a matrix (rows, 16) of 16-bit numbers in shared memory.

    (rows, 2), pieces of a row; transposed: (rows / 8, 16), pieces of a column. The matrix is
    made of tiles: 8 rows (transposed: columns), each 128 bytes wide, or 64 or 32, one after
    another. In a tile the pieces of a row are permuted: bits 4 to 6 of an address are xored with
    bits 7 to 9.
    PTX ISA, "Matrix descriptor format" and "Strides".
    """
    begin, leading, stride = (((descriptor >> bit) & 0x3FFF) << 4 for bit in (0, 16, 32))
    mode = descriptor >> 62
    if mode == 0 or (descriptor >> 49) & 7:
        raise Unsupported("a layout of a wgmma's matrix")
    width = 256 >> mode  # 128, 64, 32 bytes
    if transposed:
        across, line = 16 * np.arange(rows // 8)[:, None], np.arange(16)[None, :]
    else:
        across, line = 16 * np.arange(2)[None, :], np.arange(rows)[:, None]
    address = begin + line // 8 * stride + line % 8 * width
    address = address + across // width * leading + across % width
    return address ^ ((address >> 7) % (width // 16) << 4)
