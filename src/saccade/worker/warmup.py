"""Before the first request: everything that is slow the first time a picture of a common size comes.

takes   an encoder, and what the checkpoint does to pictures
gives   nothing; the kernels are compiled, plans and tables made, staging memory pinned, the tower captured
never   fails a start: what cannot be captured runs without
"""

from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from saccade.encoder.encoder_runner import EncoderRunner
from saccade.inputs.image_processor import ImageProcessor, plain_view
from saccade.step_plan import EncodeTask

# Width, height. Sizes of as many patches are captured once. The last is the largest that is captured.
SIZES = (
    (448, 448),
    (512, 512),
    (640, 480),
    (480, 640),
    (768, 768),
    (1024, 768),
    (1024, 1024),
    (1280, 720),
    (1920, 1080),
)
# Every way of resizing, at widths and heights that are and are not multiples of 16: kernels differ by that.
ODD_SIZES = (
    (1023, 767),
    (1040, 767),
    (1023, 784),
    (1040, 784),
    (1024, 767),  # down the columns alone
    (1023, 768),
    (333, 2999),  # the columns first
    (336, 2999),
    (61, 47),  # enlarged
)
TOGETHER = (1, 2, 4)  # views of one size; larger ones go alone


def warm_pictures(
    encoder: EncoderRunner,
    processing: ImageProcessor,
    most_tokens: int,
    *,
    progress: bool,
    sizes: Sequence[tuple[int, int]] = SIZES,
) -> int:
    """Pictures of common sizes that fit a context of `most_tokens`; gives how many kinds of call there were.
    Each runs twice: captured, then replayed."""
    calls = [call for size in sizes for call in _calls(encoder, size, processing, most_tokens)]
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    shown = progress and console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        for call in bar.track(calls, description="pictures"):
            for _ in range(2):
                encoder.encode(call, capture=True)
        for size in bar.track(ODD_SIZES, description="odd sizes"):
            encoder.preprocess(_picture(size, processing, 1)[0])
    return len(calls)


def _calls(
    encoder: EncoderRunner, size: tuple[int, int], processing: ImageProcessor, most_tokens: int
) -> list[list[EncodeTask]]:
    encodes = _picture(size, processing, max(TOGETHER))
    first = encodes[0].view
    if first.tokens >= most_tokens:
        return []
    return [
        encodes[:count] for count in TOGETHER if encoder.views_per_call(encodes[0].patches, count) == count
    ]


def _picture(size: tuple[int, int], processing: ImageProcessor, count: int) -> list[EncodeTask]:
    """A black picture, as so many different ones."""
    width, height = size
    pixels = np.zeros((1, height, width, 3), dtype=np.uint8)
    views = [plain_view(index.to_bytes(16, "little"), size, processing) for index in range(count)]
    return [EncodeTask(view, view.key, pixels) for view in views]
