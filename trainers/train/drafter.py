"""A drafter of a `train` stage while it trains beside its target: weights, measured tau, best and last result."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...core import ranks
from ...core.errors import UserError
from ...core.files import read_json, write_whole
from ...core.import_paths import code_of
from ...core.json_types import JsonMapping, JsonObject
from ...data.loader import StepBatches
from ...eval.loop import Decoding, Generation, generate
from ...eval.policies import Draw
from ...eval.rules import RULES
from ...models.decoding.warp import Warp
from ...models.drafters.base import CountTokens, DrafterConfig, HeadObjective, TargetIdentity
from ...models.drafters.draft_vocabulary import DraftVocabulary
from ...models.drafters.head_files import check_vocabulary
from ...models.drafters.outside import find_start, load_start
from ...models.formats.heads import load_published
from ...models.targets.base import Target
from ..run.context import Context
from .engine import Engine
from .fit import SCRATCH
from .loop import Source, Validate
from .settings import HeadTrainSettings
from .validate import held_out_scores

SCORE = "score.json"  # beside the best weights
_AGAIN = "restart the stage (restart=STAGE): without it nobody knows how good the weights beside it are"
_EMPTY = "is the template right? Does the target answer the questions of `decoding`?"


@dataclass(frozen=True)
class Requests:
    """What a decoding check decodes: `request(number)` is what the target is asked; `keep(temperature, step, tokens of
    every request)` gives further values to log (pictures), on rank 0.
    """

    count: int
    request: Callable[[int], Any]
    max_new_tokens: int
    eos_ids: tuple[int, ...]
    temperatures: list[float]
    grid: int | None = None
    keep: Callable[[float, int, list[list[int]]], Mapping[str, Path]] = lambda temperature, step, tokens: {}


@dataclass(frozen=True)
class _Score:
    score: float
    step: int


@dataclass(frozen=True)
class Best:
    """The best weights by each score, in folders `best-NAME` of `folder`, which `save(head, folder, step)` writes."""

    folder: Path
    save: Callable[[nn.Module, Path, int], None]

    def keep(self, scores: Mapping[str, float | None], step: int, head: Callable[[], nn.Module]) -> None:
        """Keep the weights where a score is the best so far (all ranks call); None was not measured at this step.
        `head` makes a copy of the weights, whole on every rank.
        """
        for name, score in scores.items():
            mark = self.folder / f"best-{name}" / SCORE
            if score is None:
                continue
            # Rank 0 reads the score and broadcasts the decision, since another rank might read a half-written file.
            is_better = ranks.is_main() and not math.isnan(score)
            if is_better and mark.is_file():
                is_better = score > read_json(mark, _Score, hint=_AGAIN).score
            if not ranks.broadcast(is_better):
                continue
            weights = head()
            if ranks.is_main():
                # The score goes first and comes last: where it stands, the weights beside it are whole and its own.
                mark.unlink(missing_ok=True)
                self.save(weights, mark.parent, step)
                write_whole(mark, json.dumps({"score": score, "step": step, "of": name}).encode())
        ranks.barrier()

    def of(self, name: str) -> tuple[Path, float, int]:
        """Folder, score and step of the best by `name`."""
        folder = self.folder / f"best-{name}"
        best = read_json(folder / SCORE, _Score, hint=_AGAIN)
        return folder, best.score, best.step


def _with_lm_head(head: nn.Module, context: Context) -> Any:
    if isinstance(head, DraftVocabulary) and head.lm_head is not None:
        return head
    raise UserError(
        "this drafter has no LM head of its own", key=f"stages.{context.name}.lm_head",
        hint="leave it out, or give the drafter a draft_vocab_size",
    )  # fmt: skip


class TrainedDrafter:
    """`module` is what the engine trains: `forward(batch, states)`. Its `identity` of the target and the
    `manifest_fields` go into the manifest; without `requests` no decoding is checked; without an `objective` the loss
    is the drafter's own.
    """

    def __init__(
        self,
        stage: HeadTrainSettings,
        context: Context,
        target: Target,
        identity: TargetIdentity,
        *,
        manifest_fields: JsonMapping,
        requests: Requests | None,
        count_tokens: CountTokens | None = None,
        objective: HeadObjective | None = None,
    ):
        assert context.drafter is not None
        self.stage, self.context, self.target, self.identity = stage, context, target, identity
        self.config: DrafterConfig = context.drafter
        self.manifest_fields, self.requests = dict(manifest_fields), requests
        self.config.check(target.shape)
        head = self._start(count_tokens)
        if stage.lm_head == "frozen":
            _with_lm_head(head, context).lm_head.requires_grad_(False)
        self.module = self.config.training_objective(head, target, objective)
        self._best = Best(context.folder, lambda head, folder, step: self._save(head, folder, step))

    def _start(self, count_tokens: CountTokens | None) -> nn.Module:
        """A drafter outside the run (`from: {path}`), an earlier stage's, the recipe's published one, or fresh weights;
        `from: scratch` takes none of them.
        """
        folder, outside = self.context.inputs.get("drafter"), self.stage.outside
        if outside is None and folder is None and (not self.config.provides() or self.stage.from_stage == SCRATCH):
            head = self.config.build(self.target, count_tokens=count_tokens)
            if self.stage.lm_head is not None:
                _with_lm_head(head, self.context).begin_as(self.target)
            return head
        if self.stage.lm_head == "from_target":
            raise UserError(
                "lm_head: from_target begins a draft from scratch, and this stage goes on with one",
                key=f"stages.{self.context.name}.lm_head", hint="leave it out, or take frozen",
            )  # fmt: skip
        if outside is not None:
            self.context.say(f"{self.context.name}: starts from {outside.path}")
            folder = find_start(outside.path, outside.revision)
            head = load_start(
                self.config, folder, self.target, self.identity, load_published, other_target=outside.other_target
            )
        else:
            if folder is None:
                self.context.say(f"{self.context.name}: starts from {self.config.display_name}")
            head = self._load(folder)
        check_vocabulary(self.config, head, self.target, folder or Path(self.config.display_name))
        return head

    def decode(self, engine: Engine, step: int) -> dict[str, float | Path]:
        """tau at each temperature over the requests, which the ranks share. Stops between two requests."""
        settings, requests = self.stage.decoding, self.requests
        assert settings is not None and requests is not None
        proposal = self.config.drafter(self._copy(engine), self.target)
        values: dict[str, float | Path] = {}
        for temperature in requests.temperatures:
            decoding = Decoding(
                settings.tree.build(grid=requests.grid, seed=self.context.seed),
                RULES["greedy" if temperature == 0 else "sampling"],
                Draw("top-k"),
                Warp(temperature, settings.top_k, settings.top_p),
                requests.max_new_tokens,
                requests.eos_ids,
            )
            mine: list[tuple[int, Generation]] = []
            with self.context.stop.together():
                for number in self.context.stop.watch(ranks.share(requests.count), "in a decoding check"):
                    uniforms = torch.Generator().manual_seed(self.context.seed * 1_000_003 + number)
                    mine.append((number, generate(self.target, proposal, requests.request(number), decoding, uniforms)))
            counts = [(n, len(g.cycles), sum(c.num_emitted for c in g.cycles), g.tokens) for n, g in mine]
            every = sorted(row for share in ranks.gather(counts) for row in share)
            if cycles := sum(row[1] for row in every):
                values[f"tau_T{temperature:g}"] = sum(row[2] for row in every) / cycles
            if ranks.is_main():
                values |= requests.keep(temperature, step, [row[3] for row in every])
        if not any(name.startswith("tau_") for name in values):
            problem = "every answer of the decoding check ended with its first token, so tau was not measured"
            if self.stage.select == "tau":  # which would be chosen at the stage's end
                raise UserError(problem, key=f"stages.{self.context.name}.select", hint=_EMPTY)
            self.context.say(f"{self.context.name}: {problem}: {_EMPTY}")
        return values

    def validation(
        self, held_out: Callable[[], Iterable[StepBatches]] | None, source: Source, total: int
    ) -> Validate | None:
        """Held-out loss and accuracies over passes that `held_out` makes, with the target's states from `source`, and
        now and then tau in a real decoding loop.
        """
        decoding, stop = self.stage.decoding, self.context.stop
        if held_out is None and decoding is None:
            return None

        def validate(engine: Engine, step: int) -> JsonObject:
            values: JsonObject = {}
            if held_out is not None:
                values |= held_out_scores(engine, held_out(), lambda batch: engine(batch, source(batch)), stop)
            if decoding is not None and (step % decoding.every == 0 or step == total):
                values |= self.decode(engine, step)
            taus = [value for name, value in values.items() if name.startswith("tau_")]
            scores = {name: values.get(f"val_{name}") for name in ("top1", "top3")}
            scores["tau"] = sum(taus) / len(taus) if taus else None
            self._best.keep(scores, step, lambda: self._copy(engine))
            return values

        return validate

    def finish(self, engine: Engine, total: int, seed: int) -> None:
        """Write the stage's result: the last weights, or the best by the recipe's choice."""
        head = self._copy(engine)
        step, chosen = total, self.stage.select
        if chosen != "last":
            folder, score, step = self._best.of(chosen)
            head = self._load(folder)
            self.context.say(f"{self.context.name}: weights of step {step}, best {chosen} {score:.4f}")
        if ranks.is_main():
            self._save(head, self.context.folder, step, seed=seed, selected=chosen)
        ranks.barrier()

    def _load(self, folder: Path | None) -> nn.Module:
        return self.config.load(folder, self.target, dtype=torch.float32, identity=self.identity)

    def _save(self, head: nn.Module, folder: Path, step: int, **more: object) -> None:
        context = self.context
        training = {"stage": context.name, "step": step, "fingerprint": context.fingerprint}
        if ":" in self.config.kind:  # of another package
            more["code"] = code_of(self.config.kind)
        manifest = self.config.manifest(
            self.target, self.identity, training=training, command=context.command, **self.manifest_fields, **more
        )
        self.config.save(head, folder, manifest)

    def _copy(self, engine: Engine) -> nn.Module:
        """Whole on every rank and outside the engine."""
        head: Any = engine.module.head
        with engine.full_weights():
            state = {name: value.detach().clone() for name, value in head.state_dict().items()}
        # The copy's first weights are drawn and thrown away; training must not notice, a resumed run makes fewer.
        with torch.random.fork_rng(devices=[]):
            copy = self.config.copy_of(head, state)
        return copy.to(self.target.device, self.target.embedding.dtype).requires_grad_(False).eval()
