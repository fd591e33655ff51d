#!/usr/bin/env python
"""tau after equal CPU minutes: every training of a recipe gets the steps that fit, several seeds, one evaluation.

    scripts/minutes.py target.path=weights/smollm2 --minutes 8 --seeds 0 1 2    # settings come first
    scripts/minutes.py --minutes 2 --rates ours=2e-3,4e-3 specforge=4e-4    # these rates beside a recipe's own

A step's CPU time is that of 25 steps less that of 5, over 20, in processes of one thread: without start, reading,
validation and what comes once. What ran is kept: the same command goes on, and more minutes, seeds and rates add to it.
"""

import argparse
import itertools
import json
import math
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from draftsmith.core.batch import Batch, StepLoss
from draftsmith.core.files import read_json, read_yaml
from draftsmith.core.json_types import JsonObject
from draftsmith.core.states import TargetStates
from draftsmith.models.drafters.base import HeadObjective
from draftsmith.models.drafters.draft_vocabulary import lm_head_rows
from draftsmith.models.drafters.eagle3 import Eagle3Config, Eagle3Head
from draftsmith.models.drafters.head_training import HeadTraining, TokenTerms
from draftsmith.models.targets.base import Target
from draftsmith.recipes.config.load import read_words
from torch import Tensor, nn
from transformers import LlamaConfig

TIMED = (5, 25)  # steps
DRAFTED = {"": {"kind": "chain", "gamma": 5}, ", tree of 24": "24-4-6"}


def run(path: Path, stages: Sequence[str], settings: Sequence[str]) -> float:
    """Run stages of the recipe in one process of one thread; the CPU seconds that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = [f"recipe={path}", f"stages=[{','.join(stages)}]", *settings]
    subprocess.run([sys.executable, "-m", "draftsmith", *words], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def added(path: Path, recipe: str, stages: dict[str, Any]) -> set[str]:
    """Write the recipe with these stages behind those that it has; names of those that were other ones before."""
    own = read_words([f"recipe={recipe}"]).tree["stages"]
    gone = dict.fromkeys(name for name, stage in own.items() if stage["kind"] in ("train", "evaluate"))
    before = read_yaml(path, dict[str, Any], hint="remove it")["stages"] if path.is_file() else gone
    changed = {name for name, stage in stages.items() if before.get(name, stage) != stage}
    kept = {name: stage for name, stage in before.items() if name not in changed}
    path.write_text(yaml.safe_dump({"extends": recipe, "stages": kept | stages}, sort_keys=False))
    return changed


def variants(
    recipe: str, names: Sequence[str] | None, rates: Sequence[str], *, peers: bool
) -> dict[str, dict[str, Any]]:
    """Name -> train stage, of each recipe at its own rate and at the others that were asked for; with `peers` also one
    whose forward and loss are speculators' code.
    """
    own = read_words([f"recipe={recipe}"]).tree["stages"]
    result = {name: stage for name, stage in own.items() if stage["kind"] == "train" and (not names or name in names)}
    if peers:
        theirs = {"kind": "draftsmith.scripts.minutes:SpeculatorsEagle3"}
        result["speculators_code"] = own["speculators"] | {"drafter": own["speculators"]["drafter"] | theirs}
    for name, _, values in (rate.partition("=") for rate in rates):
        for lr in values.split(","):
            result[f"{name}-{lr}"] = own[name] | {"optim": own[name]["optim"] | {"lr": float(lr)}}
    return result


def seconds(path: Path, name: str, stage: dict[str, Any], recipe: str, settings: Sequence[str]) -> float:
    """CPU seconds of a step, which are measured once."""
    kept = path.with_name("seconds.json")
    known = read_json(kept, dict[str, float], hint="remove it") if kept.is_file() else {}
    if name not in known:
        timed = {f"{name}_{steps}_steps": stage | {"steps": steps} for steps in TIMED}
        added(path, recipe, timed)
        few, many = (run(path, [one], settings) for one in timed)
        known[name] = (many - few) / (TIMED[1] - TIMED[0])
        kept.write_text(json.dumps(known))
    return known[name]


def table(output: Path, minutes: Sequence[float]) -> list[list[str]]:
    """A line for each training: tau with its interval after each number of minutes, and the minutes until the last tau
    of the first one, between measured ones on a line over their logarithms.
    """
    cells = {f"{m:g}": {cell["method"]: cell for cell in read_json(output / f"chains_{m:g}" / "report.json", JsonObject,
             hint="let it end")["cells"]} for m in minutes}  # fmt: skip
    longest = cells[f"{minutes[-1]:g}"]
    goal = next(iter(longest.values()))["tau"]
    rows = [["training", *(f"{m:g} minutes: tau [95%]" for m in minutes), f"minutes until {goal:.2f}"]]
    for name in longest:
        known = [(m, cells[f"{m:g}"][name]) for m in minutes if name in cells[f"{m:g}"]]
        until = "more" if known[-1][1]["tau"] < goal else f"{known[0][0]:g}, or fewer"
        for (m, one), (longer, other) in itertools.pairwise(known):
            if one["tau"] < goal <= other["tau"]:
                share = (goal - one["tau"]) / (other["tau"] - one["tau"])
                until = f"{math.exp(math.log(m) + share * math.log(longer / m)):.1f}"
        taus = ["{tau:.2f} [{0:.2f}, {1:.2f}]".format(*one["tau_interval"], **one) for _, one in known]
        rows.append([name, *[""] * (len(minutes) - len(taus)), *taus, until])
    return rows


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="smollm2/minutes")
    parser.add_argument("--minutes", nargs="+", type=float, default=[8.0], help="CPU minutes of a training")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--recipes", nargs="+", help="of its train stages, these")
    parser.add_argument("--rates", nargs="+", default=[], metavar="NAME=LR,LR", help="further rates of a recipe")
    parser.add_argument(
        "--peers",
        action="store_true",
        help="also speculators' own code, installed as tests/models/test_speculators.py says",
    )
    parser.add_argument("--output", type=Path, default=Path("runs/smollm2-minutes"))
    options, settings = parser.parse_known_args(arguments)
    settings = [f"output={options.output}", *settings]
    options.output.mkdir(parents=True, exist_ok=True)
    own = read_words([f"recipe={options.recipe}"]).tree["stages"]
    first = [name for name, stage in own.items() if stage["kind"] not in ("train", "evaluate")]
    path = options.output / "minutes.yaml"
    added(path, options.recipe, {})
    run(path, first, settings)
    known = [name for name, stage in own.items() if stage["kind"] == "train"]
    asked_for = [*(options.recipes or ()), *(rate.partition("=")[0] for rate in options.rates)]
    if unknown := [name for name in asked_for if name not in known]:
        parser.error(f"{options.recipe} trains no {unknown[0]}: {', '.join(known)}")
    chosen = variants(options.recipe, options.recipes, options.rates, peers=options.peers)
    costs = {name: seconds(path, name.partition("-")[0], stage, options.recipe, settings)
             for name, stage in chosen.items()}  # fmt: skip
    (asked,) = (stage for stage in own.values() if stage["kind"] == "evaluate")
    stages: dict[str, Any] = {}
    for m in sorted(options.minutes):
        methods: dict[str, Any] = {}
        for name, stage in chosen.items():
            steps = max(1, round(60 * m / costs[name]))
            heads = [f"{name}_{m:g}_{seed}" for seed in options.seeds]
            stages |= {head: stage | {"steps": steps, "seed": seed, "validation": {"every": steps, "max_samples": 50}}
                       for head, seed in zip(heads, options.seeds, strict=True)}  # fmt: skip
            methods |= {f"{name}{ends}": {"drafters": heads, "tree": tree} for ends, tree in DRAFTED.items()}
            print(f"{name}, {m:g} minutes: {steps} steps of {costs[name]:.2f} s", flush=True)
        begins, *others = chosen
        contrasts = {f"{begins} less {name}": [begins, name] for name in others}
        stages[f"chains_{m:g}"] = asked | {"methods": methods, "contrasts": contrasts}
    changed = added(path, options.recipe, stages)  # an evaluation of more methods, which is made anew
    for name in stages:
        run(path, [name], [*settings, *([f"restart={name}"] if name in changed else [])])
    for row in table(options.output, sorted(options.minutes)):
        print("|", " | ".join(row), "|")


# Table B: what another toolkit trains


class SpeculatorsEagle3(Eagle3Config):
    """An EAGLE-3 head whose training forward and loss are speculators' own code (0.9.0), on our states and by our
    trainer: `kind: "draftsmith.scripts.minutes:SpeculatorsEagle3"`, keys as of `eagle3`. Passes and decay are
    `mtp_steps` and `objective.decay`.

    tests/models/test_speculators.py says how to install that package, and finds its gradients equal to ours. Its model
    has our head's parameters, so that optimizer, checkpoints, decoding and exports are ours (torch's Muon and AdamW are
    theirs, too). It runs eagerly on one row of all samples, as on a CPU it must: its trainer, flex attention and fused
    losses need a GPU.
    """

    kind: str  # type: ignore[assignment]

    def training_objective(self, module: nn.Module, target: Target, settings: HeadObjective | None = None) -> nn.Module:
        return _Theirs(cast(Eagle3Head, module), target, self, settings)


class _Theirs(HeadTraining):
    """`HeadTraining` by their forward. What is held out is measured by ours, so that numbers compare."""

    def __init__(self, head: Eagle3Head, target: Target, config: Eagle3Config, settings: HeadObjective | None):
        super().__init__(head, target, config, settings)
        # No module of this one: its parameters are the head's.
        self.theirs: tuple[Any] = (_model(head, target, config),)

    def forward(self, batch: Batch, states: TargetStates) -> StepLoss:
        if not self.training:
            return super().forward(batch, states)
        from speculators.losses import resolve_loss_config

        assert states.feature is not None
        model, dtype = self.theirs[0], self.head.dtype
        rows: list[list[Tensor]] = []
        for row, count in enumerate(batch.attention_mask.sum(1).tolist()):
            # Their shift_batch: token j + 1 beside the states at j, compared with the state at j + 1.
            joined = torch.cat([states.layers[layer][row, : count - 1] for layer in self.reads.state], -1)
            rows.append([batch.ids[row, 1:count], joined.to(dtype), states.feature[row, 1:count].to(dtype),
                         batch.loss_mask[row, 1:count], torch.full((count - 1,), row),
                         torch.arange(1, count)])  # fmt: skip
        ids, joined, goal, mask, documents, positions = (torch.cat(part)[None] for part in zip(*rows, strict=True))
        _, loss, metrics = model(
            joined, ids, documents, loss_mask=mask, position_ids=positions, verifier_last_hidden_states=goal,
            ttt_steps=self.num_passes, ttt_step_loss_decay=self.objective.decay or 1.0,
            loss_config=resolve_loss_config("kl_div", "eager"),
        )  # fmt: skip
        count = mask.sum()
        known = metrics["full_acc_0_sum"].detach().float()
        last = metrics[f"full_acc_{self.num_passes - 1}_sum"].detach().float()
        return StepLoss(loss * count, count, dict(zip(TokenTerms.metrics, (known, known, known, last), strict=True)))


def _model(head: Eagle3Head, target: Target, config: Eagle3Config) -> Any:
    """Their model with the head's parameters and the target's tables."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    shape, ids = head.shape, head.draft_ids
    assert ids is not None
    layer = LlamaConfig(
        hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size, num_hidden_layers=1,
        num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_kv_heads, head_dim=shape.head_dim,
        vocab_size=shape.vocab_size, rms_norm_eps=shape.norm_eps, pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
    )  # fmt: skip
    layer._attn_implementation = "eager"
    proposal = GreedyTokenProposalConfig(speculative_tokens=config.mtp_steps + 1)
    model = Eagle3DraftModel(Eagle3SpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=len(ids), norm_output=config.norm_output,
        norm_before_residual=config.norm_before_residual, norm_before_fc=config.norm_before_fc,
        eagle_aux_hidden_state_layer_ids=list(config.layers_of(target.shape)),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3", proposal_methods=[proposal], default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    ))  # fmt: skip
    for name, parameter in head.named_parameters():
        place, _, last = name.replace("midlayer.", "layers.0.").rpartition(".")
        setattr(model.get_submodule(place), last, parameter)
    model.verifier_norm = nn.Identity()  # our states are normed
    model.embed_tokens.weight = nn.Parameter(target.embedding.detach(), requires_grad=False)
    rows = lm_head_rows(target, ids)
    model.verifier_lm_head.weight = nn.Parameter(rows.to(target.embedding.dtype), requires_grad=False)
    return model


if __name__ == "__main__":
    main(sys.argv[1:])
