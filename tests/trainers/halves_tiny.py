"""A language model with a chat tokenizer as SmolLM2's, and an EfficientNet-Lite0 of few channels, as folders."""

from pathlib import Path

import torch
from draftsmith.models.lite0 import EfficientNetLite0Config, EfficientNetLite0Model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import CLIPImageProcessorPil, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SIDE = 64
TEXTS = ["What is this? Picture: a red apple (fruit: sweet, round) What do you see? An apple. A pear. user assistant"]
# With a default system sentence, and for texts alone.
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chat_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=letters, show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<|endoftext|>", bos_token="<|im_start|>", eos_token="<|im_end|>",
        pad_token="<|im_end|>", chat_template=TEMPLATE,
    )  # fmt: skip


def language_model(folder: Path) -> Path:
    tokenizer = chat_tokenizer()
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=len(tokenizer), max_position_embeddings=256, initializer_range=0.4, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tower(folder: Path) -> Path:
    torch.manual_seed(2)
    rows = [[3, 1, 1, 8, 1], [3, 2, 2, 8, 2], [5, 2, 2, 8, 1], [3, 2, 2, 12, 1], [3, 2, 2, 16, 1]]
    config = EfficientNetLite0Config(
        image_size=SIDE, patch_size=SIDE // 2, stem_channels=8, rows=rows, head_channels=16
    )  # fmt: skip
    model = EfficientNetLite0Model(config)
    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d):  # with transformers' random weights pictures fade away
            torch.nn.init.kaiming_normal_(module.weight, mode="fan_out" if module.groups == 1 else "fan_in")
    model.save_pretrained(folder)
    CLIPImageProcessorPil(
        size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}, image_mean=[0.498] * 3,
        image_std=[0.502] * 3,
    ).save_pretrained(folder)  # fmt: skip
    return folder
