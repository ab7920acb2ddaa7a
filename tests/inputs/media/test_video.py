"""Videos of anybody: decoded in a confined process, sampled as the reference does, bounded."""

import io
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from saccade.config import MediaLimits
from saccade.errors import MediaRefused
from saccade.inputs.media import video as room
from saccade.inputs.media.video import decode_video, from_frames, sniff_video
from saccade.request import Pixels
from tests.inputs.test_image_processor import video as processing

LIMITS = MediaLimits()


def frames(count: int, width: int = 64, height: int = 48) -> Pixels:
    """Plain grey frames, each five brighter than the one before."""
    levels = (np.arange(count) * 5 % 250).astype(np.uint8)
    return np.broadcast_to(levels[:, None, None, None], (count, height, width, 3)).copy()


def encoded(images: Pixels, kind: str = "mp4", codec: str = "libx264", fps: int = 10) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=fps)
        stream.height, stream.width = images.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for image in images:
            for packet in stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("kind", "codec"),
    [("mp4", "mpeg4"), ("mp4", "libx264"), ("mov", "libx264"), ("webm", "libvpx"), ("matroska", "libx264")],
)
def test_every_container_returns_the_right_frames(kind: str, codec: str) -> None:
    source = frames(41)
    found = decode_video(encoded(source, kind, codec), processing(), LIMITS)
    assert found.fps == 10.0
    assert list(found.indices) == processing().sample(41, 10.0, 768)
    assert found.frames.shape == (8, 48, 64, 3)
    assert found.frames.dtype == np.uint8
    difference = found.frames.astype(int) - source[list(found.indices)].astype(int)
    assert np.abs(difference).mean() < 4  # lossy, but never the neighbouring frame


def test_an_animated_gif_is_a_video_too() -> None:
    images = [Image.new("RGB", (16, 16), (value, 0, 0)) for value in range(0, 200, 10)]
    buffer = io.BytesIO()
    images[0].save(buffer, "GIF", save_all=True, append_images=images[1:], duration=100)
    found = decode_video(buffer.getvalue(), processing(), LIMITS)
    assert len(found.indices) == 4
    assert [int(one[0, 0, 0]) for one in found.frames] == [10 * index for index in found.indices]


def test_the_limit_of_frames_holds() -> None:
    found = decode_video(encoded(frames(60)), processing(), MediaLimits(max_frames=5))
    assert found.indices == (0, 15, 30, 44, 59)
    assert len(found.frames) == 5


def test_a_video_of_one_frame_is_taken() -> None:
    found = decode_video(encoded(frames(1)), processing(), LIMITS)
    assert found.indices == (0,)


def test_many_large_frames_are_resized_while_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    source = np.random.default_rng(0).integers(0, 256, (8, 90, 160, 3), dtype=np.uint8)
    data = encoded(source)
    rule = processing(least=1024, most=8 * 64 * 32)
    whole = decode_video(data, rule, LIMITS)
    monkeypatch.setattr(room, "FRAME_BYTES", 8 * 64 * 64 * 3)
    small = decode_video(data, rule, LIMITS)
    rows, columns = rule.grid(160, 90, len(whole.indices))
    size = columns * 16, rows * 16
    assert small.frames.shape[1:3] == (size[1], size[0])
    expected = [
        np.asarray(Image.fromarray(one).resize(size, Image.Resampling.BICUBIC)) for one in whole.frames
    ]
    np.testing.assert_array_equal(small.frames, np.stack(expected))
    monkeypatch.setattr(room, "FRAME_BYTES", 1000)
    with pytest.raises(MediaRefused, match="shorter video"):
        decode_video(data, rule, LIMITS)


def test_a_header_that_claims_a_million_frames_is_not_trusted() -> None:
    data = bytearray(encoded(frames(20), codec="mpeg4"))
    # Durations and the table of times are where an MP4 claims how many frames it has.
    place = data.index(b"stts") + 8
    entries, count, span = struct.unpack(">III", data[place : place + 12])
    assert (entries, count) == (1, 20)
    data[place : place + 12] = struct.pack(">III", 1, 1_000_000, span)
    for name, offset in ((b"mvhd", 16), (b"mdhd", 16)):
        at = data.index(name) + 4 + offset
        data[at : at + 4] = struct.pack(">I", 0x7FFFFFFF)
    found = decode_video(bytes(data), processing(), LIMITS)
    assert found.frames.shape[0] <= 20
    assert max(found.indices) < 20


def test_a_video_that_claims_more_frames_than_it_holds_is_bounded() -> None:
    data = bytearray(encoded(frames(20), codec="mpeg4"))
    place = data.index(b"stsz") + 12
    assert struct.unpack(">I", data[place : place + 4]) == (20,)
    data[place : place + 4] = struct.pack(">I", 100_000_000)
    try:
        found = decode_video(bytes(data), processing(), MediaLimits(max_frames=16))
    except MediaRefused:
        return
    assert len(found.frames) <= 16


@pytest.mark.parametrize(
    ("matrix", "quarters"), [((0, 1, -1, 0), 3), ((-1, 0, 0, -1), 2), ((0, -1, 1, 0), 1)]
)
def test_rotated_videos_are_decoded_upright(matrix: tuple[int, ...], quarters: int) -> None:
    source = np.zeros((4, 48, 64, 3), np.uint8)
    source[:, :24, :32] = 250  # the upper left is bright
    data = bytearray(encoded(source))
    place = data.index(b"tkhd") + 44  # of the matrix in the track's header, nine fixed-point numbers
    a, b, c, d = (one << 16 for one in matrix)
    data[place : place + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    found = decode_video(bytes(data), processing(), LIMITS).frames
    expected = np.rot90(source, quarters, axes=(1, 2))
    assert found.shape == expected.shape
    assert np.abs(found.astype(int) - expected.astype(int)).mean() < 4


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("kind", ["mp4", "matroska"])
def test_cut_off_videos_are_refused_or_shortened(kind: str, part: float) -> None:
    data = encoded(frames(40), kind)
    try:
        found = decode_video(data[: int(len(data) * part)], processing(), LIMITS)
    except MediaRefused:
        return
    assert found.frames.shape[1:] == (48, 64, 3)


def test_damaged_videos_are_refused_or_decoded() -> None:
    data = encoded(frames(12))
    draw = np.random.default_rng(1)
    for _ in range(6):
        work = bytearray(data)
        for place in draw.integers(16, len(work), 40):
            work[place] = draw.integers(0, 256)
        try:
            found = decode_video(bytes(work), processing(), LIMITS)
        except MediaRefused:
            continue
        assert found.frames.ndim == 4


@pytest.mark.parametrize(
    "data", [b"", b"not a video", b"\0\0\0\x18ftypmp42", b"\x1a\x45\xdf\xa3", b"#EXTM3U\nfile:///etc/passwd"]
)
def test_bytes_that_are_not_a_video_are_refused(data: bytes) -> None:
    with pytest.raises(MediaRefused):
        decode_video(data, processing(), LIMITS)


def test_too_many_bytes_or_pixels_are_refused() -> None:
    data = encoded(frames(4))
    with pytest.raises(MediaRefused, match="at most 100"):
        decode_video(data, processing(), MediaLimits(max_video_bytes=100))
    with pytest.raises(MediaRefused, match="at most 1000 pixels"):
        decode_video(data, processing(), MediaLimits(max_pixels=1000))


def test_a_decoder_that_takes_too_long_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = tmp_path / "stuck.py"
    stuck.write_text("import time\ntime.sleep(600)")
    started: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    monkeypatch.setattr(room, "WORKER", stuck)
    monkeypatch.setattr(room, "WORKER_SECONDS", 0.3)
    with pytest.raises(MediaRefused, match="memory or time"):
        decode_video(encoded(frames(4)), processing(), LIMITS)
    assert len(started) == 1
    assert started[0].poll() is not None


@pytest.mark.parametrize(
    "said", ["nonsense", "[1]", "{}", '{"frames": -1}', '{"frames": 5, "fps": 1.0, "width": 8, "height": 8}']
)
def test_malformed_decoder_output_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    liar = tmp_path / "liar.py"
    liar.write_text(f"print({said!r})")
    monkeypatch.setattr(room, "WORKER", liar)
    with pytest.raises(MediaRefused):
        decode_video(encoded(frames(4)), processing(), LIMITS)


def test_the_decoder_process_has_resource_limits() -> None:
    """The limits are set by the worker itself before it reads a byte."""
    program = f"""
import importlib.util, resource
spec = importlib.util.spec_from_file_location("worker", {str(room.WORKER)!r})
worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(worker)
worker.set_limits(1 << 30, 7)
kinds = resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE
print([resource.getrlimit(kind)[1] for kind in kinds])
try:
    bytearray(2 << 30)
except MemoryError:
    print("no memory")
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.split("\n")[:2] == [f"[{1 << 30}, 7, 0]", "no memory"]


def test_given_frames_are_sampled_by_the_same_rule() -> None:
    source = frames(41)
    found = from_frames(source, 10.0, processing(), LIMITS)
    assert list(found.indices) == processing().sample(41, 10.0, 768)
    np.testing.assert_array_equal(found.frames, source[list(found.indices)])
    as_list = from_frames([Image.fromarray(one) for one in source], 10.0, processing(), LIMITS)
    np.testing.assert_array_equal(as_list.frames, found.frames)
    assert from_frames(source, None, processing(), LIMITS).fps == 24.0


@pytest.mark.parametrize(
    ("given", "fps"),
    [
        (np.zeros((2, 4, 4), np.uint8), 1.0),
        (np.zeros((2, 4, 4, 3), np.float32), 1.0),
        (np.zeros((0, 4, 4, 3), np.uint8), 1.0),
        ([], 1.0),
        ([np.zeros((4, 4, 3), np.uint8), np.zeros((5, 4, 3), np.uint8)], 1.0),
        (np.zeros((2, 4, 4, 3), np.uint8), 0.0),
        (np.zeros((2, 4, 4, 3), np.uint8), float("nan")),
    ],
)
def test_frames_of_other_kinds_are_refused(given: Any, fps: float) -> None:
    with pytest.raises(MediaRefused):
        from_frames(given, fps, processing(), LIMITS)


def test_containers_are_known_by_their_first_bytes() -> None:
    assert sniff_video(encoded(frames(2), "mov")) == "mp4"
    assert sniff_video(encoded(frames(2), "webm", "libvpx")) == "matroska"
    assert sniff_video(b"RIFF\0\0\0\0AVI ") is None
