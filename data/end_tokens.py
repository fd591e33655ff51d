"""The tokens that end a target's answers. Whatever writes or measures answers asks here.

A target may have several. Llama 3.1's `generation_config.json` names three, and `transformers.generate` ends at any of
them. A prompt format ends turns with a token, too, which need not be among these.
"""

from __future__ import annotations

from .chat_template import end_of_answers
from .conversations import PromptFormat
from .families.processor import Processor


def end_ids(processor: Processor, form: PromptFormat) -> tuple[int, ...]:
    """Ids that end an answer, in ascending order: those of the target's generation config, the tokenizer's, and what
    the prompt format writes behind an answer.

    Args:
        processor: the target's.
    """
    # The templates of this project end with the tokenizer's own token: `encode` refuses others.
    written = end_of_answers(processor.tokenizer) if form.template == "chat" else None
    own = () if written is None else (processor.tokenizer.convert_tokens_to_ids(written),)
    return tuple(sorted({*processor.generation_ends, processor.eos_id, *own}))
