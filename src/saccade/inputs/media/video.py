"""Videos to sampled frames, decoded in a subprocess (video_worker.py) with limits on memory and time.

The worker gets the indices of the frames and answers with raw pixels of the agreed size, so nothing it writes
is parsed but one line of JSON. Headers are not trusted, and at most `FRAME_BYTES` of frames are kept.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, Literal, NamedTuple, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from saccade.config import MediaLimits
from saccade.errors import MediaRefused
from saccade.inputs.image_processor import VideoProcessor
from saccade.inputs.media.cancellation import CancelToken, FairSemaphore
from saccade.inputs.media.decode import sniff
from saccade.request import Pixels

Container = Literal["mp4", "matroska", "gif"]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]

WORKER = Path(__file__).with_name("video_worker.py")
WORKER_BYTES = 4 << 30  # address space of the decoder
WORKER_CPU_SECONDS = 120
WORKER_SECONDS = 120.0  # from start to the last frame
DEFAULT_FPS = 24.0  # of frames given without a rate
DECODERS = 4  # at once; others wait
FRAME_BYTES = 256 << 20  # of frames kept at the video's own size; more are resized as they are decoded
_LINE = 1 << 16  # bytes of the worker's first line, at most
# Nothing of the parent's; the limits save address space on machines with many cores.
_ENVIRONMENT = {"PATH": os.defpath, "MALLOC_ARENA_MAX": "2", "OPENBLAS_NUM_THREADS": "1"}
_DECODER_SLOTS = FairSemaphore(DECODERS)


@dataclass(frozen=True)
class SampledFrames:
    """Sampled frames of one video."""

    frames: Pixels  # [count, height, width, 3]
    indices: tuple[int, ...]  # which frames of the video they are, ascending
    fps: float  # of the video
    total: int  # frames of the video


class _Probe(msgspec.Struct, frozen=True):
    """What the worker reports about a video."""

    frames: Count
    fps: float
    width: Count
    height: Count


def sniff_video(data: bytes) -> Container | None:
    """The container by its first bytes; None if it is not allowed."""
    if data[4:8] == b"ftyp":
        return "mp4"  # and mov
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"  # and webm
    return None


def decode_video(
    data: bytes,
    processor: VideoProcessor,
    limits: MediaLimits,
    cancel: CancelToken | None = None,
    admit: Callable[[int, int, int], None] | None = None,
) -> SampledFrames:
    """Sampled frames of an encoded video.

    `admit` gets their number, width and height before they are decoded, and may raise.
    """
    cancel = cancel or CancelToken()
    if len(data) > limits.max_video_bytes:
        raise MediaRefused(f"The video has {len(data)} bytes; at most {limits.max_video_bytes} are allowed.")
    container = "gif" if sniff(data) == "GIF" else sniff_video(data)
    if container is None:
        raise MediaRefused("The video is of no known format; send MP4, MOV, WebM, Matroska or GIF.")
    with _DECODER_SLOTS.holding(1, cancel, WORKER_SECONDS), _worker(data, container, cancel) as worker:
        probe = _read_probe(worker)
        _check(probe, limits)
        indices = processor.sample(probe.frames, probe.fps, limits.max_frames)
        width, height = _agreed_size(probe, len(indices), processor)
        if admit is not None:
            admit(len(indices), width, height)
        _send(worker, {"indices": indices, "size": [width, height]})
        frames = np.empty((len(indices), height, width, 3), dtype=np.uint8)
        _fill(worker, frames.reshape(-1).data)
    return SampledFrames(frames, tuple(indices), probe.fps, probe.frames)


def from_frames(
    frames: NDArray[np.generic] | Sequence[Any],
    fps: float | None,
    processor: VideoProcessor,
    limits: MediaLimits,
    admit: Callable[[int, int, int], None] | None = None,
) -> SampledFrames:
    """Sampled frames of a decoded video, uint8 [count, height, width, 3]."""
    array = frames if isinstance(frames, np.ndarray) else _stacked(frames)
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[3] != 3:
        shape = "x".join(map(str, array.shape))
        raise MediaRefused(
            f"The video is an array of {array.dtype}, {shape}; give uint8, frames x height x width x 3."
        )
    rate = DEFAULT_FPS if fps is None else float(fps)
    if not 0 < rate < float("inf"):
        raise MediaRefused(f"The video has {fps} frames per second; give a positive number.")
    probe = _Probe(array.shape[0], rate, array.shape[2], array.shape[1])
    _check(probe, limits)
    indices = processor.sample(probe.frames, rate, limits.max_frames)
    if admit is not None:
        admit(len(indices), probe.width, probe.height)
    return SampledFrames(np.ascontiguousarray(array[indices]), tuple(indices), rate, probe.frames)


def _stacked(frames: Sequence[Any]) -> NDArray[np.generic]:
    arrays = [np.asarray(frame) for frame in frames]
    if not arrays or any(one.shape != arrays[0].shape for one in arrays):
        raise MediaRefused("The video's frames are not all of one size, or there are none.")
    return np.stack(arrays)


def _agreed_size(probe: _Probe, count: int, processor: VideoProcessor) -> tuple[int, int]:
    """The video's own size, or the model's if all frames at their own size exceed `FRAME_BYTES`."""
    rows, columns = processor.grid(probe.width, probe.height, count)
    if count * probe.width * probe.height * 3 <= FRAME_BYTES:
        return probe.width, probe.height
    width, height = columns * processor.patch_size, rows * processor.patch_size
    if count * width * height * 3 > FRAME_BYTES:
        raise MediaRefused(f"{count} frames of {width}x{height} pixels are too much; send a shorter video.")
    return width, height


def _check(probe: _Probe, limits: MediaLimits) -> None:
    if probe.frames < 1 or probe.width < 1 or probe.height < 1:
        raise MediaRefused("The video has no frames.")
    if probe.width * probe.height > limits.max_pixels:
        raise MediaRefused(
            f"The video is {probe.width}x{probe.height}; at most {limits.max_pixels} pixels are allowed."
        )


# --- the worker --------------------------------------------------------------------------------------------


class _Worker(NamedTuple):
    stdin: IO[bytes]
    stdout: IO[bytes]


_DAMAGED = "The video is damaged, or takes more memory or time to decode than it may."


@contextlib.contextmanager
def _worker(data: bytes, container: Container, cancel: CancelToken) -> Iterator[_Worker]:
    """A decoder process for these bytes; it is killed at the end or after `WORKER_SECONDS`."""
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        command = [sys.executable, "-I", str(WORKER), str(file.fileno()), container]
        process = subprocess.Popen(
            [*command, str(WORKER_BYTES), str(WORKER_CPU_SECONDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[file.fileno()],
            env=_ENVIRONMENT,
            start_new_session=True,
        )
        worker = _Worker(cast("IO[bytes]", process.stdin), cast("IO[bytes]", process.stdout))
        timer = threading.Timer(WORKER_SECONDS, process.kill)
        timer.start()
        try:
            with cancel.on_cancel(process.kill):
                yield worker
        except MediaRefused:
            cancel.raise_if_cancelled()  # a decoder that was killed looks like one that failed
            raise
        finally:
            timer.cancel()
            process.kill()
            for pipe in worker:
                with contextlib.suppress(OSError):
                    pipe.close()
            process.wait()


def _read_probe(worker: _Worker) -> _Probe:
    try:
        probe = msgspec.json.decode(worker.stdout.readline(_LINE), type=_Probe)
    except msgspec.DecodeError:
        raise MediaRefused(_DAMAGED) from None
    # An impossible rate is treated as unknown.
    return probe if 0.001 <= probe.fps <= 1000 else msgspec.structs.replace(probe, fps=DEFAULT_FPS)


def _send(worker: _Worker, value: dict[str, Any]) -> None:
    try:
        worker.stdin.write(json.dumps(value).encode() + b"\n")
        worker.stdin.flush()
    except OSError:
        raise MediaRefused(_DAMAGED) from None


def _fill(worker: _Worker, buffer: memoryview) -> None:
    """Reads exactly as many bytes as the buffer has."""
    filled = 0
    while filled < len(buffer):
        count = os.readv(worker.stdout.fileno(), [buffer[filled : filled + (1 << 20)]])
        if count == 0:
            raise MediaRefused(_DAMAGED)
        filled += count
