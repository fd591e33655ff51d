#!/usr/bin/env python
"""Our decode cycle against peers', in one process, on the same weights.

    scripts/benchmark_peers.py                             transformers' assisted generation alone
    scripts/benchmark_peers.py --eagle DIR --lantern DIR   and the official loops

1. `transformers.generate(assistant_model=...)`: chains of gamma tokens, behind short and long prompts.
2. EAGLE-3's `eagenerate` (SafeAILab/EAGLE, commit cb7e084): the same target and head, the same tree.
3. LANTERN's `generate` (jadohu/LANTERN, commit 3a56e45): the same LlamaGen and head, EAGLE-2's tree, guidance.

DIR is a clone at that commit: `git clone https://github.com/SafeAILab/EAGLE && git -C EAGLE checkout cb7e084`. It is
not installed: its files are read from there. They were written for transformers 4, and names that have gone since
then are put back for them (see `_older_transformers`).

A pair is a short and a longer answer by each of the two, so that prompts cancel out: a cycle is the longer run's time
less the short one's, over the cycles between them. Times are this thread's. Models have random weights: tau is about 1,
and a ratio of cycles does not depend on it; tokens a second do.
"""

import argparse
import copy
import os
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from draftsmith.core.batch import ImageRequest, Request
from draftsmith.core.errors import UserError
from draftsmith.eval import timing
from draftsmith.eval.lantern import Lantern, LanternConfig
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw, Dynamic
from draftsmith.eval.rules import RULES
from draftsmith.eval.timing import row, spread
from draftsmith.models.decoding.decoder import CachedDecoder
from draftsmith.models.decoding.neighbours import NeighbourTable
from draftsmith.models.decoding.rows import Guidance
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.eagle import EagleConfig
from draftsmith.models.drafters.eagle3 import Eagle3Config, Eagle3Head
from draftsmith.models.drafters.independent import IndependentProposal
from draftsmith.models.llamagen.transformer import LlamaGen, LlamaGenConfig
from draftsmith.models.targets.causal import CausalTarget
from draftsmith.models.targets.llamagen import LlamaGenTarget
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, set_seed
from transformers.utils import logging

BAR = 0.75  # of a peer's cycle
SHORT = 2  # tokens of the short run
TREE = {"total": 60, "depth": 5, "width": 10}
SIZES: dict[str, dict[str, Any]] = {
    "demo size": {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "vocab_size": 512},
    "width 512": {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "vocab_size": 32000},
}


@dataclass(frozen=True)
class Run:
    """What an answer took: its passes of the target, its tokens, and this thread's seconds."""

    passes: int
    tokens: int
    seconds: float

    def __sub__(self, other: "Run") -> "Run":
        return Run(self.passes - other.passes, self.tokens - other.tokens, self.seconds - other.seconds)

    @property
    def cycle(self) -> float:
        """Seconds of a cycle."""
        return self.seconds / self.passes


class Counted:
    """Counts the calls of a module: each cycle is one pass of the target's decoder."""

    def __init__(self, module: nn.Module):
        self.calls = 0
        module.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.calls += 1

    def run(self, answer: Callable[[int], int], length: int) -> Run:
        """An answer of `length` tokens or a few more, as `answer` says."""
        before, start = self.calls, time.thread_time()
        tokens = answer(length)
        return Run(self.calls - before, tokens, time.thread_time() - start)


def pairs(ours: Any, theirs: Any, arguments: argparse.Namespace) -> tuple[list[Run], list[Run]]:
    """Of each pair, what was decoded between the short and the longer run.

    Args:
        ours, theirs: (Counted, number of the request, length -> tokens).
    """
    found: dict[int, list[Run]] = {0: [], 1: []}
    for number in range(arguments.pairs + 1):
        sides = [(0, ours), (1, theirs)][:: 1 if number % 2 else -1]
        for side, (counted, answer) in sides:
            short, longer = (counted.run(partial(answer, number), n) for n in (SHORT, arguments.tokens))
            if number:  # the first warms up
                found[side].append(longer - short)
    return found[0], found[1]


def report(what: str, found: tuple[list[Run], list[Run]]) -> None:
    """Print a row: ratios of cycles and of tokens a second, pair by pair."""
    ours, theirs = found
    cycles = [a.cycle / b.cycle for a, b in zip(ours, theirs, strict=True)]
    rates = [(a.tokens / a.seconds) / (b.tokens / b.seconds) for a, b in zip(ours, theirs, strict=True)]
    taus = [sum(r.tokens for r in side) / sum(r.passes for r in side) for side in (ours, theirs)]
    row(what, f"at most {BAR}", spread(cycles), spread(rates), "{:.2f}, {:.2f}".format(*taus), len(cycles))


# The same target for all


def target_config(size: str, layers: int = 4) -> LlamaConfig:
    """A Llama of so many layers."""
    return LlamaConfig(
        **SIZES[size], num_hidden_layers=layers, max_position_embeddings=4096, initializer_range=0.06, bos_token_id=1,
        eos_token_id=None, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip


def prompt(number: int, length: int, vocab_size: int) -> torch.Tensor:
    """[T] random ids that follow from the number."""
    return torch.randint(8, vocab_size, (length,), generator=torch.Generator().manual_seed(number))


def settings(policy: Any, temperature: float, draw: Any = "top-k") -> Decoding:
    """Ours, at temperature 0 or above."""
    return Decoding(policy, RULES["sampling" if temperature else "greedy"], Draw(draw), Warp(temperature), 1, ())


def our_answer(target: CausalTarget, drafter: Any, decoding: Decoding, length: int, number: int, tokens: int) -> int:
    """Decode a request with our loop."""
    ids = prompt(number, length, target.vocab_size)
    request = Request(ids, torch.zeros(length, dtype=torch.int8), None, str(number))
    uniforms = torch.Generator().manual_seed(number)
    return len(generate(target, drafter, request, decoding.with_length(tokens), uniforms).tokens)


# 1. transformers' assisted generation


def assisted(size: str, arguments: argparse.Namespace) -> None:
    """Chains of gamma tokens by a draft of the target's first layer."""
    torch.manual_seed(arguments.seed)
    model = LlamaForCausalLM(target_config(size)).eval()
    reference = copy.deepcopy(model)
    draft = _first_layer(model)
    own_draft = copy.deepcopy(draft)
    target = CausalTarget(model, num_token_ids=model.config.vocab_size)
    decoder = CachedDecoder(draft, num_token_ids=model.config.vocab_size)
    drafter = IndependentProposal(decoder, "T", newline_id=5)
    options = own_draft.generation_config
    options.num_assistant_tokens, options.num_assistant_tokens_schedule = arguments.gamma, "constant"
    options.assistant_confidence_threshold = 0.0
    for length in (1, 1024):
        for temperature in (0.0, 1.0):
            decoding = settings(Chain(arguments.gamma), temperature, "sample" if temperature else "top-k")

            @torch.inference_mode()
            def theirs(number: int, tokens: int, length: int = length, sampled: bool = temperature > 0) -> int:
                ids = prompt(number, length, reference.config.vocab_size)[None]
                set_seed(number)
                answer = reference.generate(
                    ids, attention_mask=torch.ones_like(ids), assistant_model=own_draft, max_new_tokens=tokens,
                    do_sample=sampled, top_k=0, pad_token_id=0,
                )  # fmt: skip
                return answer.shape[1] - length

            ours = partial(our_answer, target, drafter, decoding, length)
            found = pairs((Counted(model.model), ours), (Counted(reference.model), theirs), arguments)
            what = f"transformers' assisted generation, {size}, T {temperature:g}, behind {length} tokens"
            report(what, found)


def _first_layer(model: LlamaForCausalLM) -> LlamaForCausalLM:
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = 1
    draft = LlamaForCausalLM(config).eval()
    draft.load_state_dict(model.state_dict(), strict=False)
    return draft


# 2. EAGLE-3's loop


def official_eagle(size: str, arguments: argparse.Namespace) -> None:
    """EAGLE-3's dynamic tree over the same target with the same head."""
    _older_transformers(arguments.eagle, "--eagle")
    from eagle.model.cnets import Model  # type: ignore[import-not-found]
    from eagle.model.ea_model import EaModel  # type: ignore[import-not-found]
    from eagle.model.modeling_llama_kv import LlamaForCausalLM as OfficialLlama  # type: ignore[import-not-found]

    torch.manual_seed(arguments.seed)
    config = target_config(size, layers=7)  # the fewest of which EAGLE-3 taps three different ones
    model = LlamaForCausalLM(config).eval()
    target = CausalTarget(model, num_token_ids=config.vocab_size)
    drafts = Eagle3Config(kind="eagle3")
    head = drafts.build(target).eval().requires_grad_(False)
    assert isinstance(head, Eagle3Head)
    names = {key: value for key, value in config.to_dict().items() if key != "rope_parameters"}
    plain = types.SimpleNamespace(
        **names | {"draft_vocab_size": config.vocab_size, "rope_scaling": None, "rope_theta": 1e4}
    )
    plain.num_key_value_heads, plain.pretraining_tp = config.num_key_value_heads, 1
    official_config = copy.deepcopy(config)
    official_config.pretraining_tp, official_config.rope_scaling, official_config.rope_theta = 1, None, 1e4
    official_config._attn_implementation = "eager"  # its own file is what attends
    official_target = OfficialLlama(official_config).eval()
    official_target.load_state_dict(model.state_dict(), strict=False)
    official_head = Model(
        plain, bias=False, total_tokens=TREE["total"], depth=TREE["depth"], top_k=TREE["width"]
    ).eval()
    del official_head.d2t, official_head.t2d
    missing = official_head.load_state_dict(
        {**head.state_dict(), "embed_tokens.weight": target.embedding}, strict=False
    )
    assert not missing.missing_keys, missing
    official_head.init_tree()
    official = EaModel.__new__(EaModel)
    nn.Module.__init__(official)
    official.base_model, official.ea_layer, official.use_eagle3, official.config = (
        official_target,
        official_head,
        True,
        config,
    )
    official.tokenizer = types.SimpleNamespace(eos_token_id=-1)
    drafter = drafts.drafter(head, target)
    for length in (64, 1024):
        for temperature in (0.0, 1.0):
            decoding = settings(Dynamic(**TREE), temperature)

            def theirs(number: int, tokens: int, length: int = length, temperature: float = temperature) -> int:
                set_seed(number)
                ids = prompt(number, length, config.vocab_size)[None]
                answer = official.eagenerate(ids, temperature=temperature, max_new_tokens=tokens - 2, max_length=2048)
                return answer.shape[1] - length

            ours = partial(our_answer, target, drafter, decoding, length)
            found = pairs((Counted(model.model), ours), (Counted(official_target.model), theirs), arguments)
            report(f"EAGLE-3's loop, {size}, T {temperature:g}, behind {length} tokens", found)


# 3. LANTERN's loop

CODES, NEIGHBOURS, GUIDANCE = 16384, 1000, 3.0


def official_lantern(size: str, arguments: argparse.Namespace) -> None:
    """EAGLE-2's tree over a text-conditional LlamaGen of 16 x 16 codes, exact and relaxed, at temperature 1."""
    official = _official_llamagen(size, arguments.lantern)
    sizes = SIZES[size]
    config = LlamaGenConfig(
        num_layers=4, num_heads=sizes["num_attention_heads"], dim=sizes["hidden_size"], caption_dim=64, init_std=0.06,
        ffn_hidden=sizes["intermediate_size"], vocab_size=CODES, grid=16, dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(arguments.seed)
    model = LlamaGen(config)
    model.reset_parameters(torch.Generator().manual_seed(arguments.seed))
    nn.init.normal_(model.output.weight, std=0.06)
    target = LlamaGenTarget(model, Guidance(GUIDANCE))
    drafts = EagleConfig(kind="eagle")
    head = drafts.build(target).eval().requires_grad_(False)
    drafter = drafts.drafter(head, target)
    table = torch.randint(CODES, (CODES, NEIGHBOURS + 1), generator=torch.Generator().manual_seed(0))
    official.nearest_latents = table.numpy().astype("uint16")
    relaxed = LanternConfig(kind="lantern", k=NEIGHBOURS, delta=0.1, residual="reference")
    for name, rule in (("exact", RULES["sampling"]), ("relaxed", Lantern(relaxed, NeighbourTable(table.int()), False))):
        decoding = Decoding(Dynamic(60, 4, 10), rule, Draw("top-k"), Warp(1.0, NEIGHBOURS), 1, ())

        def ours(number: int, tokens: int, decoding: Decoding = decoding) -> int:
            features = torch.randn(20, 64, generator=torch.Generator().manual_seed(number))
            uniforms = torch.Generator().manual_seed(number)
            return len(
                generate(target, drafter, ImageRequest(features, "1"), decoding.with_length(tokens), uniforms).tokens
            )

        def theirs(number: int, tokens: int, lantern: bool = name == "relaxed") -> int:
            set_seed(number)
            codes, _, _ = official.generate(
                [str(number)], max_length=tokens - 1, temperature=1.0, top_k=NEIGHBOURS, top_p=1.0, cfg=GUIDANCE,
                lantern=lantern, lantern_k=NEIGHBOURS, lantern_delta=0.1,
            )  # fmt: skip
            return codes.shape[1]

        found = pairs((Counted(model.norm), ours), (Counted(official.base_model.model), theirs), arguments)
        report(f"LANTERN's loop ({name}), {size}, {CODES} codes, top-k {NEIGHBOURS}", found)


class _Captions:
    """In the place of their T5: random features."""

    def __init__(self, **_: Any):
        pass

    def get_text_embeddings(self, prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """[1,120,64] of 20 tokens and padding, and their mask [1,120]."""
        features = torch.randn(1, 120, 64, generator=torch.Generator().manual_seed(int(prompts[0])))
        return features, (torch.arange(120) < 20).long()[None]


def _official_llamagen(size: str, folder: Path) -> Any:
    """Their model with random weights, of `size`."""
    _older_transformers(folder, "--lantern")
    # Their package imports all of its models, and some need what is not here: only LlamaGen's files are read.
    for name, path in (("models", folder / "models"), ("models.base_models.llamagen.t5", None)):
        sys.modules[name] = types.ModuleType(name)
        if path is not None:
            sys.modules[name].__path__ = [str(path)]
    sys.modules["models.base_models.llamagen.t5"].T5Embedder = _Captions  # type: ignore[attr-defined]
    from models.drafters.cnets_llamagen import Model  # type: ignore[import-not-found]
    from models.ea_model_llamagen import EaModel  # type: ignore[import-not-found]
    from models.kv_variants.modeling_llamagen_kv import LlamaForCausalLM as Generator  # type: ignore[import-not-found]

    config = LlamaConfig(
        **SIZES[size] | {"vocab_size": CODES}, num_hidden_layers=4, initializer_range=0.06, pad_token_id=None,
        tie_word_embeddings=False, max_position_embeddings=512,
    )  # fmt: skip
    more = {
        "block_size": 256, "num_classes": 1000, "input_type": "t2i", "cls_token_num": 120, "token_dropout_p": 0.0,
        "ffn_dropout_p": 0.0, "resid_dropout_p": 0.0, "class_dropout_p": 0.0, "caption_dim": 64, "rope_base": 10000,
        "n_positions": 512, "n_layers": 4, "pretraining_tp": 1, "rope_scaling": None, "rope_theta": 1e4,
        "qkv_bias": False, "num_labels": 2, "use_cache": True,
    }  # fmt: skip
    for name, value in more.items():
        setattr(config, name, value)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    base = Generator(config).eval()
    plain = types.SimpleNamespace(**config.to_dict() | more | {"num_hidden_layers": 1})
    head = Model(plain, bias=True, total_tokens=60, depth=4, top_k=10).eval()
    head.diff_device = False
    head.init_tree()
    official = EaModel.__new__(EaModel)
    nn.Module.__init__(official)
    official.base_model, official.ea_layer, official.config = base, head, config
    return official


def _older_transformers(folder: Path, option: str) -> None:
    """Make a clone importable: names of transformers 4 that its files import and that have gone since."""
    if not folder.is_dir():
        raise UserError(f"{folder} is no clone", where=option, hint="see the head of this script")
    import transformers.utils

    if not hasattr(transformers.utils, "LossKwargs"):
        vars(transformers.utils)["LossKwargs"] = dict
    sys.path.insert(0, str(folder))


def main() -> None:
    """Prints a section for docs/benchmarks.md."""
    parser = timing.options(__doc__)
    parser.add_argument("--eagle", type=Path, help="a clone of SafeAILab/EAGLE at cb7e084")
    parser.add_argument("--lantern", type=Path, help="a clone of jadohu/LANTERN at 3a56e45")
    parser.add_argument("--no-assisted", dest="assisted", action="store_false", help="leave out transformers")
    parser.add_argument("--sizes", nargs="+", default=[*SIZES], choices=[*SIZES])
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=14, help="of the longer run")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    timing.header(f"seed {arguments.seed}, float32, targets of 4 layers (EAGLE-3: 7), this thread's time")
    timing.table("peer", "bar", "cycle: ours / theirs [quartiles]", "tokens a second", "tau, ours and theirs", "pairs")
    for size in arguments.sizes:
        if arguments.assisted:
            assisted(size, arguments)
        if arguments.eagle:
            official_eagle(size, arguments)
        if arguments.lantern:
            official_lantern(size, arguments)


if __name__ == "__main__":
    main()
