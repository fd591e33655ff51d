"""The prompt that a server builds from the target's chat template, beside the one that a drafter is trained with.

A prompt that differs changes the target's answer, and of a drafter that was trained on another one fewer tokens are
accepted, without a word. Both are compared on one sample conversation.
"""

from __future__ import annotations

import itertools

import numpy as np

from ..core.errors import UserError
from .conversations import PromptFormat, encode
from .dataset import ConversationData
from .families.processor import Processor, Resizing
from .families.table import TEMPLATES

_CHAT = PromptFormat(template="chat")
_SIDES = (640, 480)  # of the sample's picture


def sample_ids(form: PromptFormat, processor: Processor, *, pictures: bool) -> list[int]:
    """Ids of a request of two turns, with a picture where `pictures` are read. Raises `UserError` as `encode`."""
    shows = pictures and processor.reads_pictures
    shown = processor.picture_family.layouts([_SIDES], processor, Resizing()) if shows else ()
    values = ["<image>\n" * shows + "What is this?", "A circle.", "And on its left?"]
    turns = [{"from": ("human", "gpt")[number % 2], "value": value} for number, value in enumerate(values)]
    return encode(turns, form, processor, pictures=shown, open_ended=True).ids


def difference(form: PromptFormat, processor: Processor, *, pictures: bool = True) -> str | None:
    """Where the sample prompt parts from what the chat template in the target's files makes of it; None: nowhere.
    Raises `UserError`: one of the two cannot be built, or the files have no chat template.
    """
    ours, served = (sample_ids(one, processor, pictures=pictures) for one in (form, _CHAT))
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ours, served, strict=False)))
    if ours == served:
        return None
    here, there = (repr(processor.tokenizer.decode(ids[same : same + 12])) for ids in (ours, served))
    return f"at id {same} of {len(served)}: {here} in training, {there} on a server"


def other_aspect(data: ConversationData | None, processor: Processor, shown: np.ndarray) -> dict[str, str]:
    """`aspect` of data whose pictures (samples of `shown` above 0) are not cut as a server's; empty: of none."""
    served = processor.picture_family.served_aspect
    return {"aspect": data.aspect} if data and served not in (None, data.aspect) and (shown > 0).any() else {}


def chat_template(form: PromptFormat, processor: Processor, *, pictures: bool = True) -> str | None:
    """A chat template with which a server builds the sample prompt of `form`; None: this project can write none."""
    if form.template == "chat":
        return form.chat_template
    template, family, tokenizer = TEMPLATES[form.template], processor.picture_family, processor.tokenizer
    system = next(text for text in (form.system, family.system, template.system) if text is not None)
    bos = "" if processor.bos_id is None else tokenizer.bos_token
    mark = str(tokenizer.convert_ids_to_tokens(processor.image_token_id)) if processor.reads_pictures else ""
    around = [i for i in (processor.vision_start_id, processor.vision_end_id) if i is not None]
    if len(around) == 2 and family.written is not None and not family.written.fullmatch(mark):
        mark = mark.join(tokenizer.convert_ids_to_tokens(around))
    line_break = "" if template.surrounds and not template.keeps_breaks else "\n"
    # Training tokenizes the texts around a picture one by one, and some tokenizers put a blank before each.
    for blank, beside in itertools.product(("", " "), repeat=2):
        written = template.jinja(system, f"{mark}{beside}{line_break}", f"{bos}{blank}" if bos else "")
        try:
            same = sample_ids(PromptFormat(template="chat", chat_template=written), processor, pictures=pictures)
            if same == sample_ids(form, processor, pictures=pictures):
                return written
        except UserError:
            return None
    return None
