"""Signals: how a run is asked to stop, and the exit status that it ends with.

    SIGTERM, SIGUSR1 (SLURM's warning), Ctrl-C    save on all ranks at the end of the step, and exit
    a second Ctrl-C                               exit immediately
    any of them before training has begun         exit immediately: there is nothing to save

    exit status    0 done    2 user error    75 resume me: start the same command again
                   130 Ctrl-C    141 whatever read the output has exited

A run exits with 75 after SIGTERM and SIGUSR1, when memory runs out, when a rank is lost or hangs,
and when its last checkpoint is not in its store yet. torchrun itself exits with 1 whenever a rank's
status is not 0.

This file does not import PyTorch: fsdp_train.py calls `while_loading` before it does so itself,
which takes seconds.
"""

import contextlib
import os
import signal
import socket
import sys
import threading

import config
import program
from config import MPTConfig, TrainConfig
from program import RESUME_ME, UserError

REQUESTS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)  # SIGINT is Ctrl-C
# The exit status after a signal. SIGPIPE: whatever read our output has exited, as with `| head`.
STATUS = {
    signal.SIGTERM: RESUME_ME,
    signal.SIGUSR1: RESUME_ME,
    signal.SIGINT: 130,
    signal.SIGPIPE: 141,
}


def while_loading(argv: list[str]) -> None:
    """Until training begins: exit on signals, exit if torchrun is killed, say what is loading.

    Also sets what must be set before PyTorch is imported: see `program.sleep_while_waiting`.
    Prints nothing if `argv` asks for help or is wrong: fsdp_train.main answers that.
    """
    for number in REQUESTS:
        signal.signal(number, exit_immediately)
    program.end_with_torchrun()
    program.sleep_while_waiting()
    program.escape_unprintable()
    if program.rank() > 0 or program.wants_help(argv):
        return
    with contextlib.suppress(UserError, OSError):
        _, cfg = config.load(argv, MPTConfig, TrainConfig)
        next_ = "then checking data and checkpoints, which takes up to half a minute"
        print(f"{cfg.run_dir}: loading PyTorch, {next_}", flush=True)


def exit_immediately(number: int, frame=None) -> None:
    """A signal handler for as long as there is nothing to save."""
    os._exit(STATUS[number])


class Signals:
    """Remembers the signal that asked this process to stop.

    Python runs its own handlers in the main thread, which may wait in a collective for long. So a
    thread takes the signals, from a socket into which Python writes their numbers.
    """

    def __init__(self):
        self.stop_signal = 0  # the number of the signal; 0: none
        self.nothing_to_save = True  # until training begins
        self.receiver, self.sender = socket.socketpair()
        self.sender.setblocking(False)
        signal.set_wakeup_fd(self.sender.fileno())
        for number in REQUESTS:
            signal.signal(number, lambda *_: None)  # only so that Python writes to the socket
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        """The thread: note each signal; exit if there is nothing to save, or on a second Ctrl-C."""
        while number := int.from_bytes(self.receiver.recv(1), "little"):
            second_ctrl_c = number == self.stop_signal == signal.SIGINT
            if self.nothing_to_save or second_ctrl_c:
                exit_immediately(number)
            self.stop_signal = number
            if number == signal.SIGINT and program.rank() == 0:
                line = "\nsaving at the end of this step; Ctrl-C again exits immediately"
                with contextlib.suppress(OSError):  # Ctrl-C has ended `| tee`, too
                    print(line, file=sys.stderr, flush=True)


def leave(number: int, checkpointer, log) -> None:
    """End this rank as signal `number` asked, after its last save. Raises SystemExit."""
    checkpointer.finish()
    how = "The same command with --resume=auto" if log.cfg.resume == "never" else "The same command"
    log.say(f"stopping, as asked: {checkpointer.last_good()}. {how} resumes the run")
    if number == signal.SIGUSR1:  # torchrun does not know of this warning, and would restart us
        program.end_torchrun()
    raise SystemExit(STATUS[number])
