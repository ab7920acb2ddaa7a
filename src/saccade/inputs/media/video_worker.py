"""A program that decodes one video, in a process of its own, with little memory and time to its name.

takes   (arguments) the descriptor that holds the video, its container, limits of memory and CPU seconds;
        (stdin) one line of JSON: which frames, at which size
gives   (stdout) one line of JSON: frames, fps, width, height of the video; then the frames, raw RGB
never   imports anything of ours; opens a file or a connection; writes a file

It is run by path, so that starting it costs only what it imports. What it says is checked by who started it.
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
# By quarters of a turn against the clock.
TURNS = (None, Image.Transpose.ROTATE_90, Image.Transpose.ROTATE_180, Image.Transpose.ROTATE_270)


def main() -> int:
    descriptor, container_format, memory, seconds = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
    confine(int(memory), int(seconds))
    with os.fdopen(descriptor, "rb") as video:
        print_line(probe(video, container_format))
        wanted = json.loads(sys.stdin.buffer.readline())
        for picture in pictures(video, container_format, wanted["indices"], tuple(wanted["size"])):
            sys.stdout.buffer.write(picture)
    sys.stdout.buffer.flush()
    return 0


def confine(memory: int, seconds: int) -> None:
    """Limits this process; the kernel ends it when it goes beyond."""
    for what, limit in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (limit, limit))


def print_line(value: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(value).encode() + b"\n")
    sys.stdout.buffer.flush()


def opened(video: BinaryIO, container_format: str) -> Any:
    """The container, read by exactly this demuxer, which may open nothing else."""
    video.seek(0)
    return av.open(video, format=container_format, options={"protocol_whitelist": "none"})


def probe(video: BinaryIO, container_format: str) -> dict[str, Any]:
    """Counts the frames that are really there; what the header claims is not trusted."""
    with opened(video, container_format) as container:
        stream = container.streams.video[0]
        frames = 0
        for packet in container.demux(stream):
            frames += packet.size > 0
            if frames > MAX_PACKETS:
                break
        rate = stream.average_rate or stream.guessed_rate
        size = stream.codec_context.width, stream.codec_context.height
    with opened(video, container_format) as container:
        turned = turn(next(container.decode(video=0))) in (TURNS[1], TURNS[3])
    width, height = size[::-1] if turned else size
    return {"frames": frames, "fps": float(rate) if rate else 0.0, "width": width, "height": height}


def turn(frame: Any) -> Image.Transpose | None:
    """How to turn a frame upright: cameras store it as it fell on the sensor, and note the angle."""
    return TURNS[round(frame.rotation / 90) % 4]


def pictures(
    video: BinaryIO, container_format: str, indices: list[int], size: tuple[int, int]
) -> Iterator[bytes]:
    """The frames asked for (ascending), as raw RGB; where the video ends early, its last frame stands in.

    They come upright, at their own size or resized to `size` with Pillow's bicubic filter, as pictures are.
    """
    last = b""
    given = 0
    with opened(video, container_format) as container:
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        stream.codec_context.thread_count = min(THREADS, os.cpu_count() or 1)
        own = stream.codec_context.width, stream.codec_context.height
        for number, frame in enumerate(container.decode(stream)):
            if number < indices[given]:
                continue
            turned = turn(frame)
            image = Image.fromarray(frame.reformat(width=own[0], height=own[1], format="rgb24").to_ndarray())
            image = image if turned is None else image.transpose(turned)
            last = (image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)).tobytes()
            while given < len(indices) and indices[given] == number:
                yield last
                given += 1
            if given == len(indices):
                return
    if 2 * given < len(indices):
        raise ValueError("most frames are missing")
    for _ in range(len(indices) - given):
        yield last


if __name__ == "__main__":
    sys.exit(main())
