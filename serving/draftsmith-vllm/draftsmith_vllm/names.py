"""Whether a folder has all weights of a class. vLLM's own check leaves linear layers out: one that the folder lacks
stays as it was allocated, and the drafter serves noise. Needs no vLLM.
"""

# Of vLLM's fused layers, what folders call their parts.
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class MissingWeights(ValueError):
    """A folder lacks weights of its class."""


def every(weights, named, *, without=()):
    """The pairs of name and value in `weights`, one by one. At their end raises `MissingWeights`: one of the parameters
    `named` (an iterable of names) did not come. `without`: beginnings of names that need not come.
    """
    came = set()
    for name, value in weights:
        came.add(name)
        yield name, value
    for fused, parts in _FUSED.items():
        named = [name.replace(fused, part) for name in named for part in (parts if f".{fused}." in name else (fused,))]
    missing = sorted(name for name in {*named} - came if not name.startswith(tuple(without)))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise MissingWeights(f"model.safetensors lacks {missing[0]}{more}: export the drafter anew")
