"""A program that decodes one video in its own process, with little memory and CPU time.

Arguments: the descriptor that holds the video, its container format, limits of bytes and CPU seconds. It
writes one line of JSON (frames, fps, width, height), reads one (which frames, at which size) and writes the
frames as raw RGB. It imports nothing of the package, so that it starts quickly, and opens no file or
connection. The parent checks what it writes.
"""

import json
import os
import resource
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO

import av
from PIL import Image

MAX_PACKETS = 2_000_000  # over 9 hours at 60 frames per second
THREADS = 4
# By quarter turns counter-clockwise.
ROTATIONS = (None, Image.Transpose.ROTATE_90, Image.Transpose.ROTATE_180, Image.Transpose.ROTATE_270)


def main() -> int:
    descriptor, container_format, memory, seconds = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
    set_limits(int(memory), int(seconds))
    with os.fdopen(descriptor, "rb") as video:
        print_line(probe(video, container_format))
        wanted = json.loads(sys.stdin.buffer.readline())
        for frame in decode_frames(video, container_format, wanted["indices"], tuple(wanted["size"])):
            sys.stdout.buffer.write(frame)
    sys.stdout.buffer.flush()
    return 0


def set_limits(memory: int, seconds: int) -> None:
    """Sets limits of this process that the kernel enforces."""
    for kind, limit in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))


def print_line(value: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(value).encode() + b"\n")
    sys.stdout.buffer.flush()


def open_container(video: BinaryIO, container_format: str) -> Any:
    """Opens the container with exactly this demuxer, which may open nothing else."""
    video.seek(0)
    return av.open(video, format=container_format, options={"protocol_whitelist": "none"})


def probe(video: BinaryIO, container_format: str) -> dict[str, Any]:
    """Counts the frames; the header is not trusted."""
    with open_container(video, container_format) as container:
        stream = container.streams.video[0]
        frames = 0
        for packet in container.demux(stream):
            frames += packet.size > 0
            if frames > MAX_PACKETS:
                break
        rate = stream.average_rate or stream.guessed_rate
        size = stream.codec_context.width, stream.codec_context.height
    with open_container(video, container_format) as container:
        rotated = rotation(next(container.decode(video=0))) in (ROTATIONS[1], ROTATIONS[3])
    width, height = size[::-1] if rotated else size
    return {"frames": frames, "fps": float(rate) if rate else 0.0, "width": width, "height": height}


def rotation(frame: Any) -> Image.Transpose | None:
    """How to rotate a frame upright: cameras store the sensor's orientation and note the angle."""
    return ROTATIONS[round(frame.rotation / 90) % 4]


def decode_frames(
    video: BinaryIO, container_format: str, indices: list[int], size: tuple[int, int]
) -> Iterator[bytes]:
    """The frames at ascending `indices` as raw RGB, upright, resized to `size` with Pillow's bicubic filter.

    If the video ends early, its last frame is repeated.
    """
    last = b""
    returned = 0
    with open_container(video, container_format) as container:
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        stream.codec_context.thread_count = min(THREADS, os.cpu_count() or 1)
        own = stream.codec_context.width, stream.codec_context.height
        for number, frame in enumerate(container.decode(stream)):
            if number < indices[returned]:
                continue
            rotated = rotation(frame)
            image = Image.fromarray(frame.reformat(width=own[0], height=own[1], format="rgb24").to_ndarray())
            image = image if rotated is None else image.transpose(rotated)
            last = (image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)).tobytes()
            while returned < len(indices) and indices[returned] == number:
                yield last
                returned += 1
            if returned == len(indices):
                return
    if 2 * returned < len(indices):
        raise ValueError("most frames are missing")
    for _ in range(len(indices) - returned):
        yield last


if __name__ == "__main__":
    sys.exit(main())
