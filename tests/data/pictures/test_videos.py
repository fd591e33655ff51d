"""Clips: the same frames every time, and every kind of damage ends in one kind of error."""

import random
import struct

import numpy as np
import pytest
from draftsmith.core.errors import UserError
from draftsmith.data.pictures import videos
from draftsmith.data.pictures.videos import Clip, VideoSettings, frame_numbers, write_clip
from fails import fails_with
from PIL import Image

UNIFORM = VideoSettings(fps=None, num_frames=8)


def frames(count: int) -> list[Image.Image]:
    """Each lighter than the one before."""
    return [Image.fromarray(np.full((48, 64, 3), 20 + 8 * number, np.uint8)) for number in range(count)]


@pytest.fixture
def path(tmp_path):
    write_clip(tmp_path / "a.mp4", frames(25), fps=5)
    return tmp_path / "a.mp4"


def numbers_of(found: list[Image.Image]) -> list[int]:
    return [round((float(np.asarray(image).mean()) - 20) / 8) for image in found]


@pytest.mark.parametrize("settings", [UNIFORM, VideoSettings(), VideoSettings(fps=2.0, num_frames=4)])
def test_the_frames_that_are_announced_are_decoded(path, settings):
    clip = Clip(path, settings)
    assert numbers_of(clip.frames()) == clip.numbers == Clip(path, settings).numbers
    assert clip.frames()[0].size == (64, 48) and len(clip.numbers) <= settings.num_frames
    assert settings.picture(len(clip.numbers), 3).num_tiles == len(clip.numbers)


def test_which_frames_are_taken():
    """One of each second; where those are too many, equal distances with both ends, cut to integers."""
    assert frame_numbers(25, 5.0, VideoSettings()) == [0, 5, 10, 15, 20]
    assert frame_numbers(10_000, 29.97, VideoSettings()) == np.linspace(0, 9_999, 32, dtype=int).tolist()
    assert frame_numbers(960, 29.97, VideoSettings()) == list(range(0, 960, 30))
    assert frame_numbers(25, 0.0, UNIFORM) == [0, 3, 6, 10, 13, 17, 20, 24]
    assert frame_numbers(5, 0.0, UNIFORM) == [0, 1, 2, 3, 4], "no frame is taken twice"
    assert frame_numbers(5, 0.5, VideoSettings()) == [0, 1, 2, 3, 4]


# ---- clips as phones, cutters and recorders leave them


def encoded(path, at, *, codec="libx264", fps=10, rotation=0, cover=False):
    """Frame n of `frames` shown at time `at[n]`, in units of a frame's time."""
    import av

    with av.open(str(path), "w") as container:
        if cover:
            green = container.add_stream("mjpeg", rate=1)
            green.width, green.height, green.pix_fmt = 32, 32, "yuvj420p"
            green.disposition = av.stream.Disposition.attached_pic
        stream = container.add_stream(codec, rate=fps)
        stream.width, stream.height, stream.pix_fmt, stream.bit_rate = 64, 48, "yuv420p", 2_000_000
        stream.codec_context.gop_size = 20
        if rotation:
            stream.set_display_rotation(rotation)
        if cover:
            picture = av.VideoFrame.from_image(Image.new("RGB", (32, 32), (0, 255, 0)))
            container.mux([*green.encode(picture), *green.encode()])
        for image, time in zip(frames(len(at)), at, strict=True):
            frame = av.VideoFrame.from_image(image)
            frame.pts = time
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def trimmed(source, path, first: int, fps: int = 10):
    """As `ffmpeg -ss ... -c copy` cuts: from the key frame before, whose frames an edit list hides."""
    import av

    with av.open(str(source)) as whole, av.open(str(path), "w") as cut:
        stream = whole.streams.video[0]
        copied = cut.add_stream_from_template(stream)
        begin = int(first / fps / stream.time_base)
        packets = [packet for packet in whole.demux(stream) if packet.size]
        key = max(packet.pts for packet in packets if packet.is_keyframe and packet.pts <= begin)
        for packet in packets:
            if packet.pts >= key:
                packet.pts, packet.dts, packet.stream = packet.pts - begin, packet.dts - begin, copied
                cut.mux(packet)
    return path


def test_frames_that_an_edit_list_hides_are_none(tmp_path):
    whole = encoded(tmp_path / "whole.mp4", range(30))
    clip = Clip(trimmed(whole, tmp_path / "cut.mp4", 27 - 10), UNIFORM)
    assert clip.total == 13 and clip.rate == pytest.approx(10)
    assert numbers_of(clip.frames()) == [17 + number for number in clip.numbers]
    every = Clip(tmp_path / "cut.mp4", VideoSettings(num_frames=32, fps=10.0))
    assert numbers_of(every.frames()) == list(range(17, 30)) and every.seconds_per_frame == pytest.approx(0.1)


def test_a_gap_in_time_shows_the_frame_before_it(tmp_path):
    """AVI writes an empty chunk for a frame that never came, and counts it in its head."""
    path = encoded(tmp_path / "gap.avi", [*range(10), *range(16, 25)], codec="mpeg4")
    clip = Clip(path, VideoSettings(num_frames=64, fps=5.0))
    assert clip.total == 19
    assert clip.numbers == [0, 2, 4, 6, 8, 9, 10, 12, 14, 16, 18], "1.0 to 1.5 s show frame 9"
    assert clip.seconds == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 0.9, 1.6, 1.8, 2.0, 2.2, 2.4])
    assert clip.seconds_per_frame * len(clip.numbers) == pytest.approx(2.5, rel=0.1)
    assert numbers_of(clip.frames()) == clip.numbers
    assert numbers_of(Clip(path, VideoSettings(num_frames=4, fps=None)).frames()) == [0, 8, 10, 18]


def test_a_variable_rate_is_sampled_over_time(tmp_path):
    path = encoded(tmp_path / "a.mp4", [0, 1, 2, 3, 4, 5, 10, 20, 30])
    assert Clip(path, VideoSettings(fps=1.0)).numbers == [0, 6, 7, 8]
    assert Clip(path, VideoSettings(fps=None, num_frames=4)).numbers == [0, 6, 7, 8]


@pytest.mark.parametrize("name", ["a.ts", "a.mpg", "a.mkv"])
def test_clips_that_were_joined_byte_by_byte_are_refused(tmp_path, name):
    """Their frames would be laid over each other in time, and the clip be read as half as long."""
    one, joined = tmp_path / name, tmp_path / f"joined-{name}"
    encoded(one, range(20), codec="mpeg2video", fps=25)
    assert Clip(one, UNIFORM).total == 20
    joined.write_bytes(one.read_bytes() * 2)
    fails_with("corrupt clip: its time begins anew after 2. frames", Clip, joined, UNIFORM)


def test_a_cover_picture_is_not_the_clip(tmp_path):
    clip = Clip(encoded(tmp_path / "cover.mp4", range(12), cover=True), UNIFORM)
    assert clip.total == 12 and clip.size == (64, 48) and numbers_of(clip.frames()) == clip.numbers


@pytest.mark.parametrize("rotation", [90, 180, -90])
def test_frames_are_turned_as_players_turn_them(tmp_path, rotation):
    path = encoded(tmp_path / "phone.mp4", range(5), rotation=rotation)
    clip, stored = Clip(path, UNIFORM), Clip(encoded(tmp_path / "plain.mp4", range(5)), UNIFORM).frames()
    assert clip.size == ((64, 48) if rotation == 180 else (48, 64))
    assert clip.frames() == [image.rotate(rotation, expand=True) for image in stored]


def as_stored(a: float, b: float, c: float, d: float) -> bytes:
    """A display matrix, as MP4 has it."""
    return struct.pack(">9i", *(int(number * 2**16) for number in (a, b, 0, c, d, 0, 0, 0, 2**14)))


@pytest.mark.parametrize("matrix", [(-1, 0, 0, 1), (1, 0, 0, -1), (0, 1, 1, 0), (0.7, 0.7, -0.7, 0.7)])
def test_a_clip_that_players_mirror_or_tilt_is_refused(tmp_path, matrix):
    path = encoded(tmp_path / "a.mp4", range(5))
    movie, head, track = path.read_bytes().partition(b"tkhd")
    path.write_bytes(movie + head + track.replace(as_stored(1, 0, 0, 1), as_stored(*matrix)))
    fails_with("mirrored or tilted", Clip, path, UNIFORM)


def test_a_short_clip_is_refused(tmp_path):
    write_clip(tmp_path / "short.mp4", frames(3), fps=5)
    assert Clip(tmp_path / "short.mp4", VideoSettings(min_frames=3)).numbers == [0]
    with pytest.raises(UserError, match=r"3 frames, fewer than min_frames 4\n.*short.mp4\n  hint:  remove"):
        Clip(tmp_path / "short.mp4", VideoSettings(min_frames=4))


@pytest.mark.parametrize("text", ["hello", "", "#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\na.mp4\n#EXT-X-ENDLIST\n",
                                  "ffconcat version 1.0\nfile a.mp4\n"])  # fmt: skip
def test_files_that_are_no_clips(path, tmp_path, text):
    """A playlist would make the reader open what it names."""
    (tmp_path / "b.mp4").write_text(text)
    fails_with("corrupt clip", Clip, tmp_path / "b.mp4", UNIFORM)


def test_a_frame_of_too_many_pixels_is_refused(path, monkeypatch):
    clip = Clip(path, UNIFORM)
    monkeypatch.setattr(videos, "MAX_PIXELS", 1000)
    fails_with(r"too many pixels: a frame has 64 x 48, and 1,000 is the limit\n.*a\.mp4", Clip, path, UNIFORM)
    fails_with("too many pixels: a frame", clip.frames)
    monkeypatch.undo()
    monkeypatch.setattr(videos, "MAX_TAKEN", 64 * 48 * 8 - 1)
    fails_with("the 8 frames taken of the clip have 512 x 48", clip.frames)


def test_damaged_clips_end_in_one_kind_of_error(path, tmp_path):
    """Cut off or with bytes changed: read, or refused by name, and never another exception or fewer frames."""
    data, rng, damaged_path = path.read_bytes(), random.Random(0), tmp_path / "damaged.mp4"
    refused = []
    for attempt in range(120):
        damaged = bytearray(data)
        if attempt % 2:
            damaged = damaged[: rng.randrange(len(data))]
        else:
            for _ in range(rng.randint(1, 20)):
                damaged[rng.randrange(len(data))] = rng.randrange(256)
        damaged_path.write_bytes(damaged)
        try:
            clip = Clip(damaged_path, UNIFORM)
            assert len(clip.frames()) == len(clip.numbers)
        except UserError as error:
            refused.append(error)
    assert len(refused) > 50
    assert all(str(damaged_path) in str(error) and error.hint for error in refused)


def test_the_decoder_refuses_a_size_that_the_head_did_not_say(path, monkeypatch):
    """The limit is the decoder's own, too: a stream may grow after its head."""
    clip = Clip(path, UNIFORM)
    monkeypatch.setattr(videos, "MAX_PIXELS", 1000)
    monkeypatch.setattr(videos, "check_area", lambda *_: None)
    fails_with("corrupt clip", clip.frames)


def test_the_same_frames_make_the_same_file(path, tmp_path):
    write_clip(tmp_path / "again.mp4", frames(25), fps=5)
    assert (tmp_path / "again.mp4").read_bytes() == path.read_bytes()
