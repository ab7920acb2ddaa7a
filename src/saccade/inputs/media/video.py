"""Videos to sampled frames.

takes   encoded bytes of anybody, or frames of the library's user
gives   uint8 [frames, height, width, 3], which frames they are, and how many pass in a second
never   decodes in this process; believes what a header claims; keeps more than `FRAME_BYTES` of frames

The decoder is a process with limits on memory and time (video_worker.py). It is told which frames to give and
answers with raw pixels of the size that was agreed, so nothing it writes is interpreted.
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
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray

from saccade.config import MediaLimits
from saccade.errors import MediaRefused
from saccade.inputs.image_processor import DEFAULT_FPS, VideoProcessing
from saccade.inputs.media.cancellation import CancelToken, FairSemaphore
from saccade.inputs.media.decode import sniff
from saccade.request import Pixels

Container = Literal["mp4", "matroska", "gif"]

WORKER = Path(__file__).with_name("video_worker.py")
WORKER_BYTES = 4 << 30  # address space of the decoder
WORKER_CPU_SECONDS = 120
WORKER_SECONDS = 120.0  # from start to the last frame
DECODERS = 4  # at once; others wait for a place
FRAME_BYTES = 256 << 20  # frames kept at the video's own size; beyond, they are resized as they are decoded
_LINE = 1 << 16  # bytes of the worker's first line, at most
# Nothing of ours; and on machines with many cores, no address space for threads that are not used.
_ENVIRONMENT = {"PATH": os.defpath, "MALLOC_ARENA_MAX": "2", "OPENBLAS_NUM_THREADS": "1"}
_PLACES = FairSemaphore(DECODERS)


@dataclass(frozen=True)
class SampledFrames:
    """Sampled frames of one video."""

    frames: Pixels  # [count, height, width, 3]
    indices: tuple[int, ...]  # which frames of the video they are, ascending
    fps: float  # of the video


@dataclass(frozen=True)
class _Facts:
    frames: int
    fps: float
    width: int
    height: int


def sniff_video(data: bytes) -> Container | None:
    """The container by its first bytes; None when it is not one of the allowed."""
    if data[4:8] == b"ftyp":
        return "mp4"  # and mov
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"  # and webm
    return None


def decode_video(
    data: bytes,
    processing: VideoProcessing,
    limits: MediaLimits,
    cancel: CancelToken | None = None,
    admit: Callable[[int, int, int], None] | None = None,
) -> SampledFrames:
    """Frames of an encoded video, sampled by the checkpoint's rule.

    `admit` is told their number, width and height before they are decoded, and may refuse them.
    """
    cancel = cancel or CancelToken()
    if len(data) > limits.max_video_bytes:
        raise MediaRefused(f"The video has {len(data)} bytes; at most {limits.max_video_bytes} are allowed.")
    container = "gif" if sniff(data) == "GIF" else sniff_video(data)
    if container is None:
        raise MediaRefused("The video is of no known format; send MP4, MOV, WebM, Matroska or GIF.")
    with _PLACES.holding(1, cancel, WORKER_SECONDS), _worker(data, container, cancel) as worker:
        facts = _facts(_line(worker))
        _check(facts, limits)
        indices = processing.sample(facts.frames, facts.fps, limits.max_frames)
        width, height = _agreed_size(facts, len(indices), processing)
        if admit is not None:
            admit(len(indices), width, height)
        _tell(worker, {"indices": indices, "size": [width, height]})
        frames = np.empty((len(indices), height, width, 3), dtype=np.uint8)
        _fill(worker, frames.reshape(-1).data)
    return SampledFrames(frames, tuple(indices), facts.fps)


def from_frames(
    frames: NDArray[np.generic] | Sequence[Any],
    fps: float | None,
    processing: VideoProcessing,
    limits: MediaLimits,
    admit: Callable[[int, int, int], None] | None = None,
) -> SampledFrames:
    """Frames somebody decoded already, [count, height, width, 3] of uint8, sampled by the same rule."""
    array = frames if isinstance(frames, np.ndarray) else _stacked(frames)
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[3] != 3:
        shape = "x".join(map(str, array.shape))
        raise MediaRefused(
            f"The video is an array of {array.dtype}, {shape}; give uint8, frames x height x width x 3."
        )
    rate = DEFAULT_FPS if fps is None else float(fps)
    if not 0 < rate < float("inf"):
        raise MediaRefused(f"The video has {fps} frames per second; give a positive number.")
    facts = _Facts(array.shape[0], rate, array.shape[2], array.shape[1])
    _check(facts, limits)
    indices = processing.sample(facts.frames, rate, limits.max_frames)
    if admit is not None:
        admit(len(indices), facts.width, facts.height)
    return SampledFrames(np.ascontiguousarray(array[indices]), tuple(indices), rate)


def _stacked(frames: Sequence[Any]) -> NDArray[np.generic]:
    arrays = [np.asarray(frame) for frame in frames]
    if not arrays or any(one.shape != arrays[0].shape for one in arrays):
        raise MediaRefused("The video's frames are not all of one size, or there are none.")
    return np.stack(arrays)


def _agreed_size(facts: _Facts, count: int, processing: VideoProcessing) -> tuple[int, int]:
    """The source's own size, unless all frames at that size are too much to keep; then the model's size."""
    rows, columns = processing.grid(facts.width, facts.height, count)
    if count * facts.width * facts.height * 3 <= FRAME_BYTES:
        return facts.width, facts.height
    width, height = columns * processing.patch_size, rows * processing.patch_size
    if count * width * height * 3 > FRAME_BYTES:
        raise MediaRefused(f"{count} frames of {width}x{height} pixels are too much; send a shorter video.")
    return width, height


def _check(facts: _Facts, limits: MediaLimits) -> None:
    if facts.frames < 1 or facts.width < 1 or facts.height < 1:
        raise MediaRefused("The video has no frames.")
    if facts.width * facts.height > limits.max_pixels:
        raise MediaRefused(
            f"The video is {facts.width}x{facts.height}; at most {limits.max_pixels} pixels are allowed."
        )


# --- the worker --------------------------------------------------------------------------------------------


class _Worker:
    def __init__(self, process: "subprocess.Popen[bytes]", stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self.process = process
        self.stdin = stdin
        self.stdout = stdout


_DAMAGED = "The video is damaged, or takes more memory or time to decode than it may."


@contextlib.contextmanager
def _worker(data: bytes, container: Container, cancel: CancelToken) -> Iterator[_Worker]:
    """A decoder for these bytes, ended when we are done with it or its time is over."""
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
        alarm = threading.Timer(WORKER_SECONDS, process.kill)
        alarm.start()
        try:
            if process.stdin is None or process.stdout is None:
                raise MediaRefused(_DAMAGED)
            with cancel.on_cancel(process.kill):
                yield _Worker(process, process.stdin, process.stdout)
        except MediaRefused:
            cancel.raise_if_cancelled()  # a decoder that was ended looks like one that failed
            raise
        finally:
            alarm.cancel()
            process.kill()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            process.wait()


def _line(worker: _Worker) -> dict[str, Any]:
    text = worker.stdout.readline(_LINE)
    try:
        value = json.loads(text)
    except ValueError:
        raise MediaRefused(_DAMAGED) from None
    return value if isinstance(value, dict) else {}


def _facts(said: dict[str, Any]) -> _Facts:
    numbers = [said.get(name) for name in ("frames", "width", "height")]
    fps = said.get("fps")
    if not all(type(one) is int and 0 <= one < 1 << 40 for one in numbers) or not isinstance(fps, float):
        raise MediaRefused(_DAMAGED)
    frames, width, height = (int(one) for one in numbers if one is not None)
    # A rate that cannot be is treated as one that is not known.
    return _Facts(frames, fps if 0.001 <= fps <= 1000 else DEFAULT_FPS, width, height)


def _tell(worker: _Worker, value: dict[str, Any]) -> None:
    try:
        worker.stdin.write(json.dumps(value).encode() + b"\n")
        worker.stdin.flush()
    except OSError:
        raise MediaRefused(_DAMAGED) from None


def _fill(worker: _Worker, buffer: memoryview) -> None:
    """Reads exactly as many bytes as were agreed."""
    place = 0
    while place < len(buffer):
        count = os.readv(worker.stdout.fileno(), [buffer[place : place + (1 << 20)]])
        if count == 0:
            raise MediaRefused(_DAMAGED)
        place += count
