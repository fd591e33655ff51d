"""draftsmith: train and measure drafters for speculative decoding of multimodal models."""

import importlib
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .eval.check_drafter import check_drafter as check_drafter

__version__ = "0.1.0"
# Modules that pages or examples named before they moved: an import of the old name works, and says the new one.
_MOVED = {
    "core.loss": "core.batch",
    "data.tar_records": "data.records.tar_records",
    "data.videos": "data.pictures.videos",
    "data.end_tokens": "data.conversations",
    "models.targets.causal.training": "models.targets.causal.section",
    "models.targets.verified": "models.targets.base",
    "trainers.context": "trainers.run.context",
}


class _Moved(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, module = name.partition(".")
        return ModuleSpec(name, self) if package == __name__ and module in _MOVED else None

    def create_module(self, spec: ModuleSpec) -> Any:
        new = f"{__name__}.{_MOVED[spec.name.partition('.')[2]]}"
        warnings.warn(f"{spec.name} is {new} now", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(new)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: Any) -> None:
        module.__spec__ = self._spec  # it has been imported under its new name, and keeps it


sys.meta_path.append(_Moved())


def __getattr__(name: str) -> Any:
    """`check_drafter` brings torch: it is imported when it is asked for."""
    if name != "check_drafter":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .eval.check_drafter import check_drafter

    return check_drafter
