"""Watchdog: what protects the training loop on each rank, and the timing of stragglers.

    no step for --timeout_minutes    the rank that hangs is named, with its line of code; exit
                                     status 75: resume me
    a process or machine is gone     it is named after 30 seconds without a sign of life; 75
    one rank fails                   the others exit with its status, and do not wait for it
    out of memory                    all exit with 75, and the next start halves the microbatch

The thread that does so is launch/heartbeat.py. It runs from the meeting of the ranks on; in the
loop it also knows when a step is overdue, and is half as patient.

Run `torchrun --nproc_per_node 2 -m lifecycle.watchdog` to see it name a rank that sleeps.
"""

import gc
import time

import torch
import torch.distributed as dist

import parallel
import processes
import program
from launch import heartbeat
from launch.heartbeat import Heartbeat
from program import UserError, out_of_memory, whoami

SILENCE = 30  # seconds without a sign of life after which a rank counts as gone


def collect_garbage(steps_since_start: int, interval: int = 50) -> None:
    """Every `interval` steps of this launch, on all ranks at the same time; never in between.

    Otherwise Python's garbage collector would stop one rank now and then, and the others wait.
    """
    if steps_since_start % interval == 0:
        gc.disable()
        gc.collect()


class StragglerTimer:
    """How long this rank spends outside collectives, step by step: the slowest is the straggler.

    It times the wait for the batch, and the final norm, logits and loss of the forward passes. In
    all other parts of a step ranks wait for one another, so all seem equally slow. With tensor
    parallelism they wait in the loss, too, and only the last stage of a pipeline has a loss. There
    it times attention in each layer, from q, k and v to out_proj. Stages may have different numbers
    of layers, so their seconds are scaled to the mean number.
    """

    def __init__(self, model, device: torch.device):
        self.on_gpu = device.type == "cuda"
        self.reading_seconds = 0.0  # of this step's wait for the batch
        self.marks = []  # begin, end, begin, end, ... of this step's timed forward passes
        self.scale = 1.0
        is_stage = hasattr(model, "pipe")
        if not parallel.is_cut(model) and not is_stage:
            model.transformer.norm_f.register_forward_pre_hook(self.mark)
            model.register_forward_hook(self.mark, prepend=True)
            return
        blocks = model.transformer.blocks
        if is_stage:
            self.scale = model.cfg.n_layers / model.pipe.size / len(blocks)
        for block in blocks:
            # qk_ln waits for the sums of all tensor ranks.
            ready = block.attn.k_ln if model.cfg.qk_ln else block.attn.Wqkv
            ready.register_forward_hook(self.mark)
            block.attn.out_proj.register_forward_pre_hook(self.mark)

    def mark(self, module, *_) -> None:
        """A hook that records the time; on a GPU as an event, since the host runs ahead of it."""
        if not module.training:
            return
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            self.marks.append(torch.cuda.current_stream().record_event(event))
        else:
            self.marks.append(time.perf_counter())

    def take(self):
        """A function for the seconds of the step just queued. Call it when that step is done."""
        pairs = list(zip(self.marks[::2], self.marks[1::2], strict=True))
        reading_seconds, self.marks = self.reading_seconds, []

        def seconds() -> float:
            of_pairs = [a.elapsed_time(b) / 1000 if self.on_gpu else b - a for a, b in pairs]
            return reading_seconds + self.scale * sum(of_pairs)

        return seconds


class Watchdog:
    """A context around the training loop, on every rank: what the heartbeat has to watch in it.

    minutes: how long a step may take. last_good(): a sentence that names the newest checkpoint.
    halve(step): records half of the microbatch for the next start, and returns it. patience: after
    how many seconds without a sign of life a rank counts as gone.
    """

    def __init__(self, world, minutes: float, last_good, halve, first_step=0, patience=SILENCE):
        self.minutes, self.halve = minutes, halve
        self.step, self.patience = first_step, patience
        rank, size = world.global_rank, world.global_size
        self.beats = heartbeat.running()
        if self.beats is None:  # one process, or ranks that have met in another way
            self.beats = Heartbeat(rank, size, patience)
            self.beats.connect(lambda port: processes.rank_zero_decides(lambda: port))
        stage = f"stage {world.pp_rank}, " if world.pp_size > 1 else ""
        self.beats.row.name = stage + whoami(rank)
        self.beats.publish()
        self.beats.last_good = last_good
        dist.barrier()

    def __enter__(self):
        self.beats.patience = self.patience
        self.heartbeat()
        if not self.beats.is_alive():
            self.beats.start()
        return self

    def heartbeat(self) -> None:
        """The training loop has finished a step. SystemExit if the ranks were told to end."""
        if self.beats.verdict is not None:  # what stood still goes on, after it was named
            raise SystemExit(self.beats.verdict)
        self.beats.expect(f"no step for {self.minutes:g} minutes", 60 * self.minutes)

    def __exit__(self, kind, error, trace) -> None:
        """If this rank fails alone, the others end, too: collectives with it would hang."""
        problem = ""
        if error and out_of_memory(error):
            try:
                n_rows = self.halve(self.step + 1)
            except (UserError, OSError) as mistake:  # it is 1 already, or cannot be recorded
                self.beats.end_with(mistake)
                raise
            problem = f"is out of memory, so the next start uses microbatches of {n_rows}"
        self.beats.end_with(error, problem)


def demonstrate(argv) -> None:
    """The last rank sleeps; the watchdog names it and ends all ranks."""
    program.arguments(argv)
    world = processes.start("cpu")
    with Watchdog(world, 0.05, lambda: "This was a demonstration", halve=None):
        if world.global_rank == world.global_size - 1:
            time.sleep(600)
        dist.barrier()


if __name__ == "__main__":
    processes.run(demonstrate)
