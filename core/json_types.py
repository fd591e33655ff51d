"""Types of what JSON and YAML files hold: records, manifests, configs, reports, recipes as trees.

Values are text, numbers, booleans, null, lists and objects again. Whoever reads one checks it, or a schema has checked
its file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Json = Any  # a value in such a file, or a whole tree
JsonObject = dict[str, Any]
JsonMapping = Mapping[str, Any]  # one that is only read
