"""Run a recipe: its stages in order, each in a folder of its own, each once for the same inputs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ...core import ranks
from ...core.errors import UserError
from ...core.files import full_disk_is_told, sweep
from ...core.placement import num_gpus
from ...core.results import BEGUN
from .context import Context, tracked
from .matching import (
    FINGERPRINTS,
    begun,
    check_inputs,
    done,
    forget,
    input_problem,
    is_done,
    made_nothing,
    refuse_other,
    stage_state,
    write_begun,
    write_done,
)
from .precision import record_ends, say_penalties, with_types
from .progress import StageLine
from .restart import built_on, command_identity, free_name, set_aside
from .stage import Planned
from .stopping import Stop

# Published sets, which lie beside the stages' folders.
SHARED = ".*suite-*"
# A stage, its folder, the folders of its inputs, the run's flag, and the line that people watch -> its context.
MakeContext = Callable[[Planned, Path, Mapping[str, Path], Stop, StageLine], Context]


def run_stages(
    plan: Sequence[Planned],
    make_context: MakeContext,
    *,
    output: Path,
    chosen: Sequence[str] | None,
    restart: str | None,
    say: Callable[[str], None],
    words: Sequence[str] = (),
) -> None:
    """Run the planned stages; a finished one with the same inputs is passed over. `restart` and `words` are as of
    `pending_restart`: this stage and all that build on it are set aside first.

    Raises `UserError` for a finished stage whose inputs changed, one whose inputs were never made, or a file of a
    finished stage that is not as it was written and that a stage would read now; `Stopped` at SIGTERM or SIGINT before
    the last stage has finished, when what is done is saved.
    """
    # Before anything moves or is written: good results must not go for a run that cannot begin.
    if restart is not None:
        ranks.on_main(check_stages, plan, output, chosen, restart)
    ranks.on_main(look_at_results, plan, chosen, restart, output)
    if restart is not None:
        stale = built_on(plan, restart)
        ranks.on_main(set_aside, output, command_identity(plan, restart, words), restart, stale, say)
    with Stop(say) as stop:
        running = [planned.name for planned in plan if chosen is None or planned.name in chosen]
        for planned in plan:
            if chosen is None or planned.name in chosen:
                place = running.index(planned.name) + 1, len(running)
                line = StageLine(planned.name, planned.purpose, place)
                _run_stage(planned, make_context, stop, output, line, say)
        # A rank that exits while another still reads its message looks like a crash.
        ranks.barrier()


def _run_stage(
    planned: Planned,
    make_context: MakeContext,
    stop: Stop,
    output: Path,
    line: StageLine,
    say: Callable[[str], None],
) -> None:
    ranks.pulse().enter(planned.name)
    folder = output / planned.name
    # Rank 0 reads the state and broadcasts it, since another rank might read a half-written file.
    state = ranks.on_main(stage_state, planned, output)
    if state == "finished":
        say(f"stage {planned.name}: finished before, same inputs")
        ranks.on_main(write_begun, planned, folder)
        return
    stop.agree(f"before stage {planned.name}")
    # Again, since hours may have passed; what has not changed since is not read again.
    ranks.on_main(check_inputs, planned, sorted({*planned.inputs.values()}), output)
    say(f"stage {planned.name}")
    # As the folder was begun: a plan made where an earlier stage's data is missing has another fingerprint, and
    # checkpoints and shards would be refused.
    planned = replace(planned, fingerprint=ranks.on_main(_begin, planned, folder, say))
    start = time.monotonic()
    makers = {thing: output / maker for thing, maker in planned.inputs.items()}
    made = make_context(planned, folder, makers, stop, line)
    with line.shown(), made.opened, tracked(made) as context, full_disk_is_told(folder):
        ranks.on_main(record_ends, context, planned)
        ranks.on_main(say_penalties, context, planned)
        # Its section with the types of the settled context: of its methods' drafters, its captioner, its target.
        with_types(planned.stage, f"stages.{planned.name}", context.resolved).run(context)
        gpus = num_gpus(planned.own_target or context.target)
    ranks.barrier()
    ranks.on_main(partial(write_done, gpus=gpus), planned, folder, FINGERPRINTS, time.monotonic() - start)


def look_at_results(plan: Sequence[Planned], chosen: Sequence[str] | None, restart: str | None, output: Path) -> None:
    """Look at what the stages that will run read of finished ones; `UserError` where a file is not as written."""
    stale = built_on(plan, restart)
    for planned in plan:
        is_chosen = chosen is None or planned.name in chosen
        if is_chosen and (planned.name in stale or not is_done(planned, output)):
            makers = sorted({*planned.inputs.values()} - stale)
            check_inputs(planned, [maker for maker in makers if done(output / maker) is not None], output)


def _begin(planned: Planned, folder: Path, say: Callable[[str], None]) -> str:
    """The stage's folder with its fingerprint, which is returned. What nobody can tell the settings of is kept aside,
    and what killed writers have left is removed: who holds the run's lock is the only one to write here.
    """
    for place in (folder, *folder.parent.glob(SHARED)):
        sweep(place)
    if folder.is_dir() and begun(folder) is None and any(folder.iterdir()):
        aside = folder.with_name(free_name(folder))
        os.replace(folder, aside)
        say(f"stage {planned.name}: {BEGUN} is missing, so the settings of what is there are not known: it is kept in "
            f"{aside}, and the stage begins anew")  # fmt: skip
    if (mark := begun(folder)) is not None and made_nothing(folder):  # it begins as it is now: what it reads was mended
        if mark.fingerprint != planned.fingerprint:
            forget(folder)
        (folder / BEGUN).unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    write_begun(planned, folder)
    mark = begun(folder)
    assert mark is not None, folder
    return mark.fingerprint


def check_stages(plan: Sequence[Planned], output: Path, chosen: Sequence[str] | None, restart: str | None) -> None:
    """Refuse, before anything is written or moved, a run that one of its stages would refuse later: `UserError` where a
    chosen stage was run with other settings and is not restarted, or takes its inputs from a stage that is not chosen
    and has not finished with these settings; or where the restarted stage is not chosen.
    """
    stale = built_on(plan, restart)
    running = {p.name for p in plan if chosen is None or p.name in chosen}
    for planned in plan:
        if planned.name not in running:
            continue
        if planned.name not in stale:
            refuse_other(output / planned.name, planned)
        for thing, maker in planned.inputs.items():
            has_finished = planned.name not in stale and is_done(planned, output)
            if maker in running or has_finished:
                continue
            if maker in stale:
                what = thing.partition("/")[0]
                raise UserError(
                    f"restart={restart} sets aside stage {maker}, whose {what} stage {planned.name} takes",
                    where=str(output / maker), hint=f'add {maker} to "stages=[...]"',
                )  # fmt: skip
            if (problem := input_problem(planned, thing, maker, output)) is not None:
                raise problem
    if restart is not None and restart not in running:
        hint = f'add {restart} to "stages=[...]", or leave out restart='
        raise UserError(f"restart={restart} sets aside stage {restart}, and stages= does not run it", hint=hint)
