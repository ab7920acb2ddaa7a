"""The media of a request: known to fit before they are decoded, each loaded once, each error in its place."""

import io
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from saccade.checkpoint import open_checkpoint
from saccade.config import MediaLimits
from saccade.errors import ContextTooLong, InvalidValue, MediaRefused
from saccade.inputs.media import decode, video
from saccade.inputs.media import request_media as visual
from saccade.inputs.media.cancellation import CancelToken, LoadingCancelled
from saccade.inputs.processor import InputProcessor
from saccade.sampling_params import SamplingParams
from tests.inputs.media.test_cancellation import Worker, tarpit
from tests.inputs.media.test_video import encoded, frames
from tests.inputs.test_processor import ASK, MOVIE, PLACE, data_uri, part, png, random_image
from tests.inputs.tiny_tokenizer import write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def input_processor(folder: Path) -> Iterator[InputProcessor]:
    one = InputProcessor(
        open_checkpoint(str(folder)), 2048, MediaLimits(allow_private_addresses=True, fetch_timeout=3600.0)
    )
    yield one
    one.close()


def no_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> Any:
        raise AssertionError("decoded in vain")

    for room, name in ((decode, "decode"), (decode, "to_rgb"), (decode, "copy_rgbx"), (video, "_fill")):
        monkeypatch.setattr(room, name, refuse)


def chat(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


# --- before decoding ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "object", "array"])
def test_images_beyond_the_context_are_not_decoded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, form: str
) -> None:
    small = InputProcessor(open_checkpoint(str(folder)), 100)
    image = random_image(512, 512)
    path = tmp_path / "a"
    given: Any = {"object": image, "array": np.asarray(image)}.get(form, path)
    if given is path:
        image.save(path, form)
    no_decoding(monkeypatch)
    with pytest.raises(ContextTooLong, match=r"512 of them visual"):
        small.prepare_prompt(PLACE * 2, ASK, "r", images=[given] * 2, trusted=True)


def test_a_video_beyond_the_context_is_not_decoded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = InputProcessor(open_checkpoint(str(folder)), 10)
    no_decoding(monkeypatch)
    for form in (encoded(frames(20)), frames(20)):
        with pytest.raises(ContextTooLong, match="visual"):
            small.prepare_prompt(MOVIE, ASK, "r", videos=[form], trusted=True)


def test_all_pixels_of_a_request_have_a_limit_and_are_not_decoded_beyond_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = MediaLimits(max_request_pixels=3 * 64 * 64 - 1)
    one = InputProcessor(open_checkpoint(str(folder)), 2048, limits)
    no_decoding(monkeypatch)
    same = part(random_image(64, 64))
    for parts in ([same] * 3, [part(random_image(64, 64, seed)) for seed in range(3)]):
        with pytest.raises(MediaRefused, match=r"12288 pixels together; at most 12287") as caught:
            one.prepare_chat(chat(*parts), ASK, "r")
        assert caught.value.param == "messages"
    with pytest.raises(MediaRefused, match=r"pixels together; at most 12287"):
        one.prepare_prompt(MOVIE, ASK, "r", videos=[encoded(frames(20))], trusted=True)


def test_an_image_with_exif_rotation_has_the_tokens_that_were_counted(
    input_processor: InputProcessor,
) -> None:
    image, processor = random_image(200, 71), input_processor.checkpoint.image
    assert processor is not None
    exif = Image.Exif()
    exif[0x0112] = 6
    straight, turned = png(image), io_png(image, exif)
    ids = [
        input_processor.prepare_prompt(PLACE, ASK, "r", images=[one], trusted=True).media[0].view
        for one in (straight, turned)
    ]
    assert ids[0].grid == ids[1].grid[::-1]
    assert ids[0].tokens == ids[1].tokens == processor.num_tokens((200, 71))


def io_png(image: Image.Image, exif: Image.Exif) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", exif=exif)
    return buffer.getvalue()


def test_only_so_many_pixels_are_decoded_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visual, "DECODING_PIXELS", 100 * 100)
    one = InputProcessor(open_checkpoint(str(folder)), 2048, MediaLimits(max_pixels=100 * 100))
    lock, now, most = threading.Lock(), 0, 0
    real = decode.decode

    def counted(*arguments: Any) -> Any:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        try:
            return real(*arguments)
        finally:
            with lock:
                now -= 1

    monkeypatch.setattr(decode, "decode", counted)
    parts = [part(random_image(100, 100, seed)) for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: one.prepare_chat(chat(*parts), ASK, name), "abcd"))
    assert most == 1
    assert one._loader._held.free == one._loader._held.total


# --- one source, several places ----------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_a_lazily_opened_image_may_be_used_by_many_at_once(
    input_processor: InputProcessor, tmp_path: Path, form: str
) -> None:
    random_image(700, 700).save(tmp_path / "a", form)
    lazy = Image.open(tmp_path / "a")
    expected = np.asarray(Image.open(tmp_path / "a").convert("RGB"))

    def prepare(name: int) -> Any:
        images = [lazy] * 3
        return input_processor.prepare_prompt(PLACE * 3, ASK, f"r{name}", images=images, trusted=True)

    with ThreadPoolExecutor(4) as pool:
        requests = list(pool.map(prepare, range(8)))
    for request in requests:
        for media in request.media:
            np.testing.assert_array_equal(media.pixels[0], expected)
    assert len({media.view.key for request in requests for media in request.media}) == 1


def test_an_image_that_occurs_twice_in_a_prompt_is_loaded_once(
    input_processor: InputProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    real = decode.decode

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return real(*arguments)

    monkeypatch.setattr(decode, "decode", counted)
    same, other = part(random_image(64, 64)), part(random_image(64, 64, 1))
    request = input_processor.prepare_chat(chat(same, other, same), ASK, "r")
    assert len(calls) == 2
    keys = [media.view.key for media in request.media]
    assert keys[0] == keys[2] != keys[1]


# --- errors ------------------------------------------------------------------------------------------------


def test_the_error_param_names_the_refused_part(input_processor: InputProcessor) -> None:
    bad = {"type": "image_url", "image_url": {"url": data_uri(png(random_image(8, 8))[:60])}}
    movie = {"type": "video_url", "video_url": {"url": data_uri(b"\0\0\0\x18ftypmp42", "video/mp4")}}
    for wrong in (bad, movie):
        with pytest.raises(MediaRefused) as caught:
            input_processor.prepare_chat(
                [*chat(part(random_image(8, 8))), *chat(part(random_image(9, 9)), wrong)], ASK, "r"
            )
        assert caught.value.param == "messages[1].content[1]"
    with pytest.raises(MediaRefused) as caught:
        input_processor.prepare_prompt(
            PLACE * 2, ASK, "r", images=[random_image(8, 8), b"junk"], trusted=True
        )
    assert caught.value.param == "images[1]"


def test_limit_errors_name_the_callers_field(folder: Path) -> None:
    one = InputProcessor(open_checkpoint(str(folder)), 2048, MediaLimits(images_per_prompt=1))
    with pytest.raises(MediaRefused) as caught:
        one.prepare_chat(chat(*[part(random_image(8, 8))] * 2), ASK, "r")
    assert caught.value.param == "messages"
    with pytest.raises(MediaRefused) as caught:
        one.prepare_prompt(PLACE * 2, ASK, "r", images=[random_image(8, 8)] * 2, trusted=True)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    "images", [random_image(8, 8), "a.png", None, {"a": 1}, np.zeros((8, 8, 3), np.uint8)]
)
def test_one_image_that_is_not_in_a_list_is_refused(input_processor: InputProcessor, images: Any) -> None:
    with pytest.raises(InvalidValue, match="give a list") as caught:
        input_processor.prepare_prompt(PLACE, ASK, "r", images=images, trusted=True)
    assert caught.value.param == "images"


# --- the end -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["request", "front"])
@pytest.mark.parametrize("count", [1, 3])
def test_cancelling_ends_preparing_a_request(input_processor: InputProcessor, who: str, count: int) -> None:
    cancel = CancelToken()
    with tarpit() as (port, connected):
        parts = [
            {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{port}/{number}.png"}}
            for number in range(count)
        ]
        worker = Worker(
            lambda: input_processor.prepare_chat(chat(*parts), SamplingParams(), "r", cancel=cancel)
        )
        assert connected.wait(20)
        cancel.cancel() if who == "request" else input_processor.close()
        assert isinstance(worker.end(), LoadingCancelled)


def test_one_bad_image_cancels_fetching_the_others(input_processor: InputProcessor) -> None:
    """All threads of a request are over when it is refused; here one would wait for an hour."""
    with tarpit() as (port, _):
        slow = {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{port}/a.png"}}
        bad = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        worker = Worker(lambda: input_processor.prepare_chat(chat(bad, slow), ASK, "r"))
        assert isinstance(worker.end(), MediaRefused)
