"""All drafters, one file each. A new one of ours is a line in this union; other packages' come by import path."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from ...core.import_paths import OrImported
from .base import DrafterConfig
from .dflash import DflashConfig
from .dflash2 import Dflash2Config
from .dspark import DsparkConfig
from .eagle import EagleConfig
from .eagle3 import Eagle3Config
from .hivis import HivisConfig
from .jacobi import HeadTailConfig, JacobiConfig
from .llamagen import SiblingConfig
from .lookup import NgramConfig, SuffixConfig
from .lvlm import LvlmConfig
from .medusa import MedusaConfig
from .mixed import MembersConfig, MixedConfig
from .msd import MsdConfig
from .mtp import MtpConfig
from .peagle import PeagleConfig
from .pruned import PrunedConfig
from .sparrow import SparrowConfig
from .vispec import VispecConfig

# A recipe's `drafter`, and that of a stage or a method.
AnyDrafter = Annotated[
    LvlmConfig
    | EagleConfig
    | Eagle3Config
    | SparrowConfig
    | MsdConfig
    | VispecConfig
    | HivisConfig
    | MedusaConfig
    | DflashConfig
    | DsparkConfig
    | Dflash2Config
    | PeagleConfig
    | MtpConfig
    | PrunedConfig
    | NgramConfig
    | SuffixConfig
    | JacobiConfig
    | SiblingConfig
    | MixedConfig
    | HeadTailConfig,
    Field(discriminator="kind"),
    OrImported(DrafterConfig),
]
# Reads one. To make a reader takes longer than to read a whole recipe, which holds dozens of drafters.
DRAFTER: TypeAdapter[DrafterConfig] = TypeAdapter(AnyDrafter)


def members_of(config: DrafterConfig, context: object = None) -> list[Any]:
    """An ensemble's members: names as they are, sections read as a recipe's `drafter`; `context` is pydantic's. Other
    drafters have none.
    """
    read, members = DRAFTER.validate_python, config.members if isinstance(config, MembersConfig) else ()
    return [member if isinstance(member, str) else read(member, context=context) for member in members]
