"""Imported first by the process that ranks are forked from: a quarter of its imports looked for garbage."""

import gc

gc.disable()
