"""The one way from what a user says to a `Request`.

takes   messages or prompts, pictures and videos in any form, `SamplingParams`
gives   a checked `Request`: ids with one placeholder per media, pixels, resolved sampling; an `Answer` that
        folds its deltas
owns    the tokenizer, the chat template, a few threads that load media
never   imports torch; connects where the limits forbid

Everything here blocks (the network, decoding): servers call it in worker threads. It is thread-safe.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from saccade.checkpoint import Checkpoint
from saccade.config import MediaLimits
from saccade.errors import ContextTooLong, InvalidValue, MediaRefused
from saccade.media import geometry, hashing, source
from saccade.request import Media, Pixels, Request, View
from saccade.sampling import SamplingParams
from saccade.text.answer import Answer
from saccade.text.chat import ChatTemplate, MediaPart, split_media
from saccade.text.tokens import Tokens

log = logging.getLogger(__name__)

LOADERS = 8  # threads that fetch and decode the media of requests with several


@dataclass(frozen=True)
class _Visual:
    """What stands for one picture or video in the prompt: text between views, and the views' pixels."""

    kind: str
    stamps: tuple[str, ...]  # text before each view; for a picture one empty text
    views: tuple[View, ...]
    pixels: tuple[Pixels, ...]


@dataclass(frozen=True)
class _Asked:
    """Who asks, and how the answer is wanted."""

    params: SamplingParams
    request_id: str
    salt: bytes
    arrived: float
    trusted: bool
    field: str  # what the caller's words are called in errors


class Front:
    """Prepares requests for one checkpoint."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        max_model_len: int,
        limits: MediaLimits | None = None,
        chat_template: str | None = None,  # instead of the checkpoint's
    ) -> None:
        self.checkpoint = checkpoint
        self.max_model_len = max_model_len
        self.limits = limits or MediaLimits()
        self.tokens = Tokens.load(checkpoint)
        template = chat_template if chat_template is not None else checkpoint.chat_template
        self._chat = (
            ChatTemplate(template, self.tokens, checkpoint.special_tokens) if template is not None else None
        )
        self._loaders = ThreadPoolExecutor(LOADERS, thread_name_prefix="media")

    def close(self) -> None:
        """Ends the loading threads; requests being prepared fail."""
        self._loaders.shutdown(wait=False, cancel_futures=True)

    # --- questions -----------------------------------------------------------------------------------------

    def prepare_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        request_id: str,
        salt: bytes = b"",
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        trusted: bool = False,
    ) -> Request:
        """A conversation. Text in messages is never trusted; `trusted` lets media be paths and objects."""
        asked = _Asked(params, request_id, salt, time.monotonic(), trusted, "messages")
        if self._chat is None:
            raise InvalidValue(
                "This model has no chat template; use completions, or give a template.", param="messages"
            )
        plain, parts = split_media(messages)
        self._check_counts(parts)
        return self._request(self._chat.encode(plain, tools), parts, asked)

    def prepare_prompt(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: str,
        salt: bytes = b"",
        *,
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        trusted: bool = False,
    ) -> Request:
        """A prompt as text or ids, with one placeholder token per picture and video, in their order.

        Trusted text (the library's) has its control tokens parsed and its media may be paths, bytes, PIL
        images or arrays. Untrusted text is plain text throughout.
        """
        asked = _Asked(params, request_id, salt, time.monotonic(), trusted, "prompt")
        ids = self._prompt_ids(prompt, trusted)
        parts = self._interleaved(ids, images, videos)
        self._check_counts(parts)
        return self._request(ids, parts, asked)

    def answer(self, request: Request, params: SamplingParams) -> Answer:
        """What folds the deltas of `request` into text."""
        return Answer(
            request,
            self.tokens,
            params.stop_strings,
            include_stop=params.include_stop_str_in_output,
            skip_special=params.skip_special_tokens,
        )

    # --- prompts -------------------------------------------------------------------------------------------

    def _prompt_ids(self, prompt: str | Sequence[int], trusted: bool) -> list[int]:
        if isinstance(prompt, str):
            encode = self.tokens.encode if trusted else self.tokens.encode_plain
            ids = encode(prompt, add_special_tokens=True)
        else:
            ids = [_token_id(token, self.checkpoint.vocab_size) for token in prompt]
        if not ids:
            raise InvalidValue("The prompt is empty; give at least one token.", param="prompt")
        return ids

    def _interleaved(
        self, ids: Sequence[int], images: Sequence[Any], videos: Sequence[Any]
    ) -> list[MediaPart]:
        """Pictures and videos in the order their placeholders stand in the prompt."""
        parts: list[MediaPart] = []
        given = {"image": images, "video": videos}
        places = {"image": self.checkpoint.image_token_id, "video": self.checkpoint.video_token_id}
        for kind, sources in given.items():
            found = sum(token == places[kind] for token in ids)
            if found != len(sources):
                spelled = self._spelled(places[kind])
                raise InvalidValue(
                    f"The prompt has {found} {kind} placeholders{spelled} for {len(sources)} {kind}s;"
                    " there must be one for each.",
                    param="prompt",
                )
        queues = {kind: iter(sources) for kind, sources in given.items()}
        for token in ids:
            if token == places["image"]:
                parts.append(MediaPart("image", next(queues["image"])))
            elif token == places["video"]:
                parts.append(MediaPart("video", next(queues["video"])))
        return parts

    def _spelled(self, token: int | None) -> str:
        text = self.tokens.token(token) if token is not None else None
        return f" ({text})" if text else ""

    def _check_counts(self, parts: Sequence[MediaPart]) -> None:
        most = {"image": self.limits.images_per_prompt, "video": self.limits.videos_per_prompt}
        can = {"image": self.checkpoint.image is not None, "video": self.checkpoint.video is not None}
        for kind, limit in most.items():
            count = sum(part.kind == kind for part in parts)
            if count and not can[kind]:
                raise MediaRefused(f"This model takes no {kind}s.")
            if count > limit:
                raise MediaRefused(f"The request has {count} {kind}s; at most {limit} are allowed.")

    # --- assembling ----------------------------------------------------------------------------------------

    def _request(self, ids: Sequence[int], parts: Sequence[MediaPart], asked: _Asked) -> Request:
        self._check_placeholders(ids, parts)
        self._room(len(ids), 0, asked)  # before anything is fetched for a prompt that cannot fit
        prompt, media = self._expand(ids, self._load_all(parts, asked))
        visual = sum(one.view.tokens for one in media)
        room = self._room(len(prompt) - len(media) + visual, visual, asked)
        wanted = asked.params.max_tokens
        if wanted is not None and wanted > room:
            log.info("%s: max_tokens %d lowered to the %d left", asked.request_id, wanted, room)
        sampling = asked.params.resolve(
            room=room,
            vocab_size=self.checkpoint.vocab_size,
            end_tokens=self.checkpoint.eos_ids,
            defaults=self.checkpoint.generation.given(),
        )
        return Request(
            id=asked.request_id,
            prompt=prompt,
            media=media,
            sampling=sampling,
            salt=asked.salt,
            arrived=asked.arrived,
        )

    def _check_placeholders(self, ids: Sequence[int], parts: Sequence[MediaPart]) -> None:
        """A template may drop a part it has no place for; then the picture would be lost silently."""
        places = {"image": self.checkpoint.image_token_id, "video": self.checkpoint.video_token_id}
        for kind, place in places.items():
            given = sum(part.kind == kind for part in parts)
            found = ids.count(place) if place is not None else 0
            if given != found:
                raise InvalidValue(
                    f"The model's chat template made {found} places for {given} {kind}s; put them in user"
                    " messages.",
                    param="messages",
                )

    def _room(self, length: int, visual: int, asked: _Asked) -> int:
        """Tokens the context leaves after a prompt of `length`."""
        room = self.max_model_len - length
        if room >= 1:
            return room
        seen = f", {visual} of them visual" if visual else ""
        remedy = "fewer or smaller pictures, or a shorter text" if visual else "a shorter text"
        raise ContextTooLong(
            f"The prompt has {length} tokens{seen}; with one to answer that is more than the"
            f" {self.max_model_len} this model holds. Send {remedy}.",
            param=asked.field,
        )

    def _load_all(self, parts: Sequence[MediaPart], asked: _Asked) -> list[_Visual]:
        def load(part: MediaPart) -> _Visual:
            return self._picture(part, asked) if part.kind == "image" else self._video(part, asked)

        return _spread(self._loaders, load, parts)

    def _picture(self, part: MediaPart, asked: _Asked) -> _Visual:
        processing = self.checkpoint.image
        if processing is None:
            raise MediaRefused("This model takes no images.")
        picture = source.load_picture(part.source, self.limits, asked.salt, trusted=asked.trusted)
        height, width = picture.pixels.shape[1:3]
        view = geometry.plain_view(picture.content, (width, height), processing)
        return _Visual("image", ("",), (view,), (picture.pixels,))

    def _video(self, part: MediaPart, asked: _Asked) -> _Visual:
        processing = self.checkpoint.video
        if processing is None:
            raise MediaRefused("This model takes no videos.")
        video = source.load_video(part.source, processing, self.limits, asked.salt, trusted=asked.trusted)
        frames, height, width = video.frames.shape[:3]
        groups = processing.groups(frames)
        times = processing.timestamps(list(video.indices), video.fps)
        views = []
        for group in groups:
            content = hashing.part_hash(video.content, [video.indices[place] for place in group])
            views.append(geometry.video_view(content, (width, height), frames, processing))
        return _Visual(
            "video",
            tuple(f"<{seconds:.1f} seconds>" for seconds in times),
            tuple(views),
            tuple(video.frames[group] for group in groups),
        )

    def _expand(
        self, ids: Sequence[int], visuals: Sequence[_Visual]
    ) -> tuple[tuple[int, ...], tuple[Media, ...]]:
        """One placeholder per view. A video's becomes, for each pair of frames, its time and a framed one."""
        checkpoint = self.checkpoint
        places = {checkpoint.image_token_id, checkpoint.video_token_id} - {None}
        waiting = iter(visuals)
        prompt: list[int] = []
        media: list[Media] = []
        for token in ids:
            if token not in places:
                prompt.append(token)
                continue
            visual = next(waiting)
            for stamp, view, pixels in zip(visual.stamps, visual.views, visual.pixels, strict=True):
                framed = visual.kind == "video"
                prompt.extend(self.tokens.encode(stamp) if stamp else [])
                prompt.extend(_given(checkpoint.vision_start_id) if framed else [])
                media.append(Media(slot=len(prompt), view=view, pixels=pixels))
                prompt.append(token)
                prompt.extend(_given(checkpoint.vision_end_id) if framed else [])
        return tuple(prompt), tuple(media)


def _given(token: int | None) -> list[int]:
    return [] if token is None else [token]


def _token_id(token: object, vocab_size: int) -> int:
    if isinstance(token, bool) or not isinstance(token, int):
        raise InvalidValue(f"The prompt has the token {token!r}; token ids are integers.", param="prompt")
    if not 0 <= token < vocab_size:
        raise InvalidValue(
            f"The prompt has the token {token}; the vocabulary has ids 0 to {vocab_size - 1}.", param="prompt"
        )
    return token


def _spread(
    pool: ThreadPoolExecutor, work: Callable[[MediaPart], _Visual], parts: Sequence[MediaPart]
) -> list[_Visual]:
    """`work` on every part, several at once; the first failure in the prompt's order is the one raised."""
    if len(parts) <= 1:
        return [work(part) for part in parts]
    futures = [pool.submit(work, part) for part in parts]
    try:
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()
