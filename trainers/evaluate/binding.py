"""Whether the target's answers depend on the picture: is the right word said with it, and without it?

It is the probe `binding` of an `evaluate` stage.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import torch

from ...core import ranks
from ...core.batch import Request
from ...core.json_types import JsonObject
from ...data.families.processor import Processor
from ...eval.intervals import ratio
from ...eval.loop import generate
from ...models.drafters.modes import without_pictures
from ..run.stage_records import data_files
from .measuring import Measuring
from .probe_settings import Binding
from .requests import ConversationSet, Opening

_NAMED_WITHIN = 16  # tokens of an answer in which its key word is looked for


def binding(probe: Binding, opening: Opening, measuring: Measuring, processor: Processor) -> JsonObject:
    """Share of questions whose answer names the record's key word, with the picture and without it."""
    dataset = opening.dataset(probe.data, data_files(probe.data, opening.context))
    questions = ConversationSet("binding", "image", "", dataset)
    decoding = measuring.plainly(min(measuring.stage.temperatures), _NAMED_WITHIN)
    words = {str(dataset.record(i)["answer"]) for i in range(len(dataset))}

    def named(index: int, request: Request) -> str | None:
        tokens = generate(measuring.target, None, request, decoding, torch.Generator()).tokens
        turns = dataset.record(index)["conversations"]
        asked_last = next(turn["value"] for turn in reversed(turns) if turn["from"] == "human")
        return key_word(measuring.text(tokens), asked_last, words)

    asked = right = blind = 0
    stop = measuring.context.stop
    with stop.together():
        for index in stop.watch(ranks.share(len(dataset), in_step=stop.in_step), "while probing binding"):
            opened = questions.open(index, measuring.target)
            if opened is None:
                continue
            request, answer = opened.request, str(dataset.record(index)["answer"])
            assert isinstance(request, Request)
            asked += 1
            right += named(index, request) == answer
            blind += named(index, without_pictures(request, processor.newline_id)) == answer
    each = [(asked, right, blind)] if stop.in_step else ranks.gather((asked, right, blind))
    asked, right, blind = (sum(counts) for counts in zip(*each, strict=True))
    return {"questions": asked, "accuracy": ratio(right, asked), "blind_accuracy": ratio(blind, asked)}


def key_word(answer: str, question: str, words: Collection[str]) -> str | None:
    """Which of `words` an answer gives, whatever its wording; None: none of them.

    It is the last one in the first clause that names one which the question does not: "You can see that the circle is
    red, as ..." gives red where the circle was asked for, and "I see a red circle, ..." does, too.
    """
    asked = set(re.findall(r"\w+", question))
    for clause in re.split(r"[,.;:]", answer):
        if said := [word for word in clause.split() if word in words and word not in asked]:
            return said[-1]
    return None
