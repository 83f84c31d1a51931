"""The inner loop of a compiled kernel, and the share of matrix instructions in it.

    python -m bench inner_loop KERNEL.sass      of NVIDIA's `nvdisasm -c KERNEL.cubin`
    python -m bench inner_loop KERNEL.amdgcn    of AMD's assembly

    share = matrix instructions / all instructions, of one turn of the loop

A kernel like attention spends its time in one loop over blocks. Only its matrix instructions do
what the kernel is for. Every other instruction takes a turn of the scheduler that starts them, and
while one warp does those, only another warp can keep the matrix units busy.

One instruction multiplies matrices of very different sizes: 16x8x16 by a warp on an A100, 64x128x16
by four warps on an H100, 32x32x8 on an MI250. So chips are compared by the FLOPs that the matrix
units do for each instruction of the loop, matrix or not. On sm_100 the size is not in the text.

The text is cut into basic blocks, which end at branches. Blocks that can reach each other form a
loop. Without its entry block, the loops nested in it remain. Instructions are counted as they stand
in the text: with waits and hints to the scheduler, whether or not their predicate holds, and also
behind a branch that most turns skip, such as the one around the mask of attention's dkdv.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import config
from config import require

LABEL = re.compile(r"\s*(\.L\w+):")
# NVIDIA: `/*0120*/   @!P1 STS [R9+UR12], R0 ;`; AMD: a tab, `v_add_f32_e32 v0, v1, v2 ; comment`.
INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]+\*/\s+([^;]+)|\t([a-z][^;]+)")
BRANCH = re.compile(r"(?:@!?\w+ )?(?:BRA|s_branch|s_cbranch)\S* .*?(\.L\w+)")
# After these the next instruction does not follow.
LEAVES = re.compile(r"BRA `|EXIT|RET|s_branch|s_endpgm|s_setpc")
MATRIX = re.compile(r"(?:@!?\w+ )?(?:[A-Z]*MMA\b|v_(?:smfmac|mfma|swmmac|wmma)_)")
SIZE = re.compile(r"(\d+)x(\d+)x(\d+)")
PACKED_SIZES = {"16816": (16, 8, 16), "1688": (16, 8, 8)}  # HMMA.16816


@dataclass
class Loop:
    """One turn of a loop, as one warp sees it."""

    instructions: int
    matrix: int
    flops: int | None  # of the matrix instructions; None: their text does not say

    @property
    def share(self) -> float:
        """Matrix instructions over all instructions."""
        return self.matrix / self.instructions

    @property
    def flops_per_instruction(self) -> float | None:
        """FLOPs of the matrix units for each instruction of a warp."""
        return None if self.flops is None else self.flops / self.instructions


def find(text: str) -> Loop | None:
    """The innermost loop that has matrix instructions, in NVIDIA's or AMD's assembly.

    Of several, the one with the largest share: attention has one loop without a mask, where most
    blocks are, and one with it. None if no loop has matrix instructions.
    """
    blocks, follows = control_flow(text)
    precedes = [{n for n, after in enumerate(follows) if b in after} for b in range(len(blocks))]
    busy = [n for n, block in enumerate(blocks) if any(map(MATRIX.match, block))]
    loops = {innermost(n, follows, precedes) for n in busy} - {frozenset()}
    inner = [loop for loop in loops if not any(other < loop for other in loops)]
    counted = [count([line for n in loop for line in blocks[n]]) for loop in inner]
    return max(counted, key=lambda loop: loop.share, default=None)


def count(instructions: list[str]) -> Loop:
    """The figures of a loop that consists of these instructions."""
    matrix = [line for line in instructions if MATRIX.match(line)]
    flops = [flops_of(line) for line in matrix]
    return Loop(len(instructions), len(matrix), None if None in flops else sum(flops))


def flops_of(instruction: str) -> int | None:
    """The FLOPs of one matrix instruction that one warp does; None if its name has no size."""
    if found := SIZE.search(instruction):
        m, n, k = map(int, found.groups())
        warps = 4 if "HGMMA" in instruction else 1  # four warps share one
        return 2 * m * n * k // warps
    for digits, (m, n, k) in PACKED_SIZES.items():
        if f"MMA.{digits}." in instruction:
            return 2 * m * n * k
    return None


# --- Loops


def control_flow(text: str) -> tuple[list[list[str]], list[set[int]]]:
    """The basic blocks, lists of instructions, and for each the numbers of blocks that may follow.

    A branch to a label that is not in the text, such as another function's, leads nowhere.
    """
    instructions, labels = read(text)
    if not instructions:
        return [], []
    targets = {}  # index of a branch: index of the instruction that it jumps to
    for at, line in enumerate(instructions):
        found = BRANCH.match(line)
        if found and labels.get(found[1], len(instructions)) < len(instructions):
            targets[at] = labels[found[1]]
    last = {at for at, line in enumerate(instructions) if at in targets or LEAVES.match(line)}
    starts = sorted({0, *targets.values(), *(at + 1 for at in last)} - {len(instructions)})
    number = {start: n for n, start in enumerate(starts)}

    blocks, follows = [], []
    for start, end in zip(starts, [*starts[1:], len(instructions)], strict=True):
        after = {number[targets[end - 1]]} if end - 1 in targets else set()
        if end in number and not LEAVES.match(instructions[end - 1]):
            after.add(number[end])
        blocks.append(instructions[start:end])
        follows.append(after)
    return blocks, follows


def read(text: str) -> tuple[list[str], dict[str, int]]:
    """The instructions, and {label: index of the instruction after it}."""
    instructions, labels = [], {}
    for line in text.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := INSTRUCTION.match(line):
            instructions.append((found[1] or found[2]).strip())
    return instructions, labels


def innermost(block: int, follows: list[set], precedes: list[set]) -> frozenset:
    """The blocks of the innermost loop that `block` is in; none if it is in no loop."""
    loop = around(block, follows, precedes, set(range(len(follows))))
    while True:
        entries = {n for n in loop if precedes[n] - loop} or loop
        if block in entries:
            return frozenset(loop)
        inner = around(block, follows, precedes, loop - entries)
        if not inner:
            return frozenset(loop)
        loop = inner


def around(block: int, follows: list[set], precedes: list[set], inside: set) -> set:
    """The blocks, all of them `inside`, that `block` reaches and that reach it."""
    return reached(block, follows, inside) & reached(block, precedes, inside)


def reached(block: int, edges: list[set], inside: set) -> set:
    """The blocks that one or more steps along the edges lead to, without leaving `inside`."""
    found, waiting = set(), [block]
    while waiting:
        new = edges[waiting.pop()] & inside - found
        found |= new
        waiting += new
    return found


def main(argv: list[str]) -> None:
    """Print the figures of a file's inner loop."""
    (path,) = config.arguments(argv, "FILE")
    loop = find(Path(path).read_text(errors="replace"))
    require(loop, f"no loop of {path} has matrix instructions: is it `nvdisasm -c` or AMD's text?")
    print(f"{loop.instructions} instructions, {loop.matrix} of them matrix ({loop.share:.1%})")
    if loop.flops:
        print(f"{loop.flops_per_instruction:.0f} FLOPs of the matrix units for each instruction")


if __name__ == "__main__":
    config.run(main)
