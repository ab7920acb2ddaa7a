"""Messages to prompt ids, through the checkpoint's chat template.

A control token typed in a message must not become that token. A control token can only appear in the rendered
prompt if all its characters do, so one character of each (for `<|...|>` tokens: the bar) is replaced in
everything the caller wrote by an unused private-use character. What still reads as a control token after
rendering comes from the template. If the caller's text makes no difference to that, the prompt is encoded as
a whole; otherwise the template's control tokens become ids and the text between them is encoded as plain
text.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from saccade.errors import CheckpointError, InvalidValue
from saccade.inputs.media.fetch import MediaKind
from saccade.inputs.media.image_names import ImageName, check_uuid
from saccade.inputs.media.request_media import MediaPart
from saccade.inputs.tokenizer import Tokenizer
from saccade.lod.types import DETAILS

Message = dict[str, Any]
Scalar = str | int | float | bool | None
RESERVED_VARIABLES = frozenset(
    [
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "raise_exception",
        "strftime_now",
        "self",
        "loop",
        "caller",
        "namespace",
        "range",
        "dict",
        "lipsum",
        "cycler",
        "joiner",
        "varargs",
        "kwargs",
    ]
)
# Characters that mark a control token; without them, its first character that is not alphanumeric.
_BARS = "|｜"
# Private-use planes 15 and 16.
_PRIVATE = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


def split_media(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Message], list[MediaPart]]:
    """Messages as templates expect them, with media parts reduced to their kind; and the media in order."""
    media: list[MediaPart] = []
    plain: list[Message] = []
    for number, message in enumerate(messages):
        copy = {key: value for key, value in message.items() if value is not None or key == "content"}
        if copy.get("role") == "developer":  # OpenAI's newer name for it
            copy["role"] = "system"
        content = copy.get("content")
        if isinstance(content, list | tuple):
            copy["content"] = [
                _part(part, media, f"messages[{number}].content[{index}]")
                for index, part in enumerate(content)
            ]
        if isinstance(copy.get("tool_calls"), list | tuple):
            copy["tool_calls"] = [_tool_call(call) for call in copy["tool_calls"]]
        plain.append(copy)
    return plain, media


def _part(part: Mapping[str, Any], media: list[MediaPart], param: str) -> Message:
    kind = part.get("type")
    if kind == "text":
        return {"type": "text", "text": part.get("text", "")}
    if kind == "image_ref" or (kind in ("image_url", "image") and part.get(kind) is None and "uuid" in part):
        media.append(_named_image(part, param))
        return {"type": "image"}
    if kind not in ("image_url", "video_url", "image", "video"):
        raise InvalidValue(f"Content parts of type {kind!r} are not known here.", param=param)
    name: MediaKind = "image" if kind.startswith("image") else "video"
    source: Any = part.get(kind)
    detail = part.get("detail")
    if kind.endswith("_url") and isinstance(source, Mapping):
        source, detail = source.get("url"), source.get("detail")
    if source is None:
        raise InvalidValue(f"The {name} has no source.", param=param)
    if detail is not None and (name == "video" or detail not in DETAILS):
        allowed = ", ".join(DETAILS) if name == "image" else "none: videos have full detail"
        raise InvalidValue(f"detail is {str(detail)[:40]!r}; allowed are {allowed}.", param=f"{param}.detail")
    uuid = check_uuid(part["uuid"], f"{param}.uuid") if part.get("uuid") is not None else None
    if uuid is not None and name == "video":
        raise InvalidValue("Only images can be given a uuid.", param=f"{param}.uuid")
    media.append(MediaPart(name, source, param, detail, uuid))
    return {"type": name}


def _named_image(part: Mapping[str, Any], param: str) -> MediaPart:
    """An image without its bytes: `image_ref` with a hash or a uuid, or an empty image part with a uuid."""
    inner = part.get("image_ref") if part.get("type") == "image_ref" else part
    given = {key: inner.get(key) for key in ("hash", "uuid")} if isinstance(inner, Mapping) else {}
    names = {key: value for key, value in given.items() if value is not None}
    if len(names) != 1:
        raise InvalidValue("An image is named by its hash or by its uuid; give one.", param=param)
    (key, value), *_ = names.items()
    return MediaPart("image", ImageName(**{key: check_uuid(value, f"{param}.{key}")}), param)


def _tool_call(call: Mapping[str, Any]) -> Message:
    """Templates expect the arguments as an object; OpenAI's messages have them as JSON text."""
    copy = dict(call)
    function = copy.get("function")
    if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
        try:
            arguments = json.loads(function["arguments"])
        except ValueError:
            arguments = None
        if isinstance(arguments, dict):
            copy["function"] = {**function, "arguments": arguments}
    return copy


class ChatTemplate:
    """A compiled template and its tokenizer."""

    def __init__(
        self, source: str, tokenizer: Tokenizer, special_tokens: Mapping[str, str] | None = None
    ) -> None:
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise CheckpointError(f"the chat template cannot be read: {error}") from error
        self._tokenizer = tokenizer
        self._special_tokens = dict(special_tokens or {})
        self._marked = _marked_characters(tokenizer.control)
        self._takes_parts = self._probe()

    def encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        variables: Mapping[str, Scalar] | None = None,
    ) -> list[int]:
        """Prompt ids of a conversation, ending where the answer begins. The template sees `variables`."""
        if not messages:
            raise InvalidValue("There are no messages; give at least one.", param="messages")
        prepared = list(messages) if self._takes_parts else [_join_parts(message) for message in messages]
        if any(message.get("role") == "tool" for message in prepared):
            prepared = self._fit_tool_messages(prepared)
        listed = list(tools) if tools else None
        given = self._check_variables(variables or {})
        plain = self._render(prepared, listed, given)
        hide, restore = self._substitutions((prepared, listed, given))
        if not hide:
            return self._tokenizer.encode(plain)
        hidden = self._render(_map_text(prepared, hide), _map_text(listed, hide), _map_text(given, hide))
        pieces = self._tokenizer.split_control(hidden)
        if self._tokenizer.split_control(plain)[1::2] == pieces[1::2]:
            return self._tokenizer.encode(plain)  # nothing the caller wrote reads as a control token
        ids: list[int] = []
        for index, piece in enumerate(pieces):
            if index % 2:
                ids.append(self._tokenizer.control[piece.strip()])
            elif piece:
                ids.extend(self._tokenizer.encode_plain(piece.translate(restore)))
        return ids

    def _check_variables(self, variables: Mapping[str, Scalar]) -> dict[str, Scalar]:
        for name in variables:
            if not name.isidentifier() or name in RESERVED_VARIABLES or name in self._special_tokens:
                raise InvalidValue(
                    f"{name[:64]!r} cannot be set for the chat template; leave it out.",
                    param="chat_template_kwargs",
                )
        return dict(variables)

    def _fit_tool_messages(self, messages: list[Message]) -> list[Message]:
        """Tool messages as the template takes them.

        Their parts are joined where it takes only text; images that it would drop follow in a user message.
        """
        takes_parts, takes_images = self._tool_content
        if takes_parts and takes_images:
            return messages
        fitted: list[Message] = []
        images: list[Message] = []
        for message in messages:
            if message.get("role") != "tool" and images:
                fitted.append({"role": "user", "content": images})
                images = []
            content = message.get("content")
            if message.get("role") == "tool" and isinstance(content, list):
                texts = [part for part in content if part["type"] == "text"]
                images += [part for part in content if part["type"] != "text"] if not takes_images else []
                kept = texts if not takes_images else content
                whole = "\n".join(part["text"] for part in texts)
                message = {**message, "content": kept if takes_parts else whole}
            fitted.append(message)
        if images:
            fitted.append({"role": "user", "content": images})
        return fitted

    @cached_property
    def _tool_content(self) -> tuple[bool, bool]:
        """Whether the template takes a tool message as a list of parts, and images in it."""

        def render(content: Any) -> str | None:
            call = {"type": "function", "id": "a1b2c3d4e", "function": {"name": "probe", "arguments": {}}}
            asked = {"role": "assistant", "content": "", "tool_calls": [call]}
            answered = {"role": "tool", "tool_call_id": "a1b2c3d4e", "name": "probe", "content": content}
            try:
                return self._render([{"role": "user", "content": "probe"}, asked, answered], None)
            except (InvalidValue, CheckpointError):
                return None

        as_text, as_parts = render("word"), render([{"type": "text", "text": "word"}])
        with_image = render([{"type": "image"}, {"type": "text", "text": "word"}])
        takes_parts = as_text is not None and as_parts == as_text
        if not takes_parts or with_image is None or as_parts is None:
            return takes_parts, False
        return True, len(self._tokenizer.split_control(with_image)) > len(
            self._tokenizer.split_control(as_parts)
        )

    def _render(
        self,
        messages: list[Message],
        tools: list[Message] | None,
        variables: Mapping[str, Scalar] | None = None,
    ) -> str:
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
                **(variables or {}),
            )
        except SecurityError as error:
            raise CheckpointError("the chat template uses what the sandbox forbids") from error
        except TemplateError as error:
            message = f"The model's chat template does not take these messages: {error.message}"
            raise InvalidValue(message, param="messages") from error
        except (
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            IndexError,
            ArithmeticError,
            RecursionError,
        ) as error:
            message = "The model's chat template does not take messages of this shape."
            raise InvalidValue(message, param="messages") from error

    def _probe(self) -> bool:
        """Whether the template accepts content as a list of parts; those of text-only models often do not."""
        word = "probe"
        try:
            as_parts = self._render([{"role": "user", "content": [{"type": "text", "text": word}]}], None)
            as_text = self._render([{"role": "user", "content": word}], None)
        except (InvalidValue, CheckpointError):
            return False
        return as_parts == as_text

    def _substitutions(self, written: object) -> tuple[dict[int, str], dict[int, str]]:
        """Tables from marked characters to private-use ones and back; empty if the text has none."""
        text = "".join(all_texts(written))
        present = [character for character in self._marked if character in text]
        if not present:
            return {}, {}
        free = (point for plane in _PRIVATE for point in plane if chr(point) not in text)
        chosen = list(zip(present, free, strict=False))
        if len(chosen) < len(present):
            raise InvalidValue("The text uses every private-use character; remove some.", param="messages")
        hide = {ord(character): chr(point) for character, point in chosen}
        return hide, {point: character for character, point in chosen}


def _join_parts(message: Message) -> Message:
    """For templates that accept content only as text."""
    content = message.get("content")
    if content is None:
        return {**message, "content": ""}
    if isinstance(content, list):
        if any(part["type"] != "text" for part in content):
            raise InvalidValue("This model takes no images or videos, only text.", param="messages")
        return {**message, "content": "\n".join(part["text"] for part in content)}
    return message


def _marked_characters(control: Iterable[str]) -> list[str]:
    """One character of every control token."""
    marked: list[str] = []
    for token in control:
        if not any(character in token for character in marked):
            bars = [character for character in _BARS if character in token]
            signs = [character for character in token if not character.isalnum()]
            marked.append([*bars, *signs, token[0]][0])
    return marked


def content_texts(messages: Iterable[Message]) -> Iterator[str]:
    """The texts in the content of messages, without what a template adds."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            yield content
        elif isinstance(content, list):
            yield from (part["text"] for part in content if part["type"] == "text")


def all_texts(value: object) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from all_texts(key)
            yield from all_texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from all_texts(inner)


def _map_text(value: Any, table: dict[int, str]) -> Any:
    """Translates every string in a value; keys too, except identifiers, which templates look up."""
    if isinstance(value, str):
        return value.translate(table)
    if isinstance(value, Mapping):
        return {
            key if key.isidentifier() else key.translate(table): _map_text(inner, table)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_map_text(inner, table) for inner in value]
    return value


class _Generation(Extension):
    """`{% generation %}` marks the answer for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment of transformers: trimmed blocks, loop controls and three helpers."""

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(pattern: str) -> str:
        return datetime.now().strftime(pattern)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # jinja2's own filter escapes HTML, which no model was trained on.
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    environment.filters["tojson"] = tojson
    return environment
