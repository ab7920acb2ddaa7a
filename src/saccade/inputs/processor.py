"""The one way from what a user says to a `Request`.

takes   messages or prompts, pictures and videos in any form, `SamplingParams`
gives   a checked `Request`: ids with one placeholder per media, pixels, resolved sampling; an OutputProcessor
        for its deltas
owns    the tokenizer, the chat template, what loads media
never   imports torch; connects where the limits forbid; tokenises or decodes what cannot fit the context

Everything here blocks (network, decoding): servers call it in worker threads and cancel it by `CancelToken`.
It is thread-safe.
"""

import logging
import operator
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from msgspec.structs import replace as replace_field

from saccade.checkpoint import Checkpoint
from saccade.config import MediaLimits
from saccade.errors import ContextTooLong, InvalidValue, MediaRefused
from saccade.inputs.chat_template import ChatTemplate, split_media, text_bytes, utf8_bytes
from saccade.inputs.media.cancellation import CancelToken
from saccade.inputs.media.hashing import tenant_hash
from saccade.inputs.media.part import MediaKind, MediaPart
from saccade.inputs.media.request_media import LoadContext, LoadedMedia, MediaLoader
from saccade.inputs.output_processor import OutputProcessor
from saccade.inputs.tokenizer import Tokenizer
from saccade.lod.checkpoint_views import views_of
from saccade.lod.detail import Wishes
from saccade.lod.request_views import Eye, Marks, refuse_in_vain
from saccade.request import Media, Request, Sampling
from saccade.request_timing import RequestTiming
from saccade.sampling_params import SamplingParams

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Asked:
    """Who asks, and how the answer is wanted."""

    params: SamplingParams
    request_id: str
    salt: bytes
    arrived: float
    trusted: bool
    field: str  # what the caller's words are called in errors
    cancel: CancelToken
    timing: RequestTiming
    wishes: Wishes  # of the detail pictures are seen in


class InputProcessor:
    """Prepares requests for one checkpoint."""

    def __init__(self, checkpoint: Checkpoint, max_model_len: int, limits: MediaLimits | None = None) -> None:
        self.checkpoint = checkpoint
        self.max_model_len = max_model_len
        self.limits = limits or MediaLimits()
        self.tokenizer = Tokenizer.load(checkpoint)
        template = checkpoint.chat_template
        self._chat = (
            ChatTemplate(template, self.tokenizer, checkpoint.special_tokens)
            if template is not None
            else None
        )
        self._loader = MediaLoader(checkpoint.image, checkpoint.video, self.limits)
        self._eye = _eye(checkpoint)

    def close(self) -> None:
        """Ends the loading threads; requests whose media are being loaded fail."""
        self._loader.close()

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
        cancel: CancelToken | None = None,
        timing: RequestTiming | None = None,
        wishes: Wishes = Wishes(),
    ) -> Request:
        """A conversation. Text in messages is never trusted; `trusted` lets media be paths and objects."""
        now = time.monotonic()
        timing = timing or RequestTiming(now, now)
        asked = _Asked(
            params, request_id, salt, now, trusted, "messages", cancel or CancelToken(), timing, wishes
        )
        if self._chat is None:
            raise InvalidValue("This model has no chat template; use completions.", param="messages")
        plain, parts = split_media(messages)
        self._check_counts(parts, asked)
        self._check_bytes(text_bytes(plain), asked)
        with asked.timing.measure("tokenise"):
            ids = self._chat.encode(plain, tools)
        return self._request(ids, parts, asked)

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
        cancel: CancelToken | None = None,
        timing: RequestTiming | None = None,
        wishes: Wishes = Wishes(),
    ) -> Request:
        """A prompt as text or ids, with one placeholder token per picture and video, in their order.

        Trusted text (the library's) has its control tokens parsed and its media may be paths, bytes, PIL
        images or arrays. Untrusted text is plain text throughout.
        """
        now = time.monotonic()
        timing = timing or RequestTiming(now, now)
        asked = _Asked(
            params, request_id, salt, now, trusted, "prompt", cancel or CancelToken(), timing, wishes
        )
        with asked.timing.measure("tokenise"):
            ids = self._prompt_ids(prompt, asked)
        parts = self._interleaved(ids, _listed("images", images), _listed("videos", videos))
        self._check_counts(parts, asked)
        return self._request(ids, parts, asked)

    def content(self, name: str, salt: bytes = b"") -> tuple[str, bytes]:
        """A picture's reference and its identity, by its reference or the id its owner gave it."""
        reference = self._loader.names.find_any(salt, name)
        return str(reference), tenant_hash(reference.digest, salt)

    def forget_name(self, name: str, reference: str, salt: bytes = b"") -> None:
        """An id, if it still names the picture of that reference."""
        self._loader.names.forget(salt, name, reference)

    def output_processor(self, request: Request, params: SamplingParams) -> OutputProcessor:
        """What folds the deltas of `request` into text."""
        return OutputProcessor(
            request,
            self.tokenizer,
            params.stop_strings,
            include_stop=params.include_stop_str_in_output,
            skip_special=params.skip_special_tokens,
        )

    # --- prompts -------------------------------------------------------------------------------------------

    def _prompt_ids(self, prompt: str | Sequence[int], asked: _Asked) -> list[int]:
        if isinstance(prompt, str):
            self._check_bytes(utf8_bytes(prompt), asked)
            encode = self.tokenizer.encode if asked.trusted else self.tokenizer.encode_plain
            ids = encode(prompt, add_special_tokens=True)
        else:
            ids = [_token_id(token, self.checkpoint.vocab_size) for token in _flat(prompt)]
        return ids

    def _interleaved(
        self, ids: Sequence[int], images: Sequence[Any], videos: Sequence[Any]
    ) -> list[MediaPart]:
        """Pictures and videos in the order their placeholders stand in the prompt."""
        given: dict[MediaKind, Sequence[Any]] = {"image": images, "video": videos}
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
        queues = {
            places[kind]: iter(
                [MediaPart(kind, one, f"{kind}s[{number}]") for number, one in enumerate(sources)]
            )
            for kind, sources in given.items()
        }
        return [next(queues[token]) for token in ids if token in queues]

    def _spelled(self, token: int | None) -> str:
        text = self.tokenizer.token(token) if token is not None else None
        return f" ({text})" if text else ""

    def _check_bytes(self, count: int, asked: _Asked) -> None:
        """Before a text is tokenised, which takes a second for every megabyte or two."""
        most = self.max_model_len * self.tokenizer.longest
        if count > most:
            raise ContextTooLong(
                f"The text has {count} bytes; the {self.max_model_len} tokens this model holds, of at most"
                f" {self.tokenizer.longest} bytes each, cannot spell more than {most}. Send a shorter text.",
                param=asked.field,
            )

    def _check_counts(self, parts: Sequence[MediaPart], asked: _Asked) -> None:
        most = {"image": self.limits.images_per_prompt, "video": self.limits.videos_per_prompt}
        can = {"image": self.checkpoint.image is not None, "video": self.checkpoint.video is not None}
        for kind, limit in most.items():
            count = sum(part.kind == kind for part in parts)
            if count and not can[kind]:
                raise MediaRefused(f"This model takes no {kind}s.", param=asked.field)
            if count > limit:
                raise MediaRefused(
                    f"The request has {count} {kind}s; at most {limit} are allowed. Send fewer.",
                    param=asked.field,
                )

    # --- assembling ----------------------------------------------------------------------------------------

    def _request(self, ids: Sequence[int], parts: Sequence[MediaPart], asked: _Asked) -> Request:
        self._check_vocabulary(ids, asked)
        self._check_placeholders(ids, parts, asked)
        text, eye = len(ids) - len(parts), self._eye
        wishes = replace(asked.wishes, details=tuple(part.detail for part in parts if part.kind == "image"))
        terms = LoadContext(
            salt=asked.salt,
            trusted=asked.trusted,
            cancel=asked.cancel,
            field=asked.field,
            room=lambda visual: self._room(text + visual, visual, asked),
            timing=asked.timing,
            cost=None if eye is None else lambda sizes: eye.cost(sizes, wishes),
        )
        terms.room(0)  # before anything is fetched for a prompt that cannot fit
        prompt, media = self._expand(ids, self._loader.load(parts, terms))
        request = Request(
            id=asked.request_id, prompt=prompt, media=media, salt=asked.salt, arrived=asked.arrived
        )
        if eye is None:
            refuse_in_vain(wishes)
        else:
            request = eye.see(request, wishes)
            _refuse_zooming_named(request)
        return replace_field(request, sampling=self._sampling(request, asked))

    def _sampling(self, request: Request, asked: _Asked) -> Sampling:
        length = request.max_length
        room = self._room(length, length - len(request.prompt) + len(request.media), asked)
        wanted = asked.params.max_tokens
        if wanted is not None and wanted > room:
            log.info("%s: max_tokens %d lowered to the %d left", asked.request_id, wanted, room)
        return asked.params.resolve(
            room=room,
            vocab_size=self.checkpoint.vocab_size,
            end_tokens=self.checkpoint.eos_ids,
            defaults=self.checkpoint.generation.given(),
        )

    def _check_vocabulary(self, ids: Sequence[int], asked: _Asked) -> None:
        """A tokenizer may know words the model has no embedding for; their ids would end the engine."""
        if not ids:
            raise InvalidValue("The prompt is empty; give at least one token.", param=asked.field)
        if (worst := max(ids)) >= self.checkpoint.vocab_size:
            raise InvalidValue(
                f"The text contains {self.tokenizer.token(worst)!r}, which is token {worst}; this model has"
                f" ids 0 to {self.checkpoint.vocab_size - 1}. Remove it.",
                param=asked.field,
            )

    def _check_placeholders(self, ids: Sequence[int], parts: Sequence[MediaPart], asked: _Asked) -> None:
        """A template may drop a part it has no place for; then the picture would be lost silently."""
        places = {"image": self.checkpoint.image_token_id, "video": self.checkpoint.video_token_id}
        for kind, place in places.items():
            given = sum(part.kind == kind for part in parts)
            found = ids.count(place) if place is not None else 0
            if given != found:
                raise InvalidValue(
                    f"The model's chat template made {found} places for {given} {kind}s; put them in user"
                    " messages.",
                    param=asked.field,
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

    def _expand(
        self, ids: Sequence[int], visuals: Sequence[LoadedMedia]
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
                prompt.extend(self.tokenizer.encode(stamp) if stamp else [])
                prompt.extend(_given(checkpoint.vision_start_id) if framed else [])
                media.append(
                    Media(len(prompt), view, pixels, name=visual.name, without_pixels=visual.without_pixels)
                )
                prompt.append(token)
                prompt.extend(_given(checkpoint.vision_end_id) if framed else [])
        return tuple(prompt), tuple(media)


def _eye(checkpoint: Checkpoint) -> Eye | None:
    """How pictures are seen; None if the checkpoint takes none."""
    if checkpoint.image is None:
        return None
    marks = Marks(
        checkpoint.image_token_id,
        tuple(_given(checkpoint.vision_start_id)),
        tuple(_given(checkpoint.vision_end_id)),
        frozenset(checkpoint.eos_ids),
    )
    return Eye(views_of(checkpoint), checkpoint.image, marks)


def _refuse_zooming_named(request: Request) -> None:
    """Zoomed views are cut from pixels, and a named picture has none here."""
    zoomed = set(request.zooming.placeholders) if request.zooming else set()
    zoomed |= {item.origin for item in request.media if item.origin is not None}
    if any(item.without_pixels and item.placeholder in zoomed for item in request.media):
        raise InvalidValue(
            "A picture that is only named cannot be zoomed into; send its bytes, or leave out lod and"
            " visual_tokens.",
            param="messages",
        )


def _given(token: int | None) -> list[int]:
    return [] if token is None else [token]


def _listed(name: str, given: Any) -> Sequence[Any]:
    if isinstance(given, list | tuple):
        return given
    kind = type(given).__name__
    raise InvalidValue(f"{name} is of type {kind}; give a list, of one if there is one.", param=name)


def _flat(prompt: Any) -> Iterable[Any]:
    """Token ids however they are kept: a list, a tuple, an array of one dimension."""
    if isinstance(prompt, np.ndarray) and prompt.ndim == 1:
        listed: list[Any] = prompt.tolist()
        return listed
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
        return prompt
    shape = f" of {prompt.ndim} dimensions" if isinstance(prompt, np.ndarray) else ""
    raise InvalidValue(
        f"The prompt is of type {type(prompt).__name__}{shape}; give a text or a list of token ids.",
        param="prompt",
    )


def _token_id(token: Any, vocab_size: int) -> int:
    try:
        number = None if isinstance(token, bool) else operator.index(token)
    except TypeError:
        number = None
    if number is None:
        raise InvalidValue(f"The prompt has the token {token!r}; token ids are integers.", param="prompt")
    if not 0 <= number < vocab_size:
        raise InvalidValue(
            f"The prompt has the token {number}; the vocabulary has ids 0 to {vocab_size - 1}.",
            param="prompt",
        )
    return number
