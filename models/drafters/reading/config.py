"""Settings of the heads that read a language model's states: Sparrow, MSD, ViSpec, HiViS, EAGLE and EAGLE-3.

They share one layer and differ in what stands in a visual slot, so that each ablation of Sparrow's Table 6 is a
setting: MTP is `mtp_steps`, IVSB is `ivsb`, VATA is `vata`. Numbers follow the published code where there is one.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ....core.section import Section
from ...losses import Divergence

# What a visual slot is to the layer: absent, a state that enters it directly, a run's few compressed vectors, an
# ordinary slot (embedding and true state), or one whose state half is a middle layer's.
Visual = Literal["none", "direct", "compressed", "read", "middle"]
# What takes an embedding's place at a visual token: its placeholder's own row, as vLLM embeds it, or the projected
# picture, as SGLang does.
Image = Literal["placeholder", "projected"]


class ReadingObjective(Section):
    """Weights of the terms at each trained slot; a term of weight 0 is not computed."""

    # SmoothL1 between the predicted and the true state, mean over the width.
    feature: float = Field(0.0, ge=0)
    # Divergence between the two distributions that the LM head makes of them; lk_alpha and lk_hybrid are the LK losses.
    token: float = Field(0.0, ge=0)
    token_divergence: Divergence = "soft_ce"
    # Sum of |Q - P| over the vocabulary, at most 2.
    l1: float = Field(0.0, ge=0)
    # ListMLE over the target's likeliest tokens.
    listmle: float = Field(0.0, ge=0)
    # How many of them.
    top: int = Field(10, ge=1)
    # Weight of pass s is decay^s, as in EAGLE-3 (0.8); null: the mean over passes.
    decay: float | None = Field(None, gt=0, le=1)
    # Passes after the first in this stage; null: the head's mtp_steps. 0 for a stage of plain text.
    mtp_steps: int | None = Field(None, ge=0)
    # Width of the uniform noise on true states at 512 places; shorter samples get more of it (EAGLE: 0.2).
    noise: float = Field(0.2, ge=0)
    # Slots whose vocabulary is projected at once: about 40 bytes for each slot, pass and id.
    chunk: int = Field(128, ge=1)

    @model_validator(mode="after")
    def _some_term(self) -> ReadingObjective:
        if not any((self.feature, self.token, self.l1, self.listmle)):
            raise ValueError("no term has a weight; give feature, token, l1 or listmle")
        return self


# ViSpec's two stages, which Sparrow follows; EAGLE's, which MSD follows; EAGLE-3's.
TEXT_STAGE = ReadingObjective(feature=1.0, token=0.1, listmle=0.01, mtp_steps=0)
VISUAL_STAGE = ReadingObjective(l1=10.0, listmle=0.1)
EAGLE_LOSS = ReadingObjective(feature=1.0, token=0.1)
EAGLE3_LOSS = ReadingObjective(token=1.0, decay=0.8, noise=0.0)


class _Reading(Section):
    """What all kinds have."""

    # Directory or Hub id of a trained head, which a train stage starts from unless it says `from: scratch`.
    path: str | None = None
    revision: str | None = None
    # mha gives each query head its own keys and values (ViSpec): 8 times the draft's cache on Qwen2.5-VL.
    kv_heads: Literal["target", "mha"] = "target"
    # Null: as the target's.
    qkv_bias: bool | None = None
    intermediate_size: int | None = Field(None, ge=1)
    norm_eps: float | None = Field(None, gt=0)
    rope_theta: float | None = Field(None, gt=0)
    # A target's stretched rotation (YaRN, llama3, linear): target copies it, plain has its base alone, as most of the
    # published heads.
    rope: Literal["target", "plain"] = "target"
    # Places of slots in decoding: compact counts what the drafter holds, flat counts the prompt's places, mrope takes
    # the target's own (M-RoPE targets alone). flat and mrope leave a gap where visual slots are dropped.
    positions: Literal["compact", "flat", "mrope"] = "flat"
    # Share of samples in training whose text after the last picture stands a random distance 0 to `gap` behind the
    # text before it: the head then does not depend on the choice above.
    gap_share: float = Field(0.0, ge=0, le=1)
    gap: int = Field(32768, ge=1)
    # Passes after the first that read the head's own outputs (multi-token prediction); 0: none.
    mtp_steps: int = Field(0, ge=0)
    # full: a pass sees its own keys alone. ttt: older slots keep their true states, as they do in decoding (EAGLE-3).
    mtp_attention: Literal["full", "ttt"] = "full"
    # Which states a further pass replaces: after_text those behind a text slot, all every one but the first.
    replace: Literal["after_text", "all"] = "after_text"
    # What is trained for; null: the kind's own loss.
    objective: ReadingObjective | None = None

    @property
    def loss(self) -> ReadingObjective:
        return self.objective or self._own_loss

    @property
    def _own_loss(self) -> ReadingObjective:
        return EAGLE_LOSS

    def visual(self, *, training: bool) -> Visual:
        """What stands in a visual slot."""
        raise NotImplementedError

    def provides(self) -> set[str]:
        """Things that need no stage."""
        return set() if self.path is None else {"drafter"}


class _StateReading(_Reading):
    """Heads whose fc joins an embedding and a state."""

    fc_bias: bool = True
    # A norm before the attention; null: for Qwen alone, as MSD's published heads have it.
    input_norm: bool | None = False
    # What enters as the state: the feature, which feeds the target's LM head, or the state before its last layer
    # (Sparrow's text says second-to-last). What comes out is a feature in both cases.
    state: Literal["feature", -2] = "feature"


class _DirectReading(_StateReading):
    """Heads that hold visual slots whose states enter the layer directly."""

    # Text-only window: decoding holds no visual slot at all. Nothing need be trained for it.
    vata: bool = False
    # Share of visual slots that decoding keeps (without vata), by the attention they get in one layer of the target
    # from the prompt's last token or from all its text.
    visual_share: float = Field(1.0, ge=0, le=1)
    share_by: Literal["last", "text"] = "last"
    # Null: half of the target's layers.
    share_layer: int | None = Field(None, ge=0)
    # Share that training keeps, drawn at random: states carry no attention. 0 trains without any.
    train_visual_share: float = Field(1.0, ge=0, le=1)

    def visual(self, *, training: bool) -> Visual:
        if training:
            return "direct" if self.train_visual_share else "none"
        return "direct" if self.visual_share and not self.vata else "none"


class SparrowConfig(_DirectReading):
    """Sparrow: visual slots are middle states in training, and absent in decoding."""

    kind: Literal["sparrow"]
    # Present: middle states are not normed.
    input_norm: bool | None = True
    vata: bool = True
    positions: Literal["compact", "flat", "mrope"] = "compact"
    gap_share: float = Field(0.5, ge=0, le=1)
    mtp_steps: int = Field(1, ge=0)
    # Visual slots of training hold middle states; false: embeddings.
    ivsb: bool = True
    # Layers that those states have passed; null: half of the target's.
    middle_layer: int | None = Field(None, ge=1)

    @property
    def _own_loss(self) -> ReadingObjective:
        return VISUAL_STAGE


class MsdConfig(_DirectReading):
    """MSD: visual slots are the projected picture, straight into the layer."""

    kind: Literal["msd"]
    input_norm: bool | None = None


class VispecConfig(_StateReading):
    """ViSpec: a few vectors stand for each picture, and one more joins the states of all text after it."""

    kind: Literal["vispec"]
    kv_heads: Literal["target", "mha"] = "mha"
    mtp_steps: int = Field(1, ge=0)
    replace: Literal["after_text", "all"] = "all"
    # Queries of the adaptor: all but one stand in a picture's last slots, the last one is the global vector.
    num_queries: int = Field(2, ge=1)
    # Drops the vectors that stand in slots; the global one stays.
    vata: bool = False

    def visual(self, *, training: bool) -> Visual:
        return "none" if (self.vata and not training) or self.num_queries == 1 else "compressed"

    @property
    def _own_loss(self) -> ReadingObjective:
        return VISUAL_STAGE


class HivisConfig(_StateReading):
    """HiViS: no visual slot in training or decoding."""

    kind: Literal["hivis"]
    input_norm: bool | None = True
    positions: Literal["compact", "flat", "mrope"] = "compact"
    mtp_steps: int = Field(1, ge=0)
    # Learned vectors added by how many steps a state lies behind the last true one; 0: none.
    num_steps: int = Field(0, ge=0)

    def visual(self, *, training: bool) -> Visual:
        return "none"

    @property
    def _own_loss(self) -> ReadingObjective:
        return VISUAL_STAGE


class EagleReadingConfig(_StateReading):
    """EAGLE-1/2 over text and pictures: every place is a slot with its embedding and its true state."""

    kind: Literal["eagle"]
    image: Image = "projected"
    # Text-only window in training and decoding.
    vata: bool = False

    def visual(self, *, training: bool) -> Visual:
        return "none" if self.vata else "read"


class Eagle3Config(_Reading):
    """EAGLE-3: three layers' states joined, its own vocabulary, and a training-time test of seven passes."""

    kind: Literal["eagle3"]
    mtp_steps: int = Field(6, ge=0)
    mtp_attention: Literal["full", "ttt"] = "ttt"
    # Layers whose states are joined; null: 2, half, and all but 3 of the target's.
    taps: tuple[int, int, int] | None = None
    # In visual slots: none is a text-only window; middle keeps the middle tap alone, so that cached states do not grow
    # fourfold; read joins all three, as servers do, and needs them at every place.
    visual_slots: Literal["none", "middle", "read"] = "none"
    # What their embedding half is.
    image: Image = "placeholder"
    # Text-only window in decoding, whatever training had in visual slots.
    vata: bool = False
    # The likeliest tokens, which the draft's own head scores; null: the whole vocabulary.
    draft_vocab_size: int | None = Field(None, ge=1)

    @property
    def _own_loss(self) -> ReadingObjective:
        return EAGLE3_LOSS

    def visual(self, *, training: bool) -> Visual:
        return "none" if self.vata and not training else self.visual_slots

    @model_validator(mode="after")
    def _no_feature_loss(self) -> Eagle3Config:
        if self.objective is not None and self.objective.feature:
            raise ValueError(
                "objective.feature compares states, and this head's are its own; give token, l1 or listmle"
            )
        if self.taps is not None and list(self.taps) != sorted(set(self.taps)):
            raise ValueError("taps are three layers in ascending order")
        return self


ReadingConfig = Annotated[
    SparrowConfig | MsdConfig | VispecConfig | HivisConfig | EagleReadingConfig | Eagle3Config,
    Field(discriminator="kind"),
]
AnyReading = SparrowConfig | MsdConfig | VispecConfig | HivisConfig | EagleReadingConfig | Eagle3Config
READING_KINDS = ("sparrow", "msd", "vispec", "hivis", "eagle", "eagle3")


def image_of(config: AnyReading) -> Image | None:
    """What enters as the embedding of a visual token; None: no slot has one."""
    if isinstance(config, EagleReadingConfig | Eagle3Config) and config.visual(training=True) != "none":
        return config.image
    return None


def written_settings(config: AnyReading) -> dict[str, Any]:
    """Settings whose other value is another head, beside those that say what is read."""
    names = ("kind", "ivsb", "num_queries", "num_steps")
    return {name: getattr(config, name) for name in names if hasattr(config, name)}
