"""Clips to frames, the same ones every time (PyAV).

LLaVA-OneVision takes one frame of each second, and where those are more than 32, 32 at equal distances; its
transformers port takes a fixed number at equal distances. A clip that is broken or too short is an error like a
broken picture.

Sparrow and SAGE name their inputs by visual tokens (0.5k to 25k); what a clip has is frames. The nearest number of
frames counts, not the largest that fits: LLaVA-OneVision's "25k" are 128 frames of 196 tokens and a newline, 25,089.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pydantic import Field, model_validator

from ...core.errors import UserError, first_line
from ...core.pictures import VIDEO, Newline, Picture, Pooling
from ...core.section import Section
from .media_files import BadMedia, MediaFile, open_media
from .picture_files import MAX_PIXELS, check_area
from .tiles import Size

# Containers that hold pictures in time and nothing else: a playlist would send the reader to other files and hosts.
_CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,asf,ogg,gif,apng"

MAX_TAKEN = 1 << 33  # pixels of all frames that are taken of a clip, 4 bytes each while they are resized


class VideoSettings(Section):
    """Reading and counting of clips (the record's `video` key)."""

    # Frames taken of a clip at most.
    num_frames: int = Field(32, ge=1, le=1 << 20)
    # Frames of each second as long as they are no more than num_frames; null: always num_frames at equal distances.
    fps: float | None = Field(1.0, gt=0)
    # Clips of fewer frames are too short to be one.
    min_frames: int = Field(2, ge=1)
    # 2 x 2 patches to 1 after the projector: bilinear as LLaVA-OneVision (27 to 14), average (27 to 13).
    pooling: Pooling = "bilinear"
    # one_token ends a clip with one (transformers' OneVision), grid each row of each frame (the published training
    # code); none for models that have not learned a newline.
    newline: Newline = "one_token"
    # Of Qwen-VL alone, which reads frames whole. Pixels of a frame; null: its own, 128 to 768 tokens' worth.
    min_pixels: int | None = Field(None, ge=1)
    max_pixels: int | None = Field(None, ge=1)
    # Tokens of a clip at most, by smaller frames (not below min_pixels); the default is Qwen's own.
    max_tokens: int = Field(115_200, ge=1)

    @model_validator(mode="after")
    def _enough(self) -> VideoSettings:
        if self.min_frames > self.num_frames:
            raise ValueError(f"min_frames is {self.min_frames} and num_frames {self.num_frames}")
        return self

    def pixel_limits(self, num_frames: int, unit: int) -> tuple[int, int]:
        """The fewest and most pixels of a Qwen-VL's frame; tokens are of `unit` x `unit` pixels, two frames each."""
        least, most = self.min_pixels or 128 * unit**2, self.max_pixels or 768 * unit**2
        share = self.max_tokens * unit**2 * 2 // num_frames
        return min(least, most), max(min(most, share), min(int(least * 1.05), most))

    def picture(self, num_frames: int, patches: int) -> Picture:
        """The layout of a clip with this number of frames."""
        return Picture(patches, num_frames, VIDEO, newline=self.newline, pooling=self.pooling)


def frame_numbers(total: int, rate: float, settings: VideoSettings) -> list[int]:
    """The frames that are taken of `total` at `rate` a second, ascending; each at most once."""
    if settings.fps is not None:
        every = max(1, round(rate / settings.fps))
        numbers = range(0, total, every)
        if len(numbers) <= settings.num_frames:
            return list(numbers)
    if total <= settings.num_frames:
        return list(range(total))
    return np.linspace(0, total - 1, settings.num_frames, dtype=int).tolist()


def numbers_in_time(begins: Sequence[float], end: float, settings: VideoSettings) -> list[int]:
    """The frames that are taken of a clip without one frame rate, ascending; each at most once. The times
    to look at are those of `frame_numbers`; each takes the frame that a player shows then. `begins` [N] are seconds
    from the first frame to each, ascending, and `end` to the end of the last one.
    """

    def shown(times: np.ndarray) -> list[int]:
        return np.unique(np.searchsorted(begins, times + 1e-6, side="right") - 1).tolist()

    if settings.fps is not None and len(times := np.arange(0, end, 1 / settings.fps)) <= settings.num_frames:
        return shown(times)
    if len(begins) <= settings.num_frames:
        return list(range(len(begins)))
    return shown(np.linspace(0, begins[-1], settings.num_frames))


class Clip:
    """A clip whose file was scanned. The frames to take are known, and only the first one is decoded.

    Its frames are those that a player shows: what an edit list hides is no frame, a gap in time shows the frame before
    it, and the display matrix of a phone turns them. Raises `UserError`: missing, no regular file, broken, without
    pictures, mirrored, too large, or too short.
    """

    def __init__(self, path: MediaFile, settings: VideoSettings):
        self.path = path
        with _opened(path) as (container, stream):
            announced, unit = stream.frames, stream.time_base
            rate = float(stream.average_rate or stream.guessed_rate or 0)
            length = None if stream.duration is None else float(stream.duration * unit)
            self.size, first, stored, shown = (stream.width, stream.height), None, 0, []
            decoded_at = None
            for packet in container.demux(stream):
                if packet.size and packet.dts is not None:
                    if decoded_at is not None and packet.dts < decoded_at:  # two files behind each other
                        raise _broken(path, f"its time begins anew after {stored} frames; join clips with a program "
                                            "that writes their times anew")  # fmt: skip
                    decoded_at = packet.dts
                first = first or next(iter(packet.decode()), None)
                if packet.size:
                    stored += 1
                if packet.size and not packet.is_discard:
                    shown.append(packet.dts if packet.pts is None else packet.pts)
        if first is not None and (first.rotation % 90 or any(map(_mirrors, first.side_data))):
            problem = "the clip's display matrix has it shown mirrored or tilted: frames turn by 90, 180 or 270 degrees"
            raise UserError(problem, where=str(path), hint="write its frames as they are shown: ffmpeg -i CLIP NEW")
        if first is not None and first.rotation % 180:
            self.size = self.size[::-1]
        self.total, dated = len(shown), None not in shown
        self._begins = [float((tick - min(shown)) * unit) for tick in sorted(shown)] if dated else []
        step = self._begins[-1] / (self.total - 1) if dated and self.total > 1 else 0.0
        # Some containers count the frames that a gap left out, too; a cut file ends before its time.
        if stored < announced and not (step and length and self._begins[-1] + 2 * step > length):
            raise _broken(path, f"ends after {stored} of {announced} frames")
        if self.total < settings.min_frames:
            problem = f"the clip has {self.total} frames, fewer than min_frames {settings.min_frames}"
            raise UserError(problem, where=str(path), hint="remove the record, or lower video.min_frames")
        if step and abs(rate * step - 1) > 0.02:  # of the file with what an edit list hides, or with gaps
            rate = 1 / step
        if settings.fps is not None and not rate:
            raise _broken(path, "does not say how many frames a second has")
        self._rate = rate
        if step and any(abs(begin - number * step) > step / 2 for number, begin in enumerate(self._begins)):
            self.numbers = numbers_in_time(self._begins, self._begins[-1] + step, settings)
        else:
            self._begins, self.numbers = [], frame_numbers(self.total, rate, settings)

    @property
    def rate(self) -> float:
        """Frames of a second, on average. Raises `UserError` where the file does not say."""
        if not self._rate:
            raise _broken(self.path, "does not say how many frames a second has")
        return self._rate

    @property
    def seconds(self) -> list[float]:
        """From the first frame to each one that is taken."""
        return [self._begins[number] if self._begins else number / self.rate for number in self.numbers]

    @property
    def seconds_per_frame(self) -> float:
        """From one taken frame to the next, on average."""
        return self.total / self.rate / len(self.numbers)

    def frames(self, *, check: Callable[[Size], None] | None = None) -> list[Image.Image]:
        """The taken frames, RGB. Raises `UserError`: one cannot be decoded, or is of a size that `check` refuses."""
        wanted, frames = set(self.numbers), []
        width, height = self.size
        with _opened(self.path) as (container, stream):
            if check is not None:
                check(self.size)
            check_area((width * len(wanted), height), MAX_TAKEN, f"the {len(wanted)} frames taken of the clip have")
            for number, frame in enumerate(container.decode(stream)):
                check_area((frame.width, frame.height), MAX_PIXELS, "a frame has")
                if number in wanted:
                    image = frame.to_image()
                    frames.append(image.rotate(frame.rotation, expand=True) if frame.rotation else image)
                if len(frames) == len(wanted):
                    break
        if len(frames) < len(wanted):
            raise _broken(self.path, f"{len(frames)} of {len(wanted)} frames can be decoded")
        return frames


def _mirrors(data: Any) -> bool:
    """Whether a frame's side data are a display matrix that swaps left and right."""
    return data.type.name == "DISPLAYMATRIX" and np.linalg.det(np.frombuffer(data, "i4").reshape(3, 3)[:2, :2]) < 0


@contextmanager
def _opened(path: MediaFile) -> Iterator[tuple[Any, Any]]:
    """A container and its stream of pictures, no cover picture. What goes wrong ends in a `UserError`."""
    import av
    from av.stream import Disposition

    try:
        # Open the file ourselves, since a name could be something other than a file (a URL, a device).
        with open_media(path, "clip") as file, av.open(file, options={"format_whitelist": _CONTAINERS}) as container:
            stream: Any = container.streams.best("video")
            if stream is None or stream.codec_context is None or stream.disposition & Disposition.attached_pic:
                raise _broken(path, "holds no pictures that can be read")
            check_area((stream.width, stream.height), MAX_PIXELS, "a frame has")
            stream.codec_context.options = {"max_pixels": str(MAX_PIXELS)}  # of what the stream says later
            stream.codec_context.thread_count = 1  # readers have a process each
            yield container, stream
    except BadMedia as error:
        raise BadMedia(error.problem, reason=error.reason, where=str(path), hint=error.hint) from error
    except UserError:
        raise
    except MemoryError as error:
        hint = "shrink the clip, take fewer frames (video.num_frames), or use fewer workers"
        raise BadMedia("not enough memory for the clip", where=str(path), hint=hint) from error
    # For damaged bytes PyAV raises FFmpeg's errors and others (a rate of 0 in 0 seconds, text in no known encoding).
    except Exception as error:
        raise _broken(path, first_line(error)) from error


def _broken(path: MediaFile, problem: str) -> BadMedia:
    hint = "replace or remove the file"
    return BadMedia(f"corrupt clip: {problem}", reason="unreadable clip", where=str(path), hint=hint)


def write_clip(path: Path, frames: Sequence[Image.Image], *, fps: int) -> None:
    """An mp4 of equal-sized RGB frames with even sides (MPEG-4 part 2, which every FFmpeg build can write)."""
    import av

    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=fps)
        stream.width, stream.height = frames[0].size
        stream.pix_fmt, stream.bit_rate = "yuv420p", 2_000_000
        # One thread and no wall clock inside: the same frames make the same file.
        stream.codec_context.thread_count = 1
        container.flags |= 0x0400  # AVFMT_FLAG_BITEXACT
        for image in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(image)))
        container.mux(stream.encode())


def visual_tokens(budget: int | str) -> int:
    """Tokens of a budget: any number, or one with k after it. Raises `UserError` for what is neither."""
    text = str(budget).strip().lower()
    try:
        number = float(text.removesuffix("k")) * (1000 if text.endswith("k") else 1)
    except ValueError:
        number = 0.0
    if not 1 <= number < float("inf"):
        raise UserError(f"{budget!r} is no number of visual tokens", hint="give a number, such as 700 or 25k")
    return round(number)


def label(budget: int | str) -> str:
    """A budget's name in tables: 0.5k, 25k, 700."""
    tokens = visual_tokens(budget)
    return f"{tokens / 1000:g}k" if tokens % 100 == 0 and tokens >= 500 else str(tokens)


@dataclass(frozen=True)
class FrameTokens:
    """A clip's token counts: of each step in time and beyond those of its frames (a newline). Qwen's towers
    join two frames in a step; an odd last one is doubled.
    """

    per_step: int
    frames_per_step: int = 1
    per_clip: int = 0

    def total(self, num_frames: int) -> int:
        """Tokens of a clip with this number of frames."""
        return self.per_step * -(-num_frames // self.frames_per_step) + self.per_clip

    def frames(self, budget: int | str) -> int:
        """The number of frames whose tokens are nearest to the budget; at least one step."""
        steps = (visual_tokens(budget) - self.per_clip) / self.per_step
        return max(1, int(steps + 0.5)) * self.frames_per_step


def tile_frames(settings: VideoSettings, patches: int) -> FrameTokens:
    """The token counts where frames are tiles (LLaVA-OneVision: 196 a frame and one newline)."""
    one, two = (settings.picture(count, patches).num_tokens for count in (1, 2))
    return FrameTokens(two - one, per_clip=2 * one - two)
