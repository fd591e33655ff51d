"""The heads that each engine can express: every rule names what the engine would run instead.

Read in the sources of vLLM 0.33, SGLang 0.5.23, speculators 0.9, SafeAILab/EAGLE and llama.cpp b11434. In all of them
the only sign of a mismatch is a low acceptance rate.
"""

from __future__ import annotations

from typing import Literal, cast, get_args

from ...core.errors import page
from ..drafters.dflash import DflashConfig
from ..drafters.eagle3 import OPTIONS
from ..drafters.head_config import DirectHeadConfig, HeadConfig
from ..drafters.medusa import MedusaConfig
from ..hub import is_tied, num_deepstack
from ..targets.table import family_of
from .plugin import plugins_name
from .source import Source, unserved

# eagle: the layout of the methods' own code (EAGLE, and MSD's and ViSpec's, which share it). gguf: llama.cpp's.
Engine = Literal["vllm", "sglang", "speculators", "eagle", "gguf"]
ENGINES: tuple[Engine, ...] = get_args(Engine)
# text: the user promises never to send the engine pictures, so checks on how the head handles images are skipped.
Prompts = Literal["all", "text"]

_RUNS_IN = {"vllm": "vllm", "speculators": "vllm", "sglang": "sglang"}  # layout -> the engine that reads it
NAMES = {"dflash": "DFlash", "dspark": "DSpark", "dflash2": "DFlash 2"}
_BLOCKS = ("vllm", "speculators", "gguf")  # layouts of DFlash drafts
_UNCOMPARED = "with pictures of this target its drafts and the engine's were not compared"
# What an engine puts at pictures (`drafter.image`), where it is not the placeholder's embedding.
_WANTED = {"sglang": "projected"}
# Options of EAGLE-3 that its layout has; vLLM and speculators know all of them, and a window.
_KNOWN = {"gguf": ("norm_before_fc", "norm_before_residual", "own_embedding")}
_NAMES = {"vllm": "vLLM", "sglang": "SGLang", "speculators": "speculators (vLLM)", "eagle": "EAGLE's own code",
          "gguf": "llama.cpp"}  # fmt: skip


def check_expressible(engine: Engine, source: Source, prompts: Prompts) -> None:
    """Raises `UserError` with every reason why an engine would run something else than this head or draft."""
    with_pictures = source.target.sees and prompts == "all"
    on_text = "on text alone it can: --prompts text, if it will only be asked without pictures"
    config = source.config
    if isinstance(config, DflashConfig):
        reasons = _dflash(engine, source, config)
        pictures = []
        if with_pictures and not reasons and config.visual(training=False) == "none":
            pictures = ["it sees no state at a picture (text-only window), and the engine shows it all of them"]
        elif with_pictures and not reasons and not family_of(source.target.config).agrees_on_pictures:
            pictures = [_UNCOMPARED]
        elif with_pictures and not reasons:
            pictures = _added_below(source.head.shape.taps[0], source)
        refused = f"--to {engine} cannot express this draft"
        hint = f"train it with settings that the engine knows ({page('exports.md')}), or decode with our own loop"
    elif isinstance(config, MedusaConfig):  # reads the target's own state of the last token alone: no picture enters it
        reasons, pictures = config.exports(engine), []
        refused, hint = f"--to {engine} cannot express Medusa heads", "export it --to vllm, or decode with our own loop"
    else:
        reasons = _of_head(engine, source, config, with_pictures=with_pictures)
        pictures = _pictures(engine, source, config) if with_pictures else []
        refused = f"{_NAMES[engine]} cannot express this head"
        hint = f"serve it with our own loop, or train a head that the engine knows ({page('exports.md')})"
        if _of_head(engine, source, config, with_pictures=False):
            on_text = hint
        elif pictures == _other_embedding(engine, config):
            on_text += f"; for pictures train one with drafter.image={_WANTED.get(engine, 'placeholder')}"
    if reasons or pictures:
        raise unserved(refused, reasons + pictures, source.folder, hint if reasons else on_text)


def _of_head(engine: Engine, source: Source, config: HeadConfig, *, with_pictures: bool) -> list[str]:
    shape, reasons, is_eagle3 = source.head.shape, list[str](), config.is_eagle3
    if engine == "gguf" and not is_eagle3:
        reasons.append("it has no head of EAGLE-1 or its like, only EAGLE-3's")
    elif engine not in ("eagle", "gguf"):  # beside a GGUF the target's file decides
        theirs, runs = source.target.config, _RUNS_IN[engine]
        family = family_of(theirs)
        model = family.tower or theirs.model_type
        if ("eagle3" if is_eagle3 else "eagle") not in family.engines.get(runs, ()):
            what = f"its class of {model} hands no states to a head of EAGLE-{3 if is_eagle3 else 1}"
            unread = f"nobody has read here how its class of {model} hands states to heads"
            reasons.append(unread if runs in family.unread else what)
    reasons += config.exports(engine)
    if config.positions == "mrope":
        if engine != "sglang" or not is_eagle3:
            reasons.append("heads get one position for each token, and this one turns by three (positions: mrope)")
        elif shape.mrope_interleaved:
            reasons.append("its three positions alternate (Qwen3-VL), which the draft's rotation is not known to do")
    if shape.rope_scaling is not None and (shape.mrope_section or engine == "eagle"):
        kind = shape.rope_scaling["rope_type"]
        reasons.append(f"its positions are stretched ({kind}), which the draft's rotation is not known to do")
    # Both know Qwen3's layer beside Llama's (vLLM 0.33, qwen3_eagle3.py).
    if shape.qk_rms_norm and not (is_eagle3 and engine in ("vllm", "speculators")):
        reasons.append("queries and keys are normed, and a head's layer is Llama's")
    if is_eagle3:
        if shape.qkv_bias:
            reasons.append("queries, keys and values have biases, and a head of EAGLE-3 has none")
        taps, layers = config.reads(source.target.shape, training=False).state, source.target.shape.num_layers
        usual = (2, layers // 2, layers - 3)
        if engine == "eagle" and taps != usual:
            reasons.append(f"it joins layers {taps}, and the code always takes {usual}")
        elif taps[-1] == layers:
            reasons.append(f"it taps after the last layer ({layers}), and engines tap what enters a layer")
        # Of EAGLE-3.1 and of speculators; vLLM and speculators know them.
        known = _KNOWN.get(engine, ())
        options = [name for name in (*OPTIONS, "sliding_window") if dict(config).get(name) and name not in known]
        if options and engine not in ("vllm", "speculators"):
            reasons.append(f"it has {' and '.join(options)}, which its class is not known to have")
        return reasons
    if source.head.draft_ids is not None:
        reasons.append("its own LM head scores a part of the vocabulary (drafter.draft_vocab_size), and a head of "
                       "EAGLE-1 is served with the target's")  # fmt: skip
    if engine == "speculators":
        return reasons
    if dict(config).get("state", "feature") != "feature":
        reasons.append("it reads the state before the last layer, and engines hand over the one after the final norm")
    layout = config.kind if engine == "eagle" else plugins_name(config) if engine == "vllm" and with_pictures else None
    normed = ("msd",) if engine == "eagle" else ("middle", "window", "vispec")
    if shape.input_norm and layout not in normed:
        reasons.append("its layer norms its input, and theirs has no such norm: the weight would be dropped")
    return reasons


def _pictures(engine: Engine, source: Source, config: HeadConfig) -> list[str]:
    """Reasons that do not apply if no prompt has a picture."""
    if engine != "eagle" and not family_of(source.target.config).agrees_on_pictures:
        return [_UNCOMPARED]
    if engine == "eagle" and config.kind in ("msd", "vispec"):
        return []
    if engine == "eagle":
        return ["the code reads text alone"]
    if engine == "gguf":
        return ["beside EAGLE-3 llama-server (b11549) answers a request with a picture by HTTP 500"]
    held = config.visual(training=True)
    if engine == "vllm" and (name := plugins_name(config)):
        return _of_plugin(name, source, config)
    if held != "read":
        what = {
            "none": "no input stands at a picture (text-only window), and the engine makes one for every token",
            "middle": "one middle state stands at a picture, and the engine joins three",
            "direct": "a picture enters its layer directly, and the engine feeds every token through fc",
            "compressed": "a few vectors stand for a picture, and the engine feeds it every token",
        }
        return [what[held]]
    if engine == "sglang" and not config.is_eagle3:
        return ["its EAGLE-1 class embeds ids alone, and at pictures those are hashes and no ids"]
    reasons = _other_embedding(engine, config)
    if config.is_eagle3:
        reasons += _added_below(config.reads(source.target.shape, training=False).state[0], source)
    return reasons


def _of_plugin(name: str, source: Source, config: HeadConfig) -> list[str]:
    """Reasons that a head has for which our plugin has a class."""
    reasons, theirs, share = list[str](), source.target.config, config.visual_fraction(training=False)
    compared = "patched" in family_of(theirs).engines.get("vllm", ())
    if name in ("msd", "middle") and share != 1:
        reasons.append(f"it keeps a share of {share} of a picture's tokens, and the class all of them")
    if name == "middle":
        shape = source.target.shape
        if not compared:
            reasons.append(f"its middle states were compared beside LLaVA-1.5 alone, not {theirs.model_type}")
        if cast(DirectHeadConfig, config).visual_layer(shape, training=False) == shape.num_layers:
            reasons.append("its middle layer is the last one, and the engine hands over each layer once")
        if source.head.shape.norm_eps != source.target.text.rms_norm_eps:
            reasons.append("its norms add another number than the target's (drafter.norm_eps), and its class has one")
    if name in ("msd", "middle"):
        return reasons
    if config.positions != "compact":
        reasons.append(
            f"its positions count the pictures that it leaves out (drafter.positions: {config.positions}), and in the "
            "engine they count what it holds: compact"
        )
    if not compared:
        return [*reasons, f"what it leaves out was compared with LLaVA-1.5's pictures alone, not {theirs.model_type}'s"]
    tokens = (theirs.vision_config.image_size // theirs.vision_config.patch_size) ** 2
    if name == "vispec" and source.head.num_queries > tokens:
        reasons.append(f"a picture has {tokens} tokens, too few for its vectors (drafter.num_queries)")
    return reasons


def _other_embedding(engine: Engine, config: HeadConfig) -> list[str]:
    """The reason that a head with the other `image` would not have."""
    image, wanted = config.image_input(), _WANTED.get(engine, "placeholder")
    if image == wanted:
        return []
    return [f"the {image} embedding stands at pictures here, and the engine puts the {wanted} one there"]


def _added_below(first: int, source: Source) -> list[str]:
    """The reason that a head has whose first joined layer is one of those that the target adds to."""
    added = num_deepstack(source.target.config)
    if first > added:
        return []
    return [
        f"it joins layer {first} as that hands it over, and Qwen3-VL adds to each of its first {added} layers what "
        "its tower saw: what an engine taps there is something else (drafter.taps above it)"
    ]


def _dflash(engine: Engine, source: Source, config: DflashConfig) -> list[str]:
    is_targets = getattr(source.head.shape, "target_layers", False)
    of_kind = {"dspark": ["vllm"] if is_targets else ["speculators", "gguf"], "dflash2": ["vllm", "speculators"]}
    layouts = of_kind.get(config.kind, [*_BLOCKS])
    if engine not in layouts:
        other = f"; --to {layouts[0]} has one" if config.kind == "dspark" else ""
        return [f"it has no layout for {NAMES[config.kind]} drafts that was read here{other}"]
    shape, reasons, target = source.head.shape, [], source.target.config
    if engine != "gguf" and not is_targets and "dflash" not in family_of(target).engines.get("vllm", ()):
        reasons.append(f"its class of {target.model_type} is not known to hand states to a DFlash draft")
    if shape.mask_token_id is None:
        reasons.append("its mask is a trained vector, and the engine embeds an id: drafter.mask_token_id")
    if shape.taps[-1] == source.target.shape.num_layers:
        reasons.append(f"it joins the state after the last layer ({shape.taps[-1]}), and engines tap what enters one")
    if engine == "gguf" and config.kind == "dspark" and (shape.markov_head_type != "vanilla" or not shape.markov_rank):
        reasons.append(f"its Markov head is {shape.markov_head_type} of rank {shape.markov_rank}: not llama.cpp's")
    if engine == "speculators" and shape.causal and shape.sliding_window is None:
        reasons.append("its blocks are causal, and in this layout only those of layers with a window are")
    if config.positions != "flat":
        reasons.append("engines count every token of the prompt: drafter.positions: flat")
    if config.kind == "dflash2" and source.head.draft_ids is not None:
        reasons.append(
            "its LM head scores a part of the vocabulary (drafter.draft_vocab_size), and its rows are taken for ids"
        )
    return reasons + (_of_targets(source) if is_targets else [])


def _of_targets(source: Source) -> list[str]:
    """Why vLLM 0.32's DSpark with Gemma 4's layers, which brings its own tables, cannot be this draft."""
    shape, reasons = source.head.shape, list[str]()
    if shape.markov_head_type != "vanilla" or not shape.markov_rank:
        reasons.append(f"its Markov head is {shape.markov_head_type} of rank {shape.markov_rank}: not the class's")
    if source.head.draft_ids is not None:
        reasons.append("it scores a part of the vocabulary (drafter.draft_vocab_size), and the class scores all")
    if shape.causal or shape.sliding_window is not None:
        reasons.append("its blocks are causal or see a window, and the class's see all")
    if not is_tied(source.target.config):
        reasons.append("the target's LM head is no copy of its table, and the layout has both")
    return reasons
