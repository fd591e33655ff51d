#!/usr/bin/env python
"""Speed of the decoding loop and of the training step, compared with other implementations.

    scripts/bench/benchmark_loop.py               prints a section for docs/results/benchmarks.md

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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from draftsmith.core.batch import Request
from draftsmith.data.collate import ConversationCollate, Sample
from draftsmith.data.loader import Loader
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw
from draftsmith.eval.rules import Greedy
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.independent import IndependentProposal
from draftsmith.models.parts import PARTS, TokenIds
from draftsmith.models.targets.llava.decoder import LlavaDecoder
from draftsmith.models.targets.llava.section import LlavaTarget
from draftsmith.models.targets.llava.training import LlavaTraining
from draftsmith.scripts import timing
from draftsmith.scripts.papers.latency_models import random_llava
from draftsmith.scripts.timing import in_turn, ratios, row, spread, timed
from transformers import DynamicCache, LlamaForCausalLM
from transformers.utils import logging

VOCAB, IMAGE, BOS, EOS, PAD = 2048, 3, 1, 2, 0
STEPS, BATCH = 12, 8  # of a training run


def build_target(width: int, layers: int, seed: int):
    """A tiny LLaVA with random weights."""
    text, ids = (width, 3 * width, layers, width // 64), TokenIds(VOCAB, IMAGE, BOS, EOS, PAD)
    model = random_llava(text, (64, 128, 2, 2), ids, side=32, patch=8, seed=seed)
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
    drafter = IndependentProposal(LlavaDecoder(draft, num_token_ids=VOCAB, never=(IMAGE,)), "T", newline_id=5)
    decoding = Decoding(Chain(gamma), Greedy(), Draw("top-k"), Warp(), limit, ())
    settings = draft.generation_config
    settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = gamma, "constant"
    settings.assistant_confidence_threshold, settings.is_assistant = 0.0, True
    times: dict[str, list[float]] = {"ours": [], "theirs": [], "plain": []}
    overheads: list[float] = []
    taus: list[float] = []
    for number in range(n + 1):
        generator = torch.Generator().manual_seed(arguments.seed * 1000 + number)
        ids = torch.randint(8, VOCAB, (64,), generator=generator)
        request = Request(ids, torch.zeros(64, dtype=torch.int8), None, str(number))
        results: dict[str, Any] = {}

        def run(name: str, action: Callable[[], Any], results: dict[str, Any] = results) -> None:
            results[name] = action()

        assisted = partial(
            model.generate, ids[None].to(device), attention_mask=torch.ones(1, len(ids), dtype=torch.long,
            device=device), assistant_model=draft, max_new_tokens=limit, do_sample=False, suppress_tokens=[IMAGE],
            eos_token_id=None, pad_token_id=PAD,
        )  # fmt: skip
        actions: dict[str, Callable[[], Any]] = {
            "ours": partial(run, "ours", partial(generate, target, drafter, request, decoding)),
            "theirs": partial(run, "theirs", assisted),
            "plain": partial(generate, target, None, request, decoding),
        }
        seconds = in_turn(actions, number)
        result = results["ours"]
        assert result.tokens == results["theirs"][0, len(ids) :].tolist(), "the two loops disagree"
        if number == 0:  # warm-up
            continue
        for name, values in times.items():
            values.append(seconds[name])
        t_q, t_verify = bare_times(draft, model, 64 + limit // 2, gamma, device)
        full = [c.total_s for c in result.cycles if c.num_drafted == gamma]
        overheads.append(statistics.median(full) / (gamma * t_q + t_verify))
        taus.append(sum(c.num_emitted for c in result.cycles) / len(result.cycles))
    row("ours / transformers' assisted generation", spread(ratios(times["ours"], times["theirs"])), n)
    plain = f"ours / our plain decoding (tau {statistics.mean(taus):.2f})"
    row(plain, spread(ratios(times["ours"], times["plain"])), n)
    row("cycle / (gamma T_q + T_verify)", spread(overheads), n)


def bare_times(draft, target, length: int, gamma: int, device) -> tuple[float, float]:
    """Medians of one bare draft forward (1 token) and one bare target forward (gamma + 1), after a full cache."""
    times = []
    for model, core, count in ((draft, draft.model, 1), (target, target.model.language_model, gamma + 1)):
        cache = DynamicCache(config=core.config)
        core(input_ids=torch.full((1, length), 9, device=device), past_key_values=cache, use_cache=True)
        ids = torch.full((1, count), 9, device=device)

        def forward(model=model, core=core, cache=cache, ids=ids):
            model.lm_head(core(input_ids=ids, past_key_values=cache, use_cache=True).last_hidden_state).argmax(-1)

        seconds = []
        for _ in range(9):
            seconds.append(timed(forward))
            cache.crop(-count)
        times.append(statistics.median(seconds))
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
    from draftsmith.trainers.run.deepspeed_section import EngineConfig
    from draftsmith.trainers.train.checkpoint import CheckpointConfig
    from draftsmith.trainers.train.engine import Engine
    from draftsmith.trainers.train.loop import Training, train

    module = LlavaTraining(build_target(384, 6, 0), PARTS, gradient_checkpointing=False)
    engine = Engine(module, adamw(module), lambda step: 1.0, EngineConfig(), micro_batch_size=BATCH, accumulation=1,
                    clip_norm=None)  # fmt: skip
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        training = Training(module, batches, STEPS, finish=lambda engine: None)
        seconds = timed(lambda: train(engine, training, CheckpointConfig(every=None), log_every=STEPS,
                                      folder=Path(folder), fingerprint="x",
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
    from draftsmith.trainers.train.engine import init_distributed

    init_distributed()
    quotients = []
    for number in range(arguments.pairs_step + 1):
        if number % 2:
            (seconds, loss), (bare_seconds, bare_loss) = our_training(), bare_training()
        else:
            (bare_seconds, bare_loss), (seconds, loss) = bare_training(), our_training()
        assert abs(loss - bare_loss) < 2e-3, (loss, bare_loss)
        quotients.append(seconds / bare_seconds)
    row("training step, ours / bare torch", spread(quotients[1:]), arguments.pairs_step)


def main() -> None:
    """Prints decoding and training steps against the bare libraries, as ratios of pairs."""
    parser = timing.options(__doc__)
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=15, help="requests, each decoded by both loops")
    parser.add_argument("--pairs-step", type=int, default=7, help="pairs of training runs of 12 steps")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    timing.header(f"seed {arguments.seed}, gamma {arguments.gamma}, target width 512, float32")
    timing.table("what", "median of ratios [quartiles]", "pairs")
    benchmark_loop(arguments, timing.device())
    benchmark_step(arguments)


if __name__ == "__main__":
    main()
