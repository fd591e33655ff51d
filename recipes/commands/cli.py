"""The `draftsmith` command: subcommands, and `draftsmith recipe=NAME key=value ...`, the same as `trains/train.py`."""

from __future__ import annotations

import contextlib
import errno
import locale
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any, TextIO

from ... import __version__
from ...core import ranks
from ...core.errors import CRASH, EXIT_CODES, MISTAKE, OK, STOPPED, UserError, causes, did_you_mean
from ...core.secrets import redact, redact_argument
from ...trainers.run.stopping import Stopped
from ..config.files import recipe_names
from ..config.launch import announce, run_recipe, say
from . import (
    audit,
    check,
    compare,
    demo,
    export,
    fetch,
    logs,
    recipes,
    stages,
)
from .command import Command

_LIMITS = ("can't start new thread", "can't allocate memory",
           *map(os.strerror, (errno.EMFILE, errno.ENFILE, errno.ENOMEM)))  # fmt: skip
_RAISE = "`ulimit -a` shows them: raise the one that is named (-n: open files, -u: threads, -v and a job's: memory)"
_IN_THE_WAY = {errno.EISDIR, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EINVAL, errno.ELOOP, errno.ENAMETOOLONG}
_FILE = "remove or rename what stands there, give yourself the right to it, or name another"
# Seconds for rank 0 to meet the same mistake, as its imports may take longer; for a launcher to end this rank, too.
_OTHERS_S, _PEER_S = 30.0, 5.0
_RENAMED = {"bench": "audit"}
COMMANDS: dict[str, Command] = {
    command.name: command
    for command in (
        demo.COMMAND,
        recipes.LIST,
        recipes.SHOW,
        check.CHECK,
        stages.TRAIN,
        stages.EVALUATE,
        stages.PUBLISH,
        check.VERIFY,
        export.VERIFY_ENGINE,
        audit.COMMAND,
        export.EXPORT,
        fetch.COMMAND,
        export.IMPORT,
        export.CONVERT,
        logs.COMMAND,
        compare.COMMAND,
        check.DOCTOR,
    )
}


def main(arguments: list[str] | None = None) -> int:
    """Run a command or a recipe. Returns the exit code, one of `EXIT_CODES`."""
    if arguments is None and locale.getencoding().lower() not in ("utf-8", "utf8") and not sys.flags.utf8_mode:
        # Text files, names of files and output are UTF-8 in every locale, also those of libraries and child processes.
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    # The launcher puts its rank before the user's arguments; it also sets LOCAL_RANK, which is read instead.
    arguments = [a for a in arguments if not a.startswith(("--local_rank", "--local-rank"))]
    if "verbose=true" not in arguments:  # torch's frames of C++ for each connection to a rank that has ended
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if not sys.stderr.isatty():  # bars over loading, writing and fetching are noise in a log
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TQDM_DISABLE", "1")  # which transformers takes for a GGUF
    command = COMMANDS.get(arguments[0]) if arguments else None
    asks = not arguments or not {"-h", "--help", "--version"}.isdisjoint(arguments)
    only_prints = asks or (command is not None and command.only_prints)
    with lasting_output() as out:
        code = _ended(arguments)
    if only_prints and out.lost is not None and not isinstance(out.lost, BrokenPipeError):
        print(f"error: the output cannot be written: {out.lost.strerror}", file=sys.stderr, flush=True)
        return MISTAKE
    return code


def _ended(arguments: list[str]) -> int:
    """Run a command, and say why where it fails. Returns the exit code."""
    try:
        return _dispatch(arguments)
    except UserError as error:
        # One rank alone may meet a file that is missing, and before the group exists another run's lock.
        if error.is_said_by_each_rank or ranks.is_first_to(f"say {error}"):
            print(redact(f"error: {error}"), file=sys.stderr, flush=True)
        elif not ranks.has_group() and _outlives_its_launcher(_OTHERS_S):
            print(redact(f"rank {ranks.rank()}: error: {error}"), file=sys.stderr, flush=True)
        ranks.leave()
        return MISTAKE
    except Stopped as stopped:
        say(f"{stopped}: the same command continues from there")
        return STOPPED
    except KeyboardInterrupt:  # before the first stage; from then on it asks the run to stop
        if ranks.is_main():
            print("stopped: the same command continues from what is finished, or anew", file=sys.stderr, flush=True)
        return STOPPED
    except Exception as error:
        if (problem := _of_the_machine(error)) is not None:
            print(redact(f"error: {problem}"), file=sys.stderr, flush=True)
            ranks.leave()
            return MISTAKE
        if _is_of_another_rank(error):
            return CRASH
        # Printed here and not by Python: messages of libraries hold addresses and keys.
        print(redact(traceback.format_exc()), file=sys.stderr, flush=True)
        ranks.leave()
        return CRASH


def _of_the_machine(error: Exception) -> UserError | None:
    """A limit of the machine (`ulimit`), or a file that is in the way, met wherever one is opened: no fault of ours."""
    limits = [one for one in causes(error) if isinstance(one, MemoryError) or any(text in str(one) for text in _LIMITS)]
    if limits:
        what = str(limits[-1]).strip().partition("\n")[0]
        return UserError(f"a limit of this machine: {what or 'no memory is left'}", hint=_RAISE)
    if isinstance(error, OSError) and error.filename and error.errno in _IN_THE_WAY:
        return UserError(str(error.strerror).lower(), where=str(error.filename), hint=_FILE)
    return None


def _is_of_another_rank(error: Exception) -> bool:
    """Whether a call to the other ranks failed because one of them was killed, or stopped with a message of its own,
    which is no fault of ours; says which.
    """
    if ranks.world_size() == 1:
        return False
    # A launcher asks this rank to end before it knows which one was lost.
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        lost = ranks.lost_by(error)
        if lost is not None:
            where = ranks.pulse().where
            print(f"rank {ranks.rank()} ends in {where}: {lost} has ended", file=sys.stderr, flush=True)
    finally:
        signal.signal(signal.SIGTERM, before)
    if lost is not None:
        _outlives_its_launcher(_PEER_S)
    return lost is not None


def _outlives_its_launcher(seconds: float) -> bool:
    """Waits for the launcher to end this rank, which it does once the rank that knows more has printed it and ended:
    an exit of this one first would end that one before it has said a word. False: there is no such launcher.
    """
    if not {"CROSS_RANK", "TORCHELASTIC_RUN_ID"} & set(os.environ):
        return False
    time.sleep(seconds)
    return True


def _dispatch(arguments: list[str]) -> int:
    first = arguments[0] if arguments else "--help"
    # For records: however a run was started, these words start it again.
    typed = f"draftsmith {shlex.join(map(redact_argument, arguments))}"
    if first in ("-h", "--help", "--version"):
        say(f"draftsmith {__version__}" if first == "--version" else usage())
        return OK
    if "=" in first or first.startswith("-"):
        announce(arguments)
        return run_recipe(arguments, typed)
    if first not in COMMANDS:
        hint = did_you_mean(first, COMMANDS)
        if first in _RENAMED:
            hint = f"it is draftsmith {_RENAMED[first]} now: see its --help"
        if first in recipe_names() or first.endswith((".yaml", ".yml")):
            hint = f"draftsmith train {first}, or draftsmith recipe={first} for all of its stages"
        raise UserError(f"no command {first!r}", hint=hint)
    command = COMMANDS[first]
    try:
        options = command.parse(arguments[1:])
    except SystemExit:  # argparse has printed the help
        return OK
    options.typed = typed
    return command.run(options)


def usage() -> str:
    """What `draftsmith` prints without a command or with --help: commands, exit codes and recipes."""
    width = max(map(len, COMMANDS))
    commands = (f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items())
    codes = (f"  {code:<{width}}  {meaning}" for code, meaning in EXIT_CODES.items())
    how = """usage: draftsmith COMMAND ...      each has its own --help, with examples
       draftsmith recipe=NAME [key=value ...] ["stages=[a,b]"] [restart=STAGE] [dry_run=true]
"""
    return "\n".join([how, "commands:", *commands, "", "exit codes:", *codes, "", "recipes:", recipes.listing()])


# ---- Output that cannot be written: its reader has left (`draftsmith ... | head`), or its disk is full. A command goes
# on without it: a run's log is a file, its exit code says how it ended, and `| head` is no error.


class Lasting:
    """A stream whose failing writes are left out. `lost`: why the last of them failed."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self.lost: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """As of any stream."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
        return len(text)

    def flush(self, *, last: bool = False) -> None:
        """As of any stream. `last`: what cannot be written now is left out for good, or Python would exit with 120."""
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error, last)

    def _lose(self, error: OSError, last: bool = False) -> None:
        self.lost = error
        if last or isinstance(error, BrokenPipeError):  # a full disk may have room again later
            with open(os.devnull, "w", encoding="utf-8") as null:
                os.dup2(null.fileno(), self._stream.fileno())
            self._stream.flush()  # what waits in its buffer, too


@contextlib.contextmanager
def lasting_output() -> Iterator[Lasting]:
    """What runs in here goes on when stdout or stderr cannot be written. Gives stdout."""
    with open(os.devnull, "w", encoding="utf-8") as null:  # for a stream that was closed before the start (`>&-`)
        out, errors = Lasting(sys.stdout or null), Lasting(sys.stderr or null)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):  # type: ignore[type-var]
            try:
                yield out
            finally:
                out.flush(last=True)
                errors.flush(last=True)


if __name__ == "__main__":
    # As `python -m draftsmith`, by its longer name.
    sys.exit(main())
