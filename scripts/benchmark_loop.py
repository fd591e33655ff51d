#!/usr/bin/env python
"""How fast the decoding loop and the training step are, against what stands beside them.

    scripts/benchmark_loop.py               prints a section for docs/benchmarks.md

1. Our loop against `transformers.generate(assistant_model=...)`: the same target, the same text-only draft,
   the same gamma (constant schedule, threshold 0), request by request in turn. Their assistant never sees a
   picture, so text-only is the fair case.
2. The loop's own cost: cycle time over (gamma T_q + T_verify), where both times are bare forwards.
3. Our training step (DeepSpeed engine, ZeRO-0, losses over the global batch, finite checks) against a bare
   torch loop on the same model and batches, in turn.
"""

import argparse
import copy
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from draftsmith.core.nouns import Request
from draftsmith.data.collate import ConversationCollate, Sample
from draftsmith.data.loader import Loader
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw
from draftsmith.eval.rules import Greedy
from draftsmith.eval.timing import command, in_turn, machine, ratios, spread, timed
from draftsmith.models.decoding.decoder import CachedDecoder
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.independent import IndependentProposal
from draftsmith.models.llava import PARTS, LlavaTraining, TokenIds, assemble, llava_config
from draftsmith.models.targets.llava import LlavaTarget
from transformers import CLIPVisionConfig, DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

VOCAB, IMAGE, BOS, EOS, PAD = 2048, 3, 1, 2, 0
STEPS, BATCH = 12, 8  # of a training run


def build_target(width: int, layers: int, seed: int):
    """A tiny LLaVA with random weights."""
    torch.manual_seed(seed)
    text = LlamaConfig(
        hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers, num_attention_heads=width // 64,
        num_key_value_heads=width // 64, vocab_size=VOCAB, max_position_embeddings=2048, initializer_range=0.03,
    )  # fmt: skip
    vision = CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8
    )
    model = assemble(llava_config(text, vision, TokenIds(VOCAB, IMAGE, BOS, EOS, PAD))).eval()
    # Later layers change little, so that a draft of the first layer agrees now and then.
    for layer in model.model.language_model.layers[1:]:
        layer.self_attn.o_proj.weight.data *= 0.3
        layer.mlp.down_proj.weight.data *= 0.3
    return model


def first_layers(target, layers: int) -> LlamaForCausalLM:
    """A draft that agrees with a random target now and then: its embedding, first layers and head."""
    config = copy.deepcopy(target.config.text_config)
    config.num_hidden_layers = layers
    draft = LlamaForCausalLM(config).eval()
    draft.model.load_state_dict(target.model.language_model.state_dict(), strict=False)
    draft.lm_head.load_state_dict(target.lm_head.state_dict())
    return draft


@torch.inference_mode()
def benchmark_loop(arguments, device) -> None:
    """Print our decoding loop's time over transformers' assisted generation, plain decoding and bare forwards."""
    gamma, limit, n = arguments.gamma, 96, arguments.pairs
    model = build_target(512, 8, arguments.seed).to(device)
    draft = first_layers(model, 1).to(device)
    target = LlavaTarget(model, num_token_ids=VOCAB, image_token_id=IMAGE)
    drafter = IndependentProposal(CachedDecoder(draft, num_token_ids=VOCAB, never=(IMAGE,)), "T", newline_id=5)
    decoding = Decoding(Chain(gamma), Greedy(), Draw("top-k"), Warp(), limit, ())
    settings = draft.generation_config
    settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = gamma, "constant"
    settings.assistant_confidence_threshold, settings.is_assistant = 0.0, True
    ours: list[float] = []
    theirs: list[float] = []
    plain: list[float] = []
    overheads: list[float] = []
    taus: list[float] = []
    for number in range(n + 1):
        generator = torch.Generator().manual_seed(arguments.seed * 1000 + number)
        ids = torch.randint(8, VOCAB, (64,), generator=generator)
        request = Request(ids, torch.zeros(64, dtype=torch.int8), None, str(number))
        found: dict[str, Any] = {}

        def our_loop(request=request, found=found):
            found["ours"] = generate(target, drafter, request, decoding)

        def their_loop(ids=ids, found=found):
            found["theirs"] = model.generate(
                ids[None].to(device), attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=device),
                assistant_model=draft, max_new_tokens=limit, do_sample=False, suppress_tokens=[IMAGE],
                eos_token_id=None, pad_token_id=PAD,
            )  # fmt: skip

        def our_plain(request=request):
            generate(target, None, request, decoding)

        times = in_turn({"ours": our_loop, "theirs": their_loop, "plain": our_plain}, number)
        for name, seconds in (("ours", ours), ("theirs", theirs), ("plain", plain)):
            seconds.append(times[name])
        result = found["ours"]
        assert result.tokens == found["theirs"][0, len(ids) :].tolist(), "the two loops disagree"
        t_q, t_verify = bare_times(draft, model, 64 + limit // 2, gamma, device)
        full = [c for c in result.cycles if c.num_drafted == gamma]
        overheads.append(statistics.median(c.total_s for c in full) / (gamma * t_q + t_verify))
        taus.append(sum(c.num_emitted for c in result.cycles) / len(result.cycles))
        if number == 0:  # warm-up
            for values in (ours, theirs, plain, overheads, taus):
                values.clear()
    print(f"| ours / transformers' assisted generation | {spread(ratios(ours, theirs))} | {n} |")
    print(f"| ours / our plain decoding (tau {statistics.mean(taus):.2f}) | {spread(ratios(ours, plain))} | {n} |")
    print(f"| cycle / (gamma T_q + T_verify) | {spread(overheads)} | {n} |")


def bare_times(draft, target, length: int, gamma: int, device) -> tuple[float, float]:
    """Medians of one bare draft forward (1 token) and one bare target forward (gamma + 1), behind a full cache."""
    times = []
    for model, core, count in ((draft, draft.model, 1), (target, target.model.language_model, gamma + 1)):
        cache = DynamicCache(config=core.config)
        core(input_ids=torch.full((1, length), 9, device=device), past_key_values=cache, use_cache=True)
        ids = torch.full((1, count), 9, device=device)

        def forward(model=model, core=core, cache=cache, ids=ids):
            model.lm_head(core(input_ids=ids, past_key_values=cache, use_cache=True).last_hidden_state).argmax(-1)

        found = []
        for _ in range(9):
            found.append(timed(forward))
            cache.crop(-count)
        times.append(statistics.median(found))
    return times[0], times[1]


class Conversations:
    """Random conversations of 128 ids, one picture each."""

    lengths = np.full(STEPS * BATCH, 128)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Sample:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(8, VOCAB, (128,), generator=generator).tolist()
        ids[4:20] = [IMAGE] * 16
        mask = [position > 60 for position in range(128)]
        pixels = torch.randn(1, 3, 32, 32, generator=generator)
        return Sample(ids, mask, [int(i == IMAGE) for i in ids], pixels, str(index))


def batches(start: int = 0) -> Loader:
    """The conversations of all steps, from step `start` on."""
    return Loader(Conversations(), seed=0, batch_size=BATCH, micro_batch_size=BATCH, total_steps=STEPS,
                  collate=ConversationCollate(PAD, 32), start_step=start)  # fmt: skip


def adamw(module: torch.nn.Module) -> torch.optim.AdamW:
    """An optimizer of the module's trainable weights."""
    return torch.optim.AdamW((p for p in module.parameters() if p.requires_grad), lr=1e-4)


def our_training() -> tuple[float, float]:
    """Mean seconds and mean loss of a step of our loop."""
    from draftsmith.trainers.checkpoint import CheckpointConfig
    from draftsmith.trainers.engine import Engine, EngineConfig
    from draftsmith.trainers.loop import Schedule, train

    module = LlavaTraining(build_target(384, 6, 0), PARTS, gradient_checkpointing=False)
    engine = Engine(module, adamw(module), lambda step: 1.0, EngineConfig(), micro_batch_size=BATCH, accumulation=1,
                    clip_norm=None)  # fmt: skip
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        schedule = Schedule(STEPS, CheckpointConfig(every=None), log_every=STEPS)
        seconds = timed(lambda: train(engine, batches, schedule, folder=Path(folder), fingerprint="x",
                                      log=lambda values, step: losses.append(values["loss"]),
                                      rewind=lambda step: None, say=print))  # fmt: skip
    return seconds / STEPS, losses[0]


def bare_training() -> tuple[float, float]:
    """Mean seconds and mean loss of a step in bare torch."""
    model = build_target(384, 6, 0).train()
    if torch.cuda.is_available():
        model.cuda()
    optimizer, losses = adamw(model), []

    def run() -> None:
        for step in batches():
            data = step.micro[0].to(model.device)
            labels = data.ids.masked_fill(~data.loss_mask, -100)
            loss = model(input_ids=data.ids, attention_mask=data.attention_mask.long(), labels=labels,
                         pixel_values=data.pixels).loss  # fmt: skip
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())

    return timed(run) / STEPS, sum(losses) / STEPS


def benchmark_step(arguments: argparse.Namespace) -> None:
    """Print the time of a training step over the same step in bare torch."""
    from draftsmith.trainers.engine import init_distributed

    init_distributed()
    ours: list[float] = []
    bare: list[float] = []
    for number in range(arguments.pairs_step + 1):
        if number % 2:
            (seconds, loss), (bare_seconds, bare_loss) = our_training(), bare_training()
        else:
            (bare_seconds, bare_loss), (seconds, loss) = bare_training(), our_training()
        assert abs(loss - bare_loss) < 2e-3, (loss, bare_loss)
        ours.append(seconds)
        bare.append(bare_seconds)
    print(f"| training step, ours / bare torch | {spread(ratios(ours[1:], bare[1:]))} | {arguments.pairs_step} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=15, help="requests, each decoded by both loops")
    parser.add_argument("--pairs-step", type=int, default=7, help="pairs of training runs of 12 steps")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"`{command()}`: {machine()}, seed {arguments.seed}, gamma {arguments.gamma}, target width 512, float32\n")
    print("| what | median of ratios [quartiles] | pairs |\n| --- | --- | --- |")
    benchmark_loop(arguments, device)
    benchmark_step(arguments)


if __name__ == "__main__":
    main()
