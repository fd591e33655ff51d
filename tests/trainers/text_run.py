"""A tiny text target with ChatML as its own template, questions without answers, and a recipe from them to a report."""

import json
from pathlib import Path

import torch
from draftsmith.data.shapes.tokenizer import train_tokenizer
from stages_run import load_spelled, run_loaded
from states_run import WORDS
from tokenizers import AddedToken
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QUESTIONS = 14
STEPS = {"batch_size": 4, "optim": {"lr": 0.001}}
FORMAT = {"template": "chat"}


def target(folder: Path) -> None:
    """A Llama of seven layers whose tokenizer and generation config end at <|im_end|>."""
    said = [f"Which? {' '.join(WORDS[i:] + WORDS[:i])}." for i in range(len(WORDS))]
    tokenizer = train_tokenizer(["user assistant system\n", *said] * 3, 400)
    ends = ["<|im_start|>", "<|im_end|>"]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=True) for token in ends], special_tokens=True)
    tokenizer.eos_token, tokenizer.chat_template = ends[1], CHATML
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=7, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, initializer_range=0.3,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id).save_pretrained(folder)


def questions(path: Path, count: int = QUESTIONS) -> None:
    """Records of a question alone."""
    asked = [" ".join(WORDS[(number + i) % len(WORDS)] for i in range(2 + number % 5)) for number in range(count)]
    records = [{"id": n, "conversations": [{"from": "human", "value": f"{a}?"}]} for n, a in enumerate(asked)]
    path.write_text("\n".join(map(json.dumps, records)))


def recipe(folder: Path) -> dict:
    """Answers, their states, an EAGLE-3 head on them, and a report, all of `folder`'s questions."""
    data = {"path": str(folder / "questions.jsonl"), "max_length": 64}
    return {
        "target": {"kind": "causal_lm", "path": str(folder / "target")},
        "drafter": {"kind": "eagle3", "mtp_steps": 2},
        "stages": {
            "answers": {"kind": "regenerate", "format": FORMAT, "data": data, "max_new_tokens": 6, "batch_size": 4},
            "states": {"kind": "cache", "format": FORMAT, "data": data, "answers": {"from": "answers"}},
            "train": {"kind": "train", "format": FORMAT, "source": {"kind": "cached"}, "steps": 2, **STEPS},
            "evaluate": {
                "kind": "evaluate", "format": FORMAT, "max_new_tokens": 6, "warmup": 0,
                "benchmarks": {"held-out": {"data": data | {"max_samples": 3}}},
                "methods": {"EAGLE-3": {"drafter": "train", "tree": {"kind": "chain", "gamma": 2}}},
            },
        },
    }  # fmt: skip


def made(folder: Path) -> Path:
    """`folder` with a target and questions."""
    target(folder / "target")
    questions(folder / "questions.jsonl")
    return folder


def run(source: dict, output: Path, *settings: str, stages=None, restart=None) -> list[str]:
    """Stages of a spelled recipe in this process; returns what was said."""
    return run_loaded(load_spelled(source, "text", output, *settings), output, stages=stages, restart=restart)
