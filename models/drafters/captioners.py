"""Captioners. Drafting mode C reads a caption in place of each picture (TABED, section 6, appendix D).

Published ones through transformers' own classes: Florence-2, BLIP, BLIP-2, each with the vision tower and the tokenizer
that it was trained with; and a LLaVA that a recipe has trained itself. All pictures of a request are one batch.
Letters: R pictures, T tokens, S side in pixels.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from ...core.batch import Request
from ...core.errors import UserError
from ...core.fields import MOST_ANSWER, Dtype, Place, Revision
from ...core.finite import check_module
from ...core.pictures import IMAGE, TEXT, VIDEO
from ...core.placement import onto
from ...core.pretrained import check_quantised, reading_pretrained
from ...core.section import Section, torch_dtype
from ..decoding.batched import write_answers
from ..decoding.decoder import CachedDecoder
from ..decoding.warp import Warp
from ..hub import transformers_class
from ..pictures import pictures_of
from ..stored import resolved_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Captioner(Protocol):
    """Writes captions of a request's pictures."""

    def captions(self, request: Request) -> list[str]:
        """One for each picture, in prompt order."""
        ...


class _Published(Section):
    path: Place
    revision: Revision | None = None
    # Beams of the search; 1 is greedy.
    num_beams: int = Field(1, ge=1, le=1024)
    # A caption's tokens. The draft reads them all: long ones cost it positions.
    max_new_tokens: int = Field(50, ge=1, le=MOST_ANSWER)
    # auto: on a GPU as the weights are stored, on a CPU float32.
    dtype: Dtype = "auto"

    # transformers' classes of the model, and of what it reads pictures with.
    model_class: ClassVar[str]
    picture_class: ClassVar[str] = "BlipImageProcessor"


class Florence2Captions(_Published):
    """TABED's default. Of the native conversion: microsoft/* needs code of its own, which does not load any more."""

    kind: Literal["florence2"]
    path: Place = "florence-community/Florence-2-large-ft"
    num_beams: int = Field(3, ge=1)
    max_new_tokens: int = Field(1024, ge=1, le=MOST_ANSWER)
    # How much is said; TABED uses the shortest.
    task: Literal["caption", "detailed", "more-detailed"] = "caption"

    model_class: ClassVar[str] = "Florence2ForConditionalGeneration"
    picture_class: ClassVar[str] = "CLIPImageProcessor"


class BlipCaptions(_Published):
    """BLIP: small and fast, with short captions."""

    kind: Literal["blip"]
    path: Place = "Salesforce/blip-image-captioning-base"

    model_class: ClassVar[str] = "BlipForConditionalGeneration"


class Blip2Captions(_Published):
    """BLIP-2, whose captions a language model of its own writes (OPT)."""

    kind: Literal["blip2"]
    path: Place = "Salesforce/blip2-opt-2.7b"

    model_class: ClassVar[str] = "Blip2ForConditionalGeneration"


class LvlmCaptions(Section):
    """A LLaVA from a `train` stage with `model: captioner`: the demo's, which has nothing to download."""

    kind: Literal["lvlm"]
    # The stage that trained it; null: the latest.
    from_stage: str | None = Field(None, alias="from")
    # What it is asked; <image> is the picture.
    prompt: str = "<image>\nDescribe the picture briefly."
    max_new_tokens: int = Field(40, ge=1, le=MOST_ANSWER)


CaptionerConfig = Annotated[
    Florence2Captions | BlipCaptions | Blip2Captions | LvlmCaptions, Field(discriminator="kind")
]


class PublishedCaptioner:
    """Asks one of transformers' captioners about the pictures as their files have them. `prompt` [T] stands in front of
    the answer (None: the model's `generate` brings its own); `num_echoed` ids of the output repeat it.
    """

    def __init__(
        self, model: Any, tokenizer: Any, image_processor: Any, settings: Any, *, prompt: Tensor | None = None,
        num_echoed: int = 0,
    ):  # fmt: skip
        self.model = model.eval().requires_grad_(False)
        self.tokenizer, self.image_processor, self.settings = tokenizer, image_processor, settings
        self.prompt, self.num_echoed = prompt, num_echoed

    @torch.inference_mode()
    def captions(self, request: Request) -> list[str]:
        """One caption for each picture, in prompt order. Raises `UserError` where the originals are missing."""
        count = len(pictures_of(request))
        if count != len(request.originals):
            raise UserError(
                f"a captioner is asked about {count} pictures and given {len(request.originals)}: it reads the files, "
                "not the target's pixels",
                where=f"request {request.name!r}",
                hint="make requests with their originals, or use captioner: {kind: lvlm}",
            )
        if not count:
            return []
        pixels = self.image_processor(list(request.originals), return_tensors="pt").pixel_values
        inputs: dict[str, Any] = {"pixel_values": pixels.to(self.model.device, self.model.dtype)}
        if self.prompt is not None:
            inputs["input_ids"] = self.prompt.to(self.model.device).expand(count, -1)
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        settings = self.settings
        output = self.model.generate(
            **inputs, num_beams=settings.num_beams, do_sample=False, max_new_tokens=settings.max_new_tokens
        )
        answers = self.tokenizer.batch_decode(output[:, self.num_echoed :], skip_special_tokens=True)
        return [text.strip() for text in answers]


_FLORENCE_TASKS = {
    "caption": "What does the image describe?",
    "detailed": "Describe in detail what is shown in the image.",
    "more-detailed": "Describe with a paragraph what is shown in the image.",
}


def load_captioner(
    config: Florence2Captions | BlipCaptions | Blip2Captions, device: torch.device
) -> PublishedCaptioner:
    """A published captioner. Raises `UserError` where its files are missing or of another model."""
    model = _load(config, device)
    tokenizer, images = _reader(config)
    settings = model.config
    if isinstance(config, BlipCaptions):
        # `generate` begins with a token of its own.
        return PublishedCaptioner(model, tokenizer, images, config, num_echoed=1)
    if isinstance(config, Blip2Captions):
        if settings.image_token_index is None or not settings.use_decoder_only_language_model:
            raise UserError(
                "these BLIP-2 weights have no decoder-only language model, or name no image_token_index", key=_KEY,
                where=config.path, hint="use Salesforce/blip2-opt-2.7b at its latest revision",
            )  # fmt: skip
        run = [settings.image_token_index] * settings.num_query_tokens
        prompt = torch.tensor([*run, settings.text_config.bos_token_id])
        return PublishedCaptioner(model, tokenizer, images, config, prompt=prompt, num_echoed=len(prompt))
    # Tokens of a picture, counted on a blank one: old processor files do not say.
    blank = images([np.zeros((64, 64, 3), dtype=np.uint8)], return_tensors="pt").pixel_values
    with torch.inference_mode():
        features = model.model.get_image_features(blank.to(model.device, model.dtype)).pooler_output
    run = [settings.image_token_id] * features.shape[1]
    task = tokenizer(_FLORENCE_TASKS[config.task], add_special_tokens=False).input_ids
    prompt = torch.tensor([*run, tokenizer.bos_token_id, *task, tokenizer.eos_token_id])
    return PublishedCaptioner(model, tokenizer, images, config, prompt=prompt)


def _load(config: _Published, device: torch.device) -> Any:
    cls: Any = transformers_class(config.model_class)
    dtype = torch_dtype(resolved_dtype(config, config.path, device, key="captioner"))
    with reading_pretrained(config.path, "cannot load a captioner from", key=_KEY, where=config.path, hint=_CURE):
        model, report = cls.from_pretrained(
            config.path, revision=config.revision, dtype=dtype, weights_only=True, output_loading_info=True,
            **onto(device),
        )  # fmt: skip
    check_quantised(model, report, config.path)
    # Weights of another layout would be left random, and the captions noise.
    if report["missing_keys"] or report["mismatched_keys"]:
        problem = f"{config.path!r} lacks weights of {cls.__name__}: {sorted(report['missing_keys'])[:3]} ..."
        raise UserError(problem, key=_KEY, where=config.path, hint=_CURE)
    check_module(model, config.path)
    return model


_KEY = "captioner.path"
_CURE = (
    "check the name and the network; weights must be in the layout of transformers' own class "
    "(florence-community/Florence-2-large-ft, Salesforce/blip-image-captioning-base, Salesforce/blip2-opt-2.7b)"
)


def _reader(config: _Published) -> tuple[Any, Any]:
    """Tokenizer and image processor, apart: the joint classes want torchvision."""
    import transformers
    from transformers import AutoTokenizer

    name = config.picture_class
    images = getattr(transformers, f"{name}Pil", None) or getattr(transformers, name)
    problem = "cannot read the tokenizer or image processor of the captioner"
    with reading_pretrained(config.path, problem, key=_KEY, where=config.path, hint=_CURE, weights=False):
        return (
            AutoTokenizer.from_pretrained(config.path, revision=config.revision),
            images.from_pretrained(config.path, revision=config.revision),
        )


class LvlmCaptioner:
    """A LLaVA that shares the target's processor: it sees the request's own pixels, and answers greedily to `prompt`
    [T], with one picture's run of image tokens. `stop_ids` end a caption and do not belong to it.
    """

    def __init__(
        self,
        decoder: CachedDecoder,
        prompt: Sequence[int],
        *,
        image_token_id: int,
        stop_ids: Collection[int],
        tokenizer: PreTrainedTokenizerBase,
        max_new_tokens: int,
    ):
        self.decoder, self.tokenizer, self.max_new_tokens = decoder, tokenizer, max_new_tokens
        self.prompt = torch.tensor(list(prompt))
        self.modality = torch.where(self.prompt == image_token_id, IMAGE, TEXT).to(torch.int8)
        self.stop_ids = frozenset(stop_ids)

    @torch.inference_mode()
    def captions(self, request: Request) -> list[str]:
        requests, first = [], 0
        for picture in pictures_of(request):
            # One tile of each: an image's first, which holds all of it, or a clip's middle frame.
            tile = first + (picture.num_tiles // 2 if picture.modality == VIDEO else 0)
            assert request.pixels is not None
            requests.append(Request(self.prompt, self.modality, request.pixels[tile][None]))
            first += picture.num_tiles
        if not requests:
            return []
        count, stop_ids = len(requests), self.stop_ids
        limits = [self.max_new_tokens] * count
        answers = write_answers(self.decoder, requests, Warp(), limits=limits, seeds=range(count), eos_ids=stop_ids)
        spoken = [[token for token in answer.ids if token not in stop_ids] for answer in answers]
        return [str(self.tokenizer.decode(ids, skip_special_tokens=True)).strip() for ids in spoken]
