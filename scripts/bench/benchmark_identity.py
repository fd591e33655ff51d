#!/usr/bin/env python
"""Whether greedy decoding with a drafter says what plain decoding says, where a target computes in 16 bits.

    scripts/bench/benchmark_identity.py weights/smollm2 PROMPTS.json --count 20

Prompt look-up drafts for each prompt. Where an answer parts from plain decoding's, both tokens are scored by the
target's own weights in float64. Three kinds of target: its scores rounded to 16 bits as its LM head makes them, the
same head computed in float32, and all of it in float32. A second table compares the bits of a product over one row with
those over several, for the sizes of the target's layers: rows that differ there are why answers part.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch
from draftsmith.core.batch import Request
from draftsmith.data.conversations import PromptFormat, encode
from draftsmith.data.processor_files import load_processor
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw
from draftsmith.eval.rules import RULES
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.lookup import NgramConfig
from draftsmith.models.targets.causal.section import CausalTarget
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

ROWS = (2, 4, 6, 12, 24)


class Float32Head(torch.nn.Module):
    """A linear layer of 16 bits whose products are of float32."""

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self.weight = torch.nn.Parameter(weight.detach().float(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[...,D] -> [...,V] float32."""
        return F.linear(x.float(), self.weight)


def load(path: str, dtype: torch.dtype, *, float_head: bool = False) -> CausalTarget:
    """The target in a type, and its LM head in float32 where asked for."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    if float_head:
        model.lm_head = Float32Head(model.lm_head.weight)
    return CausalTarget(model, num_token_ids=model.config.vocab_size)


def requests(path: str, prompts: Path, count: int) -> tuple[list[Request], tuple[int, ...]]:
    """The prompts of a file of records in the target's own chat template, and the ids that end an answer."""
    processor, form, asked = load_processor(path, text_only=True), PromptFormat(template="chat"), []
    for number, record in enumerate(json.loads(prompts.read_text())[:count]):
        ids = torch.tensor(encode(record["conversations"], form, processor, open_ended=True).ids)
        asked.append(Request(ids, torch.zeros_like(ids), None, name=str(number)))
    return asked, (processor.eos_id,)


@torch.inference_mode()
def exact_gap(exact: torch.nn.Module, request: Request, said: list[int], other: int) -> float:
    """How far the last token of `said` is above `other` in the float64 scores of what comes before it."""
    ids = torch.cat([request.ids, torch.tensor(said[:-1], dtype=torch.long)])
    scores = exact(ids[None], logits_to_keep=1).logits[0, -1]
    return float(scores[said[-1]] - scores[other])


def rounding(path: str, dtype: torch.dtype) -> dict[str, list[str]]:
    """Share of outputs of one layer's products that change where rows come together, by width of the input."""
    model, found = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval(), {}
    layer = model.model.layers[0]
    for name, linear in (("query", layer.self_attn.q_proj), ("up", layer.mlp.up_proj), ("down", layer.mlp.down_proj),
                         ("head", model.lm_head)):  # fmt: skip
        x = torch.randn(24, linear.in_features, generator=torch.Generator().manual_seed(0)).to(dtype)
        alone = torch.cat([linear(row[None]) for row in x])
        found[f"{name} {linear.in_features}x{linear.out_features}"] = [
            f"{float((torch.cat([*map(linear, x.split(rows))]) != alone).float().mean()):.5f}" for rows in ROWS
        ]
    return found


@torch.inference_mode()
def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("prompts", type=Path, help="records with a question each, as a prompts stage writes them")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    asked = parser.parse_args()
    low = getattr(torch, asked.dtype)
    prompts, ends = requests(asked.target, asked.prompts, asked.count)
    exact = AutoModelForCausalLM.from_pretrained(asked.target, dtype=torch.float64).eval()
    config = NgramConfig(kind="ngram")
    for name, settings in {
        asked.dtype: {"dtype": low}, f"{asked.dtype}, head in float32": {"dtype": low, "float_head": True},
        "float32": {"dtype": torch.float32},
    }.items():  # fmt: skip
        target, gaps = load(asked.target, **settings), []
        for request in prompts:
            said = [
                generate(target, drafter, request,
                         Decoding(Chain(5), RULES["greedy"], Draw("top-k"), Warp(), asked.tokens, ends)).tokens
                for drafter in (None, config.drafter(torch.nn.Module(), target))
            ]  # fmt: skip
            part = next((n for n, pair in enumerate(zip(*said, strict=False)) if pair[0] != pair[1]), None)
            if part is not None:
                gaps.append(abs(exact_gap(exact, request, said[0][: part + 1], said[1][part])))
        told = (
            f"; float64 gaps of the others: median {statistics.median(gaps):.3f}, most {max(gaps):.3f}" if gaps else ""
        )
        print(f"{name}: {len(prompts) - len(gaps)} of {len(prompts)} identical{told}", flush=True)
    print(f"share of outputs that change with the rows of a product, {ROWS}")
    for layer, shares in rounding(asked.target, low).items():
        print(f"  {layer}: {', '.join(shares)}")


if __name__ == "__main__":
    main()
