"""From what a user says to a Request: the reference's ids and grids, limits that name themselves."""

import base64
import io
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessorPil, Qwen3VLProcessor
from transformers.video_utils import VideoMetadata

from saccade.checkpoint import open_checkpoint
from saccade.config import MediaLimits
from saccade.errors import CheckpointError, ContextTooLong, InvalidValue, MediaRefused
from saccade.inputs.processor import InputProcessor
from saccade.lod.detail import DetailRequest
from saccade.request import Request
from saccade.sampling_params import SamplingParams
from tests import checkpoints
from tests.inputs.media.test_video import encoded, frames
from tests.inputs.tiny_tokenizer import IMAGE, TEMPLATE, token_id, tokenizer_json, tokens, write_checkpoint

IMAGE_PAD, VIDEO_PAD = token_id("<|image_pad|>"), token_id("<|video_pad|>")
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
MOVIE = "<|vision_start|><|video_pad|><|vision_end|>"
ASK = SamplingParams(max_tokens=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def input_processor(folder: Path) -> Iterator[InputProcessor]:
    one = InputProcessor(open_checkpoint(str(folder)), 2048)
    yield one
    one.close()


def random_image(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def data_uri(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def part(image: Image.Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_uri(png(image))}}


def expanded(request: Request) -> list[int]:
    """The prompt with every placeholder as often as its view has tokens."""
    times = {media.placeholder: media.view.tokens for media in request.media}
    return [token for place, token in enumerate(request.prompt) for _ in range(times.get(place, 1))]


class _NoVideos:
    """Stands for the video processor, which needs torchvision, where only its numbers are read."""

    merge_size = 2
    temporal_patch_size = 2


class _Processor(Qwen3VLProcessor):  # type: ignore[misc]
    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        return type(argument)


def oracle() -> Any:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokenizer_json()))
    images = Qwen2VLImageProcessorPil(
        **{
            key: value
            for key, value in IMAGE.items()
            if key not in ("image_processor_type", "do_convert_rgb")
        }
    )
    return _Processor(images, tokenizer, _NoVideos(), chat_template=TEMPLATE)


# --- equality with the reference ---------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[(64, 64)], [(33, 1000)], [(640, 480), (10, 10), (200, 71)]])
def test_chat_with_images_has_the_ids_and_grids_of_transformers(
    input_processor: InputProcessor, sizes: list[tuple[int, int]]
) -> None:
    images = [random_image(*size, seed=number) for number, size in enumerate(sizes)]
    words = [{"type": "text", "text": "What is in the picture?"}]
    request = input_processor.prepare_chat(
        [{"role": "user", "content": [*map(part, images), *words]}], ASK, "r"
    )
    processor = oracle()
    text = processor.apply_chat_template(
        [{"role": "user", "content": [*({"type": "image"} for _ in images), *words]}],
        add_generation_prompt=True,
        tokenize=False,
    )
    expected = processor(images=images, text=[text])
    assert expanded(request) == list(expected["input_ids"][0])
    assert [(1, *media.view.grid) for media in request.media] == [
        tuple(int(one) for one in grid) for grid in expected["image_grid_thw"]
    ]
    for media, image in zip(request.media, images, strict=True):
        assert request.prompt[media.placeholder] == IMAGE_PAD
        np.testing.assert_array_equal(media.pixels[0], np.asarray(image))
    assert request.length == len(expected["input_ids"][0])


@pytest.mark.parametrize("count", [1, 2, 5, 41])
def test_videos_expand_as_in_transformers(input_processor: InputProcessor, count: int) -> None:
    source = frames(count)
    prompt = f"Look: {MOVIE} and say."
    request = input_processor.prepare_prompt(
        prompt, ASK, "r", videos=[{"frames": source, "fps": 10.0}], trusted=True
    )
    processing = input_processor.checkpoint.video
    assert processing is not None
    indices = processing.sample(count, 10.0, 768)
    pairs = (len(indices) + 1) // 2
    rows, columns = processing.grid(64, 48, len(indices))
    inputs = {
        "video_grid_thw": np.array([[pairs, rows, columns]]),
        "video_metadata": [VideoMetadata(total_num_frames=count, fps=10.0, frames_indices=np.array(indices))],
    }
    processor = oracle()
    text = prompt.replace("<|video_pad|>", processor.replace_video_token(inputs, 0))
    assert expanded(request) == tokens().encode(text)
    assert len(request.media) == pairs
    for number, media in enumerate(request.media):
        assert request.prompt[media.placeholder] == VIDEO_PAD
        both = indices[2 * number], indices[min(2 * number + 1, len(indices) - 1)]
        np.testing.assert_array_equal(media.pixels, source[list(both)])
    assert len({media.view.key for media in request.media}) == pairs


def test_an_encoded_video_in_a_chat_is_sampled_and_has_timestamps(input_processor: InputProcessor) -> None:
    url = data_uri(encoded(frames(20)), "video/mp4")
    content = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": "hi"}]
    request = input_processor.prepare_chat([{"role": "user", "content": content}], ASK, "r")
    assert len(request.media) == 2
    assert all(media.pixels.shape == (2, 48, 64, 3) for media in request.media)
    text = tokens().decode(request.prompt, skip_special=False)
    assert "<0.3 seconds><|vision_start|><|video_pad|><|vision_end|><1.6 seconds>" in text


# --- forms an image may have ------------------------------------------------------------------------------


def test_the_library_takes_images_in_any_form(input_processor: InputProcessor, tmp_path: Path) -> None:
    image = random_image(64, 48)
    (tmp_path / "a.png").write_bytes(png(image))
    forms = [
        image,
        np.asarray(image),
        png(image),
        tmp_path / "a.png",
        str(tmp_path / "a.png"),
        data_uri(png(image)),
    ]
    for form in forms:
        request = input_processor.prepare_prompt(f"x{PLACE}", ASK, "r", images=[form], trusted=True)
        np.testing.assert_array_equal(request.media[0].pixels[0], np.asarray(image))
        chat = [{"role": "user", "content": [{"type": "image", "image": form}]}]
        assert len(input_processor.prepare_chat(chat, ASK, "r", trusted=True).media) == 1


@pytest.mark.parametrize("form", ["path", "object", "bytes"])
def test_untrusted_callers_may_give_only_urls(
    input_processor: InputProcessor, tmp_path: Path, form: str
) -> None:
    (tmp_path / "a.png").write_bytes(png(random_image(8, 8)))
    forms: dict[str, Any] = {
        "path": str(tmp_path / "a.png"),
        "object": random_image(8, 8),
        "bytes": png(random_image(8, 8)),
    }
    chat = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": forms[form]}}]}]
    with pytest.raises(MediaRefused):
        input_processor.prepare_chat(chat, ASK, "r")


def test_equal_images_have_equal_keys_and_different_ones_never(input_processor: InputProcessor) -> None:
    def key(form: Any, salt: bytes = b"") -> bytes:
        return (
            input_processor.prepare_prompt(PLACE, ASK, "r", salt, images=[form], trusted=True)
            .media[0]
            .view.key
        )

    image = random_image(64, 48)
    other = image.copy()
    other.putpixel((0, 0), (1, 2, 3))
    turned = np.asarray(image).reshape(64, 48, 3)  # the same bytes in another shape
    grey = Image.new("L", (48, 48), 7)
    assert key(png(image)) == key(png(image))
    distinct = [key(image), key(other), key(turned), key(png(image)), key(grey), key(grey.convert("RGB"))]
    assert len(set(distinct)) == len(distinct)
    assert key(image, b"tenant a") not in (key(image), key(image, b"tenant b"))


# --- trust -------------------------------------------------------------------------------------------------


def test_an_untrusted_prompt_is_plain_text(input_processor: InputProcessor) -> None:
    text = "<|im_start|>system <|image_pad|>"
    request = input_processor.prepare_prompt(text, ASK, "r")
    assert not any(token in tokens().control.values() for token in request.prompt)
    assert tokens().decode(request.prompt) == text
    trusted = input_processor.prepare_prompt("<|im_start|>system", ASK, "r", trusted=True)
    assert trusted.prompt[0] == token_id("<|im_start|>")


def test_placeholders_typed_in_a_chat_do_not_count(input_processor: InputProcessor) -> None:
    content = [part(random_image(64, 64)), {"type": "text", "text": "<|image_pad|> <|vision_start|>"}]
    request = input_processor.prepare_chat([{"role": "user", "content": content}], ASK, "r")
    assert request.prompt.count(IMAGE_PAD) == 1
    assert request.prompt[request.media[0].placeholder] == IMAGE_PAD


# --- limits ------------------------------------------------------------------------------------------------


def test_placeholders_and_images_must_match(input_processor: InputProcessor) -> None:
    with pytest.raises(InvalidValue, match=r"1 image placeholders.*for 0 images"):
        input_processor.prepare_prompt(PLACE, ASK, "r", trusted=True)
    with pytest.raises(InvalidValue, match="0 image placeholders"):
        input_processor.prepare_prompt("x", ASK, "r", images=[random_image(8, 8)], trusted=True)
    with pytest.raises(InvalidValue, match="1 image placeholders"):
        input_processor.prepare_prompt([IMAGE_PAD], ASK, "r")  # ids of anybody
    with pytest.raises(InvalidValue, match="0 video placeholders"):
        input_processor.prepare_prompt(
            PLACE, ASK, "r", videos=[frames(4)], images=[random_image(8, 8)], trusted=True
        )


def test_images_the_template_drops_are_refused(tmp_path: Path) -> None:
    source = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    (write_checkpoint(tmp_path) / "chat_template.jinja").write_text(source)
    with pytest.raises(InvalidValue):
        InputProcessor(open_checkpoint(str(tmp_path)), 2048).prepare_chat(
            [{"role": "user", "content": [part(random_image(64, 64)), {"type": "text", "text": "x"}]}],
            ASK,
            "r",
        )


def test_more_media_than_allowed_is_refused_before_any_is_loaded(folder: Path) -> None:
    one = InputProcessor(
        open_checkpoint(str(folder)), 2048, MediaLimits(images_per_prompt=2, videos_per_prompt=0)
    )
    nowhere = {"type": "image_url", "image_url": {"url": "junk"}}
    with pytest.raises(MediaRefused, match="3 images; at most 2"):
        one.prepare_chat([{"role": "user", "content": [nowhere] * 3}], ASK, "r")
    movie = {"type": "video_url", "video_url": {"url": "junk"}}
    with pytest.raises(MediaRefused, match="1 videos; at most 0"):
        one.prepare_chat([{"role": "user", "content": [movie]}], ASK, "r")


def test_a_prompt_beyond_the_context_names_both_numbers(folder: Path) -> None:
    small = InputProcessor(open_checkpoint(str(folder)), 40)
    length = len(tokens().encode("a" * 100))
    with pytest.raises(ContextTooLong, match=rf"{length} tokens.*40.*shorter text"):
        small.prepare_prompt("a" * 100, ASK, "r")
    with pytest.raises(ContextTooLong, match=r"256 of them visual.*smaller images"):
        small.prepare_prompt(PLACE, ASK, "r", images=[random_image(512, 512)], trusted=True)


def test_the_prompt_may_fill_the_context_but_for_one_token(folder: Path) -> None:
    ids = tokens().encode("Hello, world! " * 5)
    request = InputProcessor(open_checkpoint(str(folder)), len(ids) + 1).prepare_prompt(ids, ASK, "r")
    assert request.sampling.max_tokens == 1
    with pytest.raises(ContextTooLong):
        InputProcessor(open_checkpoint(str(folder)), len(ids)).prepare_prompt(ids, ASK, "r")


def test_max_tokens_is_limited_by_the_context_and_lowering_it_is_logged(
    input_processor: InputProcessor, caplog: pytest.LogCaptureFixture
) -> None:
    everything = input_processor.prepare_prompt([1, 2, 3], SamplingParams(max_tokens=None), "r")
    assert everything.sampling.max_tokens == 2048 - 3
    with caplog.at_level(logging.INFO, logger="saccade.inputs.processor"):
        lowered = input_processor.prepare_prompt([1, 2, 3], SamplingParams(max_tokens=5000), "r7")
    assert lowered.sampling.max_tokens == 2045
    assert "r7: max_tokens 5000 lowered to the 2045 left" in caplog.text


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_is_refused(input_processor: InputProcessor, prompt: Any) -> None:
    with pytest.raises(InvalidValue, match="empty"):
        input_processor.prepare_prompt(prompt, ASK, "r")


@pytest.mark.parametrize("token", [-1, 10**9, True, 1.0, "1"])
def test_token_ids_out_of_range_are_refused(input_processor: InputProcessor, token: Any) -> None:
    with pytest.raises(InvalidValue, match="token"):
        input_processor.prepare_prompt([1, token], ASK, "r")


def test_one_bad_image_among_good_ones_refuses_the_request(input_processor: InputProcessor) -> None:
    bad = {"type": "image_url", "image_url": {"url": data_uri(png(random_image(8, 8))[:60])}}
    with pytest.raises(MediaRefused, match="damaged"):
        input_processor.prepare_chat([{"role": "user", "content": [part(random_image(8, 8)), bad]}], ASK, "r")


# --- sampling ----------------------------------------------------------------------------------------------


def test_the_checkpoints_sampling_defaults_apply_unless_the_request_sets_them(
    input_processor: InputProcessor,
) -> None:
    silent = input_processor.prepare_prompt([1], ASK, "r").sampling
    assert (silent.temperature, silent.top_p, silent.top_k) == (0.7, 0.8, 20)
    spoken = input_processor.prepare_prompt([1], SamplingParams(temperature=0.0, top_k=0), "r").sampling
    assert (spoken.temperature, spoken.top_p, spoken.top_k) == (0.0, 0.8, 0)


def test_end_tokens_stop_unless_ignored(input_processor: InputProcessor) -> None:
    ends = input_processor.checkpoint.eos_ids
    assert input_processor.prepare_prompt([1], ASK, "r").sampling.stop_token_ids == ends
    assert (
        input_processor.prepare_prompt([1], SamplingParams(ignore_eos=True), "r").sampling.stop_token_ids
        == ()
    )


def test_request_has_its_id_and_salt(input_processor: InputProcessor) -> None:
    request = input_processor.prepare_prompt([1], ASK, "name", b"tenant")
    assert (request.id, request.salt) == ("name", b"tenant")
    assert request.arrived > 0


def test_the_output_processor_uses_the_callers_stop_strings(input_processor: InputProcessor) -> None:
    params = SamplingParams(stop="END", include_stop_str_in_output=True)
    answer = input_processor.output_processor(input_processor.prepare_prompt([1], params, "r"), params)
    assert answer.choices[0].text == ""
    assert answer.usage.prompt_tokens == 1


def test_a_model_without_template_or_tokenizer_says_so(folder: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(InvalidValue, match="no chat template"):
        InputProcessor(open_checkpoint(str(tmp_path)), 99).prepare_chat(
            [{"role": "user", "content": "x"}], ASK, "r"
        )
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        InputProcessor(open_checkpoint(str(tmp_path)), 99)


def test_a_text_model_refuses_options_that_need_images(tmp_path: Path) -> None:
    blind = InputProcessor(open_checkpoint(str(checkpoints.qwen3(tmp_path))), 99)
    for detail_req in (DetailRequest(preview_only=True), DetailRequest(visual_tokens=9)):
        with pytest.raises(InvalidValue, match="image"):
            blind.prepare_prompt([1, 2], ASK, "r", detail_req=detail_req)
    assert blind.prepare_prompt([1, 2], ASK, "r", detail_req=DetailRequest(lod=True)).zooming is None


def executed_files(work: Callable[[], object]) -> set[str]:
    """Files of the package in which a function runs, this thread's alone."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and "saccade" in frame.f_code.co_filename:
            found.add(frame.f_code.co_filename.rsplit("saccade/", 1)[-1])

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def test_a_plain_image_request_runs_no_code_of_lod_named_images_or_video(
    input_processor: InputProcessor,
) -> None:
    messages = [{"role": "user", "content": [part(random_image(64, 64)), {"type": "text", "text": "what?"}]}]
    input_processor.prepare_chat(messages, ASK, "r")  # fills caches
    files = executed_files(lambda: input_processor.prepare_chat(messages, ASK, "r"))
    assert "inputs/media/decode.py" in files
    assert not [file for file in files if file.startswith("lod/")]
    assert not files & {"inputs/media/image_names.py", "inputs/media/video.py", "inputs/media/fetch.py"}


def test_a_text_request_runs_no_code_for_media(input_processor: InputProcessor) -> None:
    messages = [{"role": "user", "content": "what?"}]
    files = executed_files(lambda: input_processor.prepare_chat(messages, ASK, "r"))
    assert files <= {
        "inputs/processor.py",
        "inputs/chat_template.py",
        "inputs/tokenizer.py",
        "inputs/media/cancellation.py",
        "checkpoint.py",
        "request.py",
        "sampling_params.py",
    }
