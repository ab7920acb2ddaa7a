"""OpenAI's chat messages: text from every role, media from the user, images and calls of tools."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from saccade.inputs.media.image_names import MAX_UUID_LENGTH
from saccade.lod.types import Detail
from saccade.server.json_body import StrictModel, short_repr
from saccade.server.tool_schema import MAX_CALLS, AssistantCall

MAX_MESSAGES = 4096
MAX_PARTS = 1024  # of one message


class ImageURL(StrictModel):
    url: str = Field(min_length=1)
    detail: Detail | None = None


class VideoURL(StrictModel):
    url: str = Field(min_length=1)


class TextPart(StrictModel):
    type: Literal["text"]
    text: str


ImageName = Annotated[str, Field(min_length=1, max_length=MAX_UUID_LENGTH)]


class ImagePart(StrictModel):
    """An image, optionally named by `uuid`; a `uuid` alone refers to the image sent with it before."""

    type: Literal["image_url"]
    uuid: ImageName | None = None
    image_url: ImageURL | None = Field(default=None, validate_default=True)

    @field_validator("image_url")
    @classmethod
    def _url_or_uuid(cls, value: ImageURL | None, info: ValidationInfo) -> ImageURL | None:
        if value is None and info.data.get("uuid") is None:
            raise PydanticCustomError(
                "source", "should be an image, or absent next to the uuid of one sent before"
            )
        return value


class ImageRef(StrictModel):
    hash: ImageName | None = None
    uuid: ImageName | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.hash is None) == (self.uuid is None):
            raise PydanticCustomError("name", "give either a hash or a uuid")
        return self


class ImageRefPart(StrictModel):
    type: Literal["image_ref"]
    image_ref: ImageRef


class VideoPart(StrictModel):
    type: Literal["video_url"]
    video_url: VideoURL


# Union tags start with "~" so that `parameter_name` can leave them out.
def tag_by(field: str) -> Discriminator:
    return Discriminator(
        lambda value: f"~{value[field] if isinstance(value, dict) else getattr(value, field)}"
    )


def _check_tag(field: str, shape: str, unknown: str, allowed: Sequence[str]) -> BeforeValidator:
    """Check the field of a union first: the union's own error message is unreadable."""

    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            raise PydanticCustomError("shape", shape)
        tag = value.get(field)
        if not isinstance(tag, str) or tag not in allowed:
            raise PydanticCustomError("tag", unknown, {"given": short_repr(tag)})
        return value

    return BeforeValidator(check)


def check_part(where: str, *allowed: str) -> BeforeValidator:
    unknown = f"part type {{given}} is not known {where}; use {' or '.join(allowed)}"
    return _check_tag("type", "should be an object with a type", unknown, allowed)


AnyPart = Annotated[
    Annotated[TextPart, Tag("~text")]
    | Annotated[ImagePart, Tag("~image_url")]
    | Annotated[ImageRefPart, Tag("~image_ref")]
    | Annotated[VideoPart, Tag("~video_url")],
    tag_by("type"),
    check_part("in a user's message", "text", "image_url", "image_ref", "video_url"),
]
ToolPart = Annotated[
    Annotated[TextPart, Tag("~text")]
    | Annotated[ImagePart, Tag("~image_url")]
    | Annotated[ImageRefPart, Tag("~image_ref")],
    tag_by("type"),
    check_part("in a tool's message", "text", "image_url", "image_ref"),
]
OnlyText = Annotated[TextPart, check_part("in a message of this role", "text")]


def tag_by_shape(value: Any) -> str | None:
    return "~string" if isinstance(value, str) else "~parts" if isinstance(value, list) else None


_CONTENT = Discriminator(
    tag_by_shape, custom_error_type="content", custom_error_message="should be a string or a list of parts"
)
Text = Annotated[str, Tag("~string")]
TextParts = Annotated[
    list[OnlyText], Tag("~parts"), Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)
]
AnyParts = Annotated[list[AnyPart], Tag("~parts"), Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)]


ToolParts = Annotated[
    list[ToolPart], Tag("~parts"), Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)
]


class TextMessage(StrictModel):
    role: Literal["system", "developer"]
    content: Annotated[Text | TextParts, _CONTENT]


class AssistantMessage(StrictModel):
    """What the model answered before; content may be absent next to tool calls."""

    role: Literal["assistant"]
    tool_calls: list[AssistantCall] | None = Field(
        default=None, min_length=1, max_length=MAX_CALLS, fail_fast=True
    )
    content: Annotated[Text | TextParts, _CONTENT] | None = Field(default=None, validate_default=True)
    reasoning_content: str | None = None
    reasoning: str | None = None

    @field_validator("content")
    @classmethod
    def _content_or_calls(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None and not info.data.get("tool_calls"):
            raise PydanticCustomError("content", "should be a string or a list of parts")
        return value


class UserMessage(StrictModel):
    role: Literal["user"]
    content: Annotated[Text | AnyParts, _CONTENT]


class ToolMessage(StrictModel):
    role: Literal["tool"]
    content: Annotated[Text | ToolParts, _CONTENT]
    tool_call_id: str | None = Field(default=None, max_length=256)


ROLES = ("system", "developer", "user", "assistant", "tool")
ChatMessage = Annotated[
    Annotated[TextMessage, Tag("~system")]
    | Annotated[TextMessage, Tag("~developer")]
    | Annotated[AssistantMessage, Tag("~assistant")]
    | Annotated[UserMessage, Tag("~user")]
    | Annotated[ToolMessage, Tag("~tool")],
    tag_by("role"),
    _check_tag(
        "role",
        "should be an object with role and content",
        f"role {{given}} is not one of {', '.join(ROLES)}",
        ROLES,
    ),
]
