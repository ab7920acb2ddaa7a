"""A second image processor, registered in a test, counts tokens and expands prompts without other changes."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from saccade import checkpoint
from saccade.encoder.prompt_layout import lay_out_prompt
from saccade.errors import ContextTooLong, InvalidValue
from saccade.inputs.image_processor import ImageProcessor, PromptView, Size
from saccade.inputs.processor import InputProcessor
from saccade.lod.detail import DetailRequest
from saccade.lod.types import Detail, Grid, LodParams
from saccade.request import Request, View
from saccade.sampling_params import SamplingParams
from tests.inputs.test_processor import part, random_image
from tests.inputs.tiny_tokenizer import IMAGE, token_id, write_checkpoint

IMAGE_PAD, NEWLINE = token_id("<|image_pad|>"), token_id("<|vision_end|>")
ASK = SamplingParams(max_tokens=4)


@dataclass(frozen=True, kw_only=True)
class TileProcessor(ImageProcessor):
    """As LLaVA-NeXT: a thumbnail, then tiles of fixed size row by row, a newline token after each row."""

    tile: int

    @classmethod
    def from_config(cls, processor: Mapping[str, Any], model: Mapping[str, Any]) -> Self:
        half = (0.5, 0.5, 0.5)
        return cls(
            patch_size=14,
            merge_size=1,
            temporal_patch_size=1,
            min_pixels=1,
            max_pixels=1 << 20,
            mean=half,
            std=half,
            rescale_factor=1 / 255,
            tile=processor["tile"],
        )

    def grid(self, width: int, height: int) -> Grid:
        return self.tile // self.patch_size, self.tile // self.patch_size

    def views(self, content: bytes, size: Size, detail: Detail | None = None) -> tuple[PromptView, ...]:
        def view(*box: int) -> View:
            return View(content, (box[0], box[1], box[2], box[3]), self.grid(*size), 1, self.digest)

        width, height = size
        found = [PromptView(view(0, 0, width, height))]
        for top in range(0, height if detail != "low" else 0, self.tile):
            for left in range(0, width, self.tile):
                right, bottom = min(left + self.tile, width), min(top + self.tile, height)
                found.append(
                    PromptView(view(left, top, right, bottom), after=(NEWLINE,) if right == width else ())
                )
        return tuple(found)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_checkpoint(tmp_path_factory.mktemp("models") / "tiles")
    config = {**IMAGE, "image_processor_type": "TileProcessor", "tile": 28}
    (folder / "preprocessor_config.json").write_text(json.dumps(config))
    (folder / "video_preprocessor_config.json").unlink()
    return folder


@pytest.fixture
def processor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InputProcessor]:
    monkeypatch.setitem(checkpoint.IMAGE_PROCESSORS, "TileProcessor", TileProcessor)
    one = InputProcessor(checkpoint.open_checkpoint(str(folder)), 256)
    yield one
    one.close()


def chat(image: Any, **options: Any) -> list[dict[str, Any]]:
    image = part(image)
    image["image_url"] |= options
    return [{"role": "user", "content": [image, {"type": "text", "text": "what?"}]}]


def visual(request: Request) -> list[int]:
    first, last = request.media[0].placeholder, request.media[-1].placeholder
    return list(request.prompt[first : last + 2])


def test_tiles_separators_and_thumbnail_replace_the_placeholder(processor: InputProcessor) -> None:
    request = processor.prepare_chat(chat(random_image(56, 56)), ASK, "r")
    pad = IMAGE_PAD
    assert visual(request)[:-1] == [pad, pad, pad, NEWLINE, pad, pad]  # the last newline closes the row
    assert [item.view.box for item in request.media] == [
        (0, 0, 56, 56),
        (0, 0, 28, 28),
        (28, 0, 56, 28),
        (0, 28, 28, 56),
        (28, 28, 56, 56),
    ]
    assert len({item.view.key for item in request.media}) == 5
    assert all(np.array_equal(item.pixels, request.media[0].pixels) for item in request.media)
    assert [bool(item.name) for item in request.media] == [True, False, False, False, False]


def test_the_count_is_that_of_the_prompt_the_engine_computes(processor: InputProcessor) -> None:
    request = processor.prepare_chat(chat(random_image(70, 30)), ASK, "r")
    image = processor.checkpoint.image
    assert image is not None
    assert image.num_tokens((70, 30)) == 7 * 4
    layout = lay_out_prompt(request)
    assert len(layout.tokens) == request.length
    assert layout.tokens.count(IMAGE_PAD) == 7 * 4
    usage = processor.output_processor(request, ASK).usage
    assert (usage.visual_tokens, usage.full_visual_tokens, usage.prompt_tokens) == (28, 28, request.length)


def test_low_detail_is_passed_to_the_family(processor: InputProcessor) -> None:
    request = processor.prepare_chat(chat(random_image(56, 56), detail="low"), ASK, "r")
    assert [item.view.box for item in request.media] == [(0, 0, 56, 56)]


def test_an_image_beyond_the_context_is_refused_by_its_tokens(processor: InputProcessor) -> None:
    with pytest.raises(ContextTooLong, match="404 of them visual"):
        processor.prepare_chat(chat(random_image(280, 280)), ASK, "r")


def test_level_of_detail_is_refused_where_images_are_tiled(processor: InputProcessor) -> None:
    with pytest.raises(InvalidValue, match="level of detail"):
        processor.prepare_chat(
            chat(random_image(56, 56)), ASK, "r", detail_req=DetailRequest(params=LodParams())
        )
