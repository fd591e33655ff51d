"""What `trainers/stage.py` has, for `trainers/describe/` alone, which still asks for it here."""

from ..stage import Planned as Planned
