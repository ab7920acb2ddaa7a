"""User input to `Request`: tokenises text, loads media, checks that everything fits and resolves sampling.

It blocks on network and decoding: call it in worker threads, cancel it with a `CancelToken`. Thread-safe.
"""

import logging
import operator
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from msgspec.structs import replace as replace_field

from saccade.checkpoint import Checkpoint
from saccade.config import MediaLimits
from saccade.errors import ContextTooLong, InvalidValue, MediaRefused
from saccade.inputs.answer.answer_format import AUTO, AnswerFormat, AnswerPlan
from saccade.inputs.chat_template import ChatTemplate, Scalar, all_texts, content_texts, split_media
from saccade.inputs.media.cancellation import CancelToken
from saccade.inputs.media.fetch import MediaKind
from saccade.inputs.media.loader import tenant_hash
from saccade.inputs.media.request_media import LoadContext, MediaLoader, MediaPart
from saccade.inputs.output_processor import OutputProcessor
from saccade.inputs.tokenizer import Tokenizer
from saccade.lod.checkpoint_views import checkpoint_views
from saccade.lod.detail import DetailRequest, PlaceholderIds, ViewPlanner, reject_without_images
from saccade.request import Media, Request, RequestTiming
from saccade.sampling_params import SamplingParams

log = logging.getLogger(__name__)
FULL_DETAIL = DetailRequest()


@dataclass(frozen=True)
class _Call:
    """The arguments of `prepare_chat` and `prepare_prompt` other than the prompt."""

    params: SamplingParams
    request_id: str
    salt: bytes
    trusted: bool
    param: str  # what errors call the prompt
    cancel: CancelToken
    timing: RequestTiming
    detail_req: DetailRequest
    arrived: float = field(default_factory=time.monotonic)


class InputProcessor:
    """Prepares requests for one checkpoint."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        max_model_len: int,
        limits: MediaLimits | None = None,
        *,
        reasoning_parser: str = AUTO,
        tool_parser: str = AUTO,
    ) -> None:
        self.checkpoint = checkpoint
        self.max_model_len = max_model_len
        self.limits = limits or MediaLimits()
        self.tokenizer = Tokenizer.load(checkpoint)
        self._placeholders = {"image": checkpoint.image_token_id, "video": checkpoint.video_token_id}
        template = checkpoint.chat_template
        self._template = (
            None if template is None else ChatTemplate(template, self.tokenizer, checkpoint.special_tokens)
        )
        self.answer_format = AnswerFormat.detect(template, self.tokenizer, reasoning_parser, tool_parser)
        self._loader = MediaLoader(checkpoint.image, checkpoint.video, self.limits)
        self._lod = _lod(checkpoint)

    def close(self) -> None:
        """Ends the loading threads; requests whose media are being loaded fail."""
        self._loader.close()

    def prepare_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        request_id: str,
        salt: bytes = b"",
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        template_variables: Mapping[str, Scalar] | None = None,
        trusted: bool = False,
        cancel: CancelToken | None = None,
        timing: RequestTiming | None = None,
        detail_req: DetailRequest = FULL_DETAIL,
    ) -> Request:
        """A conversation. Its text has no control tokens; `trusted` lets media be paths and objects."""
        cancel, timing = cancel or CancelToken(), timing or RequestTiming()
        call = _Call(params, request_id, salt, trusted, "messages", cancel, timing, detail_req)
        if self._template is None:
            raise InvalidValue("This model has no chat template; use completions.", param="messages")
        plain, parts = split_media(messages)
        self._check_counts(parts, call)
        self._check_bytes(content_texts(plain), call.param)
        self._check_bytes(all_texts((tools or (), [one.get("tool_calls", ()) for one in plain])), call.param)
        with call.timing.measure("tokenise"):
            ids = self._template.encode(plain, tools, template_variables)
        return self._request(ids, parts, call)

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
        detail_req: DetailRequest = FULL_DETAIL,
    ) -> Request:
        """A prompt of text or token ids, with one placeholder token per image and video, in their order.

        Trusted text (the library's) is parsed for control tokens, and its media may be paths, bytes, PIL
        images or arrays.
        """
        cancel, timing = cancel or CancelToken(), timing or RequestTiming()
        call = _Call(params, request_id, salt, trusted, "prompt", cancel, timing, detail_req)
        with call.timing.measure("tokenise"):
            ids = self._prompt_ids(prompt, call)
        parts = self._parts_in_order(ids, _checked_list("images", images), _checked_list("videos", videos))
        self._check_counts(parts, call)
        return self._request(ids, parts, call)

    def content(self, name: str, salt: bytes = b"") -> tuple[str, bytes]:
        """The reference and the content hash of an image, by its reference or its uuid."""
        reference = self._loader.names.find_any(salt, name)
        return str(reference), tenant_hash(reference.digest, salt)

    def forget_name(self, name: str, reference: str, salt: bytes = b"") -> None:
        """Forgets a uuid if it still names the image of that reference."""
        self._loader.names.forget(salt, name, reference)

    def output_processor(
        self, request: Request, params: SamplingParams, plan: AnswerPlan | None = None
    ) -> OutputProcessor:
        return OutputProcessor(
            request,
            self.tokenizer,
            params.stop_strings,
            include_stop=params.include_stop_str_in_output,
            skip_special=params.skip_special_tokens,
            plan=plan,
        )

    # --- prompts -------------------------------------------------------------------------------------------

    def _prompt_ids(self, prompt: str | Sequence[int], call: _Call) -> list[int]:
        if isinstance(prompt, str):
            self._check_bytes([prompt], call.param)
            encode = self.tokenizer.encode if call.trusted else self.tokenizer.encode_plain
            return encode(prompt, add_special_tokens=True)
        return [_token_id(token, self.checkpoint.vocab_size) for token in _token_list(prompt)]

    def _parts_in_order(
        self, ids: Sequence[int], images: Sequence[Any], videos: Sequence[Any]
    ) -> list[MediaPart]:
        """Images and videos in the order of their placeholders in the prompt."""
        given: dict[MediaKind, Sequence[Any]] = {"image": images, "video": videos}
        queues = {}
        for kind, sources in given.items():
            placeholder = self._placeholders[kind]
            found = sum(token == placeholder for token in ids)
            if found != len(sources):
                text = self.tokenizer.token(placeholder) if placeholder is not None else None
                raise InvalidValue(
                    f"The prompt has {found} {kind} placeholders{f' ({text})' if text else ''} for"
                    f" {len(sources)} {kind}s; there must be one for each.",
                    param="prompt",
                )
            parts = [MediaPart(kind, one, f"{kind}s[{number}]") for number, one in enumerate(sources)]
            queues[placeholder] = iter(parts)
        return [next(queues[token]) for token in ids if token in queues]

    def check_text(self, text: str, param: str = "prompt") -> None:
        """Raise if a text cannot fit into the context."""
        self._check_bytes([text], param)

    def _check_bytes(self, texts: Iterable[str], param: str) -> None:
        """Before tokenising, which takes a second for every megabyte or two."""
        count = sum(
            len(text) if text.isascii() else len(text.encode(errors="surrogatepass")) for text in texts
        )
        most = self.max_model_len * self.tokenizer.longest
        if count > most:
            raise ContextTooLong(
                f"The text has {count} bytes; the {self.max_model_len} tokens this model holds, of at most"
                f" {self.tokenizer.longest} bytes each, cannot spell more than {most}. Send a shorter text.",
                param=param,
            )

    def _check_counts(self, parts: Sequence[MediaPart], call: _Call) -> None:
        if not parts:
            return
        limits, checkpoint = self.limits, self.checkpoint
        for kind, supported, limit in (
            ("image", checkpoint.image is not None, limits.images_per_prompt),
            ("video", checkpoint.video is not None, limits.videos_per_prompt),
        ):
            count = sum(part.kind == kind for part in parts)
            if count and not supported:
                raise MediaRefused(self._why_not(kind), param=call.param)
            if count > limit:
                raise MediaRefused(
                    f"The request has {count} {kind}s; at most {limit} are allowed. Send fewer.",
                    param=call.param,
                )

    def _why_not(self, kind: str) -> str:
        image = self.checkpoint.image
        if kind == "video" and image is not None and image.no_video:
            return f"This model takes no videos: {image.no_video}. Send frames as images."
        if image is None and "vision_config" in self.checkpoint.config:
            return (
                f"This model takes no {kind}s: its folder lacks preprocessor_config.json. The operator must"
                " complete the folder."
            )
        return f"This model takes no {kind}s."

    # --- the request ---------------------------------------------------------------------------------------

    def _request(self, ids: Sequence[int], parts: Sequence[MediaPart], call: _Call) -> Request:
        self._check_ids(ids, parts, call)
        self._room(len(ids) - len(parts), 0, call)  # before anything is fetched for a prompt that cannot fit
        details = tuple(part.detail for part in parts if part.kind == "image")
        uses_lod = call.detail_req != FULL_DETAIL or any(detail not in (None, "high") for detail in details)
        detail_req = replace(call.detail_req, details=details) if uses_lod else None
        prompt, media = self._load(ids, parts, call, detail_req) if parts else (tuple(ids), ())
        request = Request(
            id=call.request_id,
            prompt=prompt,
            media=media,
            salt=call.salt,
            arrived=call.arrived,
            sequential=self.checkpoint.image is not None and self.checkpoint.image.sequential,
        )
        if detail_req is not None:
            request = self._apply_lod(request, detail_req)
        length = request.max_length
        room = self._room(length, length - len(request.prompt) + len(request.media), call)
        wanted = call.params.max_tokens
        if wanted is not None and wanted > room:
            log.info("%s: max_tokens %d lowered to the %d left", call.request_id, wanted, room)
        sampling = call.params.resolve(
            room=room,
            vocab_size=self.checkpoint.vocab_size,
            end_tokens=self.checkpoint.eos_ids,
            defaults=self.checkpoint.generation,
        )
        return replace_field(request, sampling=sampling)

    def _load(
        self, ids: Sequence[int], parts: Sequence[MediaPart], call: _Call, detail_req: DetailRequest | None
    ) -> tuple[tuple[int, ...], tuple[Media, ...]]:
        """Loads the media, and replaces each placeholder by one per view, with the text and ids around it."""
        text, lod = len(ids) - len(parts), self._lod
        context = LoadContext(
            salt=call.salt,
            trusted=call.trusted,
            cancel=call.cancel,
            param=call.param,
            check_tokens=lambda visual: self._room(text + visual, visual, call),
            timing=call.timing,
            lod_tokens=None
            if lod is None or detail_req is None
            else lambda sizes: lod.cost(sizes, detail_req),
        )
        items = iter(self._loader.load(parts, context))
        placeholders = set(self._placeholders.values()) - {None}
        prompt: list[int] = []
        media: list[Media] = []
        for token in ids:
            if token not in placeholders:
                prompt.append(token)
                continue
            item = next(items)
            name = item.name  # an image has one name, its first view's
            for one, pixels in zip(item.views, item.pixels, strict=True):
                for piece in one.before:
                    prompt.extend(self._encode_piece(piece))
                without = item.without_pixels
                media.append(
                    Media(len(prompt), one.view, pixels, name=name, without_pixels=without, time=one.time)
                )
                prompt.append(token)
                for piece in one.after:
                    prompt.extend(self._encode_piece(piece))
                name = ""
        return tuple(prompt), tuple(media)

    def _encode_piece(self, piece: str | int) -> list[int]:
        return [piece] if isinstance(piece, int) else self.tokenizer.encode(piece)

    def _apply_lod(self, request: Request, detail_req: DetailRequest) -> Request:
        if self._lod is None:
            reject_without_images(detail_req)
            if request.media and replace(detail_req, details=()) != FULL_DETAIL:
                raise InvalidValue("This model's images have no level of detail; leave out lod.", param="lod")
            return request
        request = self._lod.apply(request, detail_req)
        zoomed = set(request.zooming.placeholders) if request.zooming else set()
        zoomed |= {item.origin for item in request.media if item.origin is not None}
        if any(item.without_pixels and item.placeholder in zoomed for item in request.media):
            raise InvalidValue(  # zoomed views are cut from pixels
                "An image that is only named cannot be zoomed into; send its bytes, or leave out lod and"
                " visual_tokens.",
                param="messages",
            )
        return request

    def _check_ids(self, ids: Sequence[int], parts: Sequence[MediaPart], call: _Call) -> None:
        if not ids:
            raise InvalidValue("The prompt is empty; give at least one token.", param=call.param)
        # A tokenizer may have ids for which the model has no embedding.
        if (worst := max(ids)) >= self.checkpoint.vocab_size:
            raise InvalidValue(
                f"The text contains {self.tokenizer.token(worst)!r}, which is token {worst}; this model has"
                f" ids 0 to {self.checkpoint.vocab_size - 1}. Remove it.",
                param=call.param,
            )
        # A template may drop a part that it does not expect.
        for kind, placeholder in self._placeholders.items():
            given = sum(part.kind == kind for part in parts)
            found = ids.count(placeholder) if placeholder is not None else 0
            if given != found:
                raise InvalidValue(
                    f"The model's chat template made {found} placeholders for {given} {kind}s; put them in"
                    " user messages.",
                    param=call.param,
                )

    def _room(self, length: int, visual: int, call: _Call) -> int:
        """Tokens the context has left after a prompt of `length`, of which `visual` are visual."""
        room = self.max_model_len - length
        if room >= 1:
            return room
        seen = f", {visual} of them visual" if visual else ""
        remedy = "fewer or smaller images, or a shorter text" if visual else "a shorter text"
        raise ContextTooLong(
            f"The prompt has {length} tokens{seen}; with one to answer that is more than the"
            f" {self.max_model_len} this model holds. Send {remedy}.",
            param=call.param,
        )


def _lod(checkpoint: Checkpoint) -> ViewPlanner | None:
    """Level of detail for this checkpoint; None if its images, or the lack of them, do not allow it."""
    if checkpoint.image is None or not checkpoint.image.supports_lod:
        return None
    ids = PlaceholderIds(
        checkpoint.image_token_id,
        () if checkpoint.vision_start_id is None else (checkpoint.vision_start_id,),
        () if checkpoint.vision_end_id is None else (checkpoint.vision_end_id,),
        frozenset(checkpoint.eos_ids),
    )
    return ViewPlanner(checkpoint_views(checkpoint), checkpoint.image, ids)


def _checked_list(name: str, given: Any) -> Sequence[Any]:
    if isinstance(given, list | tuple):
        return given
    raise InvalidValue(f"{name} is of type {type(given).__name__}; give a list, even for one.", param=name)


def _token_list(prompt: Any) -> Iterable[Any]:
    """Token ids as a list, a tuple or an array of one dimension."""
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
