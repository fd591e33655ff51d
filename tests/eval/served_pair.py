"""A tiny LLaVA, an EAGLE-3 head trained beside it and a text draft, in vLLM's layouts: what the tests serve."""

import json
from pathlib import Path

import torch
from draftsmith.data.families.llava import LLAVA
from draftsmith.data.shapes.tokenizer import train_tokenizer
from draftsmith.models.drafters.base import TargetIdentity
from draftsmith.models.drafters.eagle3 import Eagle3Config
from draftsmith.models.drafters.head_files import manifest_of, save_head
from draftsmith.models.formats.export import export_drafter
from draftsmith.models.formats.target import export_target
from draftsmith.models.parts import TokenIds
from draftsmith.models.targets.base import language_shape
from PIL import Image
from tiny import with_random_weights
from transformers import LlamaForCausalLM

LENGTH = 48
TAPS = (2, 4, 5)
TEXTS = ("What is in the picture?", "Tell me where the red circle is.", "Count the shapes, one by one.")


def conversations(folder: Path, count: int) -> Path:
    """Rows as MMSpec's: each has a picture, and every second one asks again after the answer."""
    (folder / "images").mkdir(parents=True)
    found = []
    for number in range(count):
        picture = Image.new("RGB", (32, 32), (40 * number, 90, 200 - 30 * number))
        picture.paste((250, 10 * number, 0), (6, 2, 22, 26))
        picture.save(folder / "images" / f"{number}.png")
        turns = [TEXTS[number % 3], TEXTS[(number + 1) % 3]][: 1 + number % 2]
        found.append({"id": f"m{number}", "image": f"{number}.png", "turns": turns, "category": "x", "topic": "shapes"})
    (folder / "mmspec.jsonl").write_text("\n".join(map(json.dumps, found)))
    return folder


def build(folder: Path, steps: int = 150, rows: int = 160) -> None:
    """`target` as vLLM reads it, `eagle3` and `text` exported for it; the head learns for `steps` from `rows` texts."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer([f"USER: {text} ASSISTANT: the red circle is on the left." for text in TEXTS * 4], 400)
    processor = LLAVA.new(tokenizer, image_size=32, patch_size=16, image_mean=(0.5,) * 3, image_std=(0.5,) * 3)
    ids_in_table = -(-len(tokenizer) // 64) * 64
    ids = TokenIds(
        ids_in_table, processor.image_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    )
    # Heads of 32: the smallest that the CPU engine has a kernel for.
    model = with_random_weights((128, 256, 8, 4), (32, 64, 2, 2), ids, side=32, patch=16, num_key_value_heads=2,
                         max_position_embeddings=512, initializer_range=0.2)  # fmt: skip
    # Quiet layers: the next token follows mostly from the last one, which a head learns in seconds.
    for layer in model.model.language_model.layers:
        layer.self_attn.o_proj.weight.data *= 0.006
        layer.mlp.down_proj.weight.data *= 0.006
    # Ids that stand for no text score nothing: engines take no list of them beside a drafter.
    never = [processor.image_token_id, *range(len(tokenizer), ids_in_table)]
    model.lm_head.weight.data[never] = 0
    model.save_pretrained(folder / "trained")
    processor.save(folder / "trained")
    export_target(folder / "trained", folder / "target")

    config = Eagle3Config(kind="eagle3", visual_slots="read", image="placeholder", taps=TAPS)
    shape = language_shape(model.config.text_config)
    head = config.module(config.layer(shape), None)
    _learn(head, model, tokenizer, never, steps, rows)
    target = {"kind": "llava", "path": str(folder / "target")}
    drafter = config.model_dump(mode="json")
    save_head(head, folder / "head", manifest_of(config, shape, TargetIdentity(target), drafter=drafter))
    export_drafter(folder / "head", folder / "eagle3", "vllm")
    # The target's own language model: all that it drafts on text must stand.
    twin = LlamaForCausalLM(model.config.text_config)
    twin.model.load_state_dict(model.model.language_model.state_dict())
    twin.lm_head.load_state_dict(model.lm_head.state_dict())
    twin.save_pretrained(folder / "twin")
    export_drafter(folder / "twin", folder / "text", "vllm", target=str(folder / "target"))


def _learn(head, model, tokenizer, never, steps: int, rows: int) -> None:
    """Cross-entropy with the target's likeliest token over its own continuations."""
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(5, len(tokenizer), (rows, 6), generator=generator)
    starts[:, 0] = tokenizer.bos_token_id
    asked = {"do_sample": False, "max_new_tokens": LENGTH, "eos_token_id": None, "pad_token_id": tokenizer.pad_token_id}
    with torch.no_grad():
        ids = model.generate(input_ids=starts, attention_mask=torch.ones_like(starts), suppress_tokens=never, **asked)
        output = model(input_ids=ids, output_hidden_states=True)
        output.logits[..., never] = float("-inf")
        states = torch.cat([output.hidden_states[tap] for tap in TAPS], -1)[:, :-1]
        embeds, wanted = model.get_input_embeddings()(ids[:, 1:]), output.logits[:, 1:].argmax(-1)
    count = states.shape[1]
    mask = torch.ones(count, count, dtype=torch.bool).tril()
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    for _ in range(steps):
        out = head(embeds, head.fuse(states), torch.arange(count), mask)
        scores = head.lm_head(head.norm(out))
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
