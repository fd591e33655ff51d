"""The end tokens that a stage's answers were begun with, held against the target's when the stage goes on.

A plan cannot have them in its fingerprint: they are read from the target's files, which may be on the Hub. They stand
beside what `auto` became (precision.py), and only where they are not the tokenizer's own alone: runs of targets with
one end token are recorded as ever.
"""

from __future__ import annotations

from dataclasses import replace

from ...core.errors import UserError
from ...core.results import BEGUN, read_mark, write_mark
from ...data.end_tokens import end_ids
from .context import Context
from .matching import made_nothing
from .stage import Planned

ENDS = "end_ids"


def record_ends(context: Context, planned: Planned) -> None:
    """Record the end tokens of a stage that begins; rank 0's.

    Raises:
        UserError: the stage was begun with others: some of its answers would run on where others end.
    """
    stage, form, path = planned.stage, planned.stage.answer_format, context.folder / BEGUN
    mark = read_mark(path)
    if form is None or mark is None:
        return
    own = stage.own_target
    processor = (context if own is None else replace(context, target=own)).processor()
    ends, recorded = end_ids(processor, form), mark.resolved or {}
    now = None if ends == (processor.eos_id,) else ", ".join(map(str, ends))
    if recorded.get(ENDS) == now:
        return
    if made_nothing(context.folder):
        kept = {key: value for key, value in recorded.items() if key != ENDS}
        write_mark(path, replace(mark, resolved=kept if now is None else kept | {ENDS: now}))
        return
    before, here = recorded.get(ENDS, str(processor.eos_id)), now or str(processor.eos_id)
    raise UserError(
        f"stage {planned.name} was begun where answers end at id {before}, and here they end at {here}",
        where=str(context.folder),
        hint="eos_token_id of the target's generation_config.json was another, or was not read by the version that "
        f"began it: restart={planned.name} runs the stage again (the old folder is kept aside)",
    )
