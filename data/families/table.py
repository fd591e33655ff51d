"""All families whose pictures are read here: the one place that names them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from .gemma import GEMMA
from .internvl import INTERNVL
from .llava import LLAVA, LLAVA_NEXT, LLAVA_ONEVISION
from .mistral import PIXTRAL
from .processor import CAUSAL_LM, PictureFamily
from .prompt_templates import CHATML
from .qwen import QWEN2_5_VL, QWEN2_VL, QWEN3_VL

# Mistral before LLaVA, since a Pixtral's config says llava.
_ALL = (PIXTRAL, LLAVA, LLAVA_NEXT, LLAVA_ONEVISION, QWEN2_VL, QWEN2_5_VL, QWEN3_VL, INTERNVL, GEMMA)
USUAL: PictureFamily = LLAVA  # reads what no family claims
PICTURE_FAMILIES: dict[str, PictureFamily] = {family.name: family for family in _ALL}
_CALLED = {CHATML.name: "qwen"}  # in recipes
TEMPLATES = {_CALLED.get(one.name, one.name): one for family in (*_ALL, CAUSAL_LM) for one in family.templates}
# A recipe's `format.template`: those, and the one in the target's own files.
if TYPE_CHECKING:
    TemplateName = str
else:
    TemplateName = Literal[(*TEMPLATES, "chat")]
# A recipe's `format.image_rule`, as `place_marks` honours it; the first keeps one mark of a turn.
ImageRule = Literal["llava15", "next", "verbatim"]
ONE_MARK: ImageRule = "llava15"


def picture_family_of(model_type: str, tower: str | None = None) -> PictureFamily | None:
    """The family by whose rules a model of this type, with such a tower, reads pictures; None: no known one."""
    kind = model_type.removesuffix("_moe")
    return next((family for family in _ALL if family.of_model(kind, tower)), None)
