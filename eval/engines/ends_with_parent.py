"""Runs a program that ends with the process that started it: `python -I ends_with_parent.py PROGRAM FOLDER`.

Its standard input is a pipe that the starter holds open and never writes to. However the starter ends, killed included,
the pipe ends, and this program is killed with all processes of its session, whatever it is doing. Runs in an engine's
own Python: nothing of ours is imported.
"""

import os
import runpy
import signal
import sys
import threading


def end_with_parent() -> None:
    """Kill this session's processes when standard input ends."""

    def watch() -> None:
        os.read(0, 1)  # and not sys.stdin, whose lock the interpreter wants when it ends
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
    # Launchers signal the whole process tree; whoever waits for an answer decides when this one ends.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    end_with_parent()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
