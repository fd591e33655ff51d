"""The proposals that an evaluation opens, in a dry run: whose weights each has, and the cache that it keeps.

As `evaluate/drafters.py` opens them: weights that several share are held once, while each method with each of its
drafters has a cache of its own, which it keeps from its last request.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from ...data.dataset import ConversationData
from ...data.pictures.visual_budget import visual_tokens
from ...models.drafters import members_of
from ...models.drafters.base import DrafterConfig
from ...models.drafters.head_graphs import COUNTS, MOST_EXPANSIONS
from ...models.drafters.lvlm import LvlmConfig
from ...models.families.load import TargetConfig, target_config
from ...models.families.memory import BYTES, cache_bytes, weight_bytes
from ...models.families.table import family_of
from ...models.hub import pinned_config
from ...models.targets.base import language_shape
from ...models.targets.verification import lengths_up_to
from ..evaluate.evaluate_settings import EvaluateSettings
from ..evaluate.methods import Method, decoding_with
from ..evaluate.requests import frames_in
from ..run.stage import Planned
from .auto_dtypes import held_bytes, held_dtype
from .passes import Pass, moment

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Proposal:
    """One of them.

    Args:
        config: the drafter's section, as it decodes.
        weights: equal for proposals that share their weights.
        nodes: most of its method's trees, without the root.
        chain: drafted tokens of a chain that is one graph; None: it is none.
    """

    config: DrafterConfig
    weights: Hashable
    nodes: int
    chain: int | None = None

    @property
    def is_unknown(self) -> bool:
        """Whether it is a published draft LVLM whose config is neither pinned nor on this disk."""
        one = self.config
        if not isinstance(one, LvlmConfig) or one.path is None or (one.language_model and one.vision_tower):
            return False
        return not Path(one.path).is_dir() and pinned_config(one.path) is None


def proposals(plan: Planned, wanted: Callable[[Method], bool] = lambda method: True) -> list[Proposal]:
    """The proposals of an evaluation's methods, members of ensembles among them."""
    opened = []
    for name, method in plan.stage.methods.items():
        if wanted(method):
            nodes, chain = method.policy(grid=1).max_nodes, method.chain if plan.stage.graphs.draft else None
            for config, weights in _of_method(plan, name, method):
                opened.append(Proposal(config, weights, nodes, chain))
    return opened


def _of_method(plan: Planned, name: str, method: Method) -> Iterator[tuple[DrafterConfig, Hashable]]:
    """(section as it decodes, key of its weights) of each drafter of a method."""
    for maker, section in _sources(plan, method):
        config = decoding_with(section, method.settings, f"stages.{plan.name}.methods.{name}")
        if not config.mixed:
            yield config, _key(maker, section, config)
        for member in members_of(config):
            if not isinstance(member, str):
                yield member, _key(None, member)
            elif member in plan.stage.methods:
                yield from _of_method(plan, member, plan.stage.methods[member])
            else:
                owner, own = _named(plan, member)
                yield own, _key(owner, own)


def _sources(plan: Planned, method: Method) -> Iterator[tuple[str | None, DrafterConfig]]:
    """(stage that trained it, section) of each drafter; None: no stage did."""
    if method.names:
        yield from (_named(plan, name) for name in method.names)
    elif method.section is not None:
        yield None, method.section
    else:
        maker = plan.inputs.get("drafter")
        section = plan.recipe.drafter if maker is None else _named(plan, maker)[1]
        if section is not None:
            yield maker, section


def _named(plan: Planned, name: str) -> tuple[str | None, DrafterConfig]:
    if name in plan.stage.drafters:
        return None, plan.stage.drafters[name]
    stage = plan.recipe.stages.get(name)
    return name, cast(DrafterConfig, (stage and stage.own_drafter) or plan.recipe.drafter)


def _key(maker: str | None, section: DrafterConfig, config: DrafterConfig | None = None) -> Hashable:
    """Settings of decoding share weights, but rotary positions of three rows are part of a head's module."""
    shared = section.model_dump_json(by_alias=True, exclude=set(section.decoding_settings))
    return maker, shared, dict(config or section).get("positions") == "mrope"


@dataclass(frozen=True)
class Sizes:
    """Bytes of a proposal on the fullest GPU.

    Args:
        name: of its weights, in a dry run.
        moment: what lives for a moment while it reads a prompt.
        is_targets: the cache is the target's own, and lies where its layers do.
        graphs: what CUDA graphs of its passes add to the cache.
    """

    name: str
    weights: float
    cache: float
    moment: float = 0.0
    is_targets: bool = False
    graphs: float = 0.0


def sizes_of(one: Proposal, stage: EvaluateSettings, config: PreTrainedConfig, section: TargetConfig) -> Sizes:
    """The sizes of a proposal beside a language target.

    Args:
        config: the target's model config.
        section: the target's.
    """
    drafter, positions = one.config, stage.capacity + one.nodes
    if drafter.whole_model is not None:
        return _whole_model(drafter.whole_model, _left(drafter, stage, config, positions), config, section)
    if isinstance(drafter, LvlmConfig):
        return _draft_lvlm(one, drafter, positions, config, section)
    shape, width = language_shape(config.get_text_config()), held_bytes(section)
    weights = float(width * sum(drafter.count(shape).values()))
    numbers, beyond = drafter.cached_numbers(shape)
    place = float(numbers * width)
    cache, graphs = (positions + beyond) * place, 0.0
    if (
        drafter.held_visual is not None
        and stage.graphs.head
        and section.device_map is None
        and section.tensor_parallel_size == 1
    ):
        lengths = lengths_up_to((stage.graphs.length or stage.capacity) + one.nodes + COUNTS[-1])
        # Requests that are longer than the graphs are made for have a cache of their own.
        graphs = lengths[-1] * place - (cache if positions + COUNTS[-1] <= lengths[-1] else 0.0)
        # What each graph proposes, in float32, if every length and number of nodes comes up; and the outputs of a tree.
        graphs += 4.0 * shape.vocab_size * len(lengths) * sum(count for count in COUNTS if count <= one.nodes)
        graphs += (1 + MOST_EXPANSIONS + COUNTS[-1]) * shape.hidden_size * width
    return Sizes("drafters", weights, cache, graphs=graphs)


def _left(drafter: DrafterConfig, stage: EvaluateSettings, config: PreTrainedConfig, positions: int) -> int:
    """Positions of the longest pruned prompt with its answer, where the recipe says how long its clips are."""
    lengths = [length for listed in stage.listed_lengths().values() for length in listed]
    data = max(stage.data, key=lambda data: data.max_length)
    visual = max((_visual(length, data, config) for length in lengths), default=0)
    visual = min(visual, data.max_length)
    return positions - visual + drafter.num_kept(visual)


def _visual(length: int | str, data: ConversationData, config: PreTrainedConfig) -> int:
    """Visual tokens of a clip of so many frames, at most, or of the tokens that the text says."""
    if (frames := frames_in(length)) is None:
        return visual_tokens(str(length))
    read = family_of(config).pictures
    assert read is not None, "a tower that no family has"
    return read.of_frames(config, frames, data.video.max_pixels or 0)  # null: nobody says, and nothing is taken off


def _whole_model(
    model: TargetConfig | Literal["target"], positions: int, config: PreTrainedConfig, section: TargetConfig
) -> Sizes:
    """Return the sizes of a whole model that drafts: `model` is its section, or "target"."""
    if model == "target":
        own = cache_bytes(config, held_dtype(section), positions, section.tensor_parallel_size)
        return Sizes("sibling", 0.0, own, is_targets=True)
    dtype = held_dtype(model, key="drafter.model")
    own_config, size = target_config(model, None, network=False), model.tensor_parallel_size
    made = moment(own_config, model, dtype, Pass(positions, model.prefill_chunk))
    weights = sum(weight_bytes(own_config, dtype, size).values())
    return Sizes("sibling", weights, cache_bytes(own_config, dtype, positions, size), made)


def _draft_lvlm(
    one: Proposal, drafter: LvlmConfig, positions: int, config: PreTrainedConfig, section: TargetConfig
) -> Sizes:
    """A cache for each mode that it mixes, padded to the longest; the prompts run in caches that are joined then."""
    own, dtype = drafter.config_beside(config), drafter.dtype or held_dtype(section)
    rows = len(drafter.drafting_mode.members)
    cache = rows * cache_bytes(own, dtype, positions)
    made = moment(own, None, dtype, Pass(positions))
    if rows > 1 or one.chain is not None:
        made = max(made, cache)
    if one.chain is not None:  # the graph's buffers: scores of each mode, and mixed
        cache += BYTES["float32"] * one.chain * (rows + 1) * own.get_text_config().vocab_size
    return Sizes("draft LVLMs", sum(weight_bytes(own, dtype).values()), cache, made)
