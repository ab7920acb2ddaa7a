"""Schema of chat messages: text from every role; images and videos from the user."""

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
def _tag_by(field: str) -> Discriminator:
    def tag(value: Any) -> str:
        return f"~{value[field]}" if isinstance(value, dict) else f"~{getattr(value, field)}"

    return Discriminator(tag)


def _check_part_type(where: str, *allowed: str) -> BeforeValidator:
    """Check a part's type first: the union's own error message is unreadable."""

    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            raise PydanticCustomError("part", "should be an object with a type")
        kind = value.get("type")
        if not isinstance(kind, str) or kind not in allowed:
            context = {"kind": short_repr(kind), "where": where, "allowed": " or ".join(allowed)}
            raise PydanticCustomError("part", "part type {kind} is not known {where}; use {allowed}", context)
        return value

    return BeforeValidator(check)


AnyPart = Annotated[
    Annotated[TextPart, Tag("~text")]
    | Annotated[ImagePart, Tag("~image_url")]
    | Annotated[ImageRefPart, Tag("~image_ref")]
    | Annotated[VideoPart, Tag("~video_url")],
    _tag_by("type"),
    _check_part_type("in a user's message", "text", "image_url", "image_ref", "video_url"),
]
OnlyText = Annotated[TextPart, _check_part_type("in a message of this role", "text")]


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


class TextMessage(StrictModel):
    role: Literal["system", "developer", "assistant"]
    content: Annotated[Text | TextParts, _CONTENT]


class UserMessage(StrictModel):
    role: Literal["user"]
    content: Annotated[Text | AnyParts, _CONTENT]


class ToolMessage(StrictModel):
    role: Literal["tool"]
    content: Annotated[Text | TextParts, _CONTENT]
    tool_call_id: str | None = Field(default=None, max_length=256)


ROLES = ("system", "developer", "user", "assistant", "tool")


def _check_role(value: Any) -> Any:
    if not isinstance(value, dict):
        raise PydanticCustomError("message", "should be an object with role and content")
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        context = {"role": short_repr(role), "roles": ", ".join(ROLES)}
        raise PydanticCustomError("role", "role {role} is not one of {roles}", context)
    return value


ChatMessage = Annotated[
    Annotated[TextMessage, Tag("~system")]
    | Annotated[TextMessage, Tag("~developer")]
    | Annotated[TextMessage, Tag("~assistant")]
    | Annotated[UserMessage, Tag("~user")]
    | Annotated[ToolMessage, Tag("~tool")],
    _tag_by("role"),
    BeforeValidator(_check_role),
]
