"""A family of pictures outside the package: the nearest one with marks of its own."""

from draftsmith.data.conversations import PromptFormat, encode
from draftsmith.data.families.llava import LLAVA, LlavaFamily
from draftsmith.data.families.processor import Resizing
from draftsmith.data.shapes.tokenizer import train_tokenizer

TEMPLATE = (
    "{% for m in messages %}{% for p in m.content %}{{ p.text if p.type == 'text' else '<image>' }}"
    "{% endfor %}{% endfor %}"
)


class MyFamily(LlavaFamily):
    def marks(self, pictures):
        return [f"[see]{mark}[seen]" for mark in super().marks(pictures)]


def test_its_marks_stand_in_the_conversation():
    tokenizer = train_tokenizer(["USER: What is this? ASSISTANT: A cat."] * 3, 400)
    tokenizer.add_special_tokens({"additional_special_tokens": ["[see]", "[seen]"]})
    tokenizer.chat_template = TEMPLATE
    mean = (0.5, 0.5, 0.5)
    made = LLAVA.new(tokenizer, image_size=24, patch_size=8, image_mean=mean, image_std=mean)
    mine = MyFamily("mine", "MyProcessor")  # its chat template writes <image>; for another word, say `written`
    processor = made.of_family(mine)
    pictures = mine.layouts([(90, 30)], processor, Resizing(aspect="pad"))
    turns = [{"from": "human", "value": "<image>What is this?"}]
    encoded = encode(turns, PromptFormat(template="chat"), processor, pictures=pictures, open_ended=True)
    assert encoded.text == "[see]<image>[seen]What is this?"
    assert encoded.ids.count(processor.image_token_id) == 9
