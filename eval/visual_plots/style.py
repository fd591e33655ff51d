"""The figures' look, which lies in `eval/style.py`."""

from ..style import *  # noqa: F403
