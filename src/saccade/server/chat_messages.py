"""The messages of a chat, as they may arrive.

takes   parsed JSON
gives   `Message`: one of five roles, with text or, from a user, text, pictures and videos
never   looks at what a URL points to
"""

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
from saccade.server.strict_json import Strict, shown

MAX_PARTS = 1024  # of one message


class ImageURL(Strict):
    url: str = Field(min_length=1)
    detail: Detail | None = None


class VideoURL(Strict):
    url: str = Field(min_length=1)


class TextPart(Strict):
    type: Literal["text"]
    text: str


Name = Annotated[str, Field(min_length=1, max_length=MAX_UUID_LENGTH)]


class ImagePart(Strict):
    """With a uuid, the picture is given that name; a uuid alone stands for the picture that was given it."""

    type: Literal["image_url"]
    uuid: Name | None = None
    image_url: ImageURL | None = Field(default=None, validate_default=True)

    @field_validator("image_url")
    @classmethod
    def _given_or_named(cls, value: ImageURL | None, info: ValidationInfo) -> ImageURL | None:
        if value is None and info.data.get("uuid") is None:
            raise PydanticCustomError(
                "source", "should be a picture, or left out beside the uuid of one sent before"
            )
        return value


class ImageRef(Strict):
    hash: Name | None = None
    uuid: Name | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.hash is None) == (self.uuid is None):
            raise PydanticCustomError("name", "give either a hash or a uuid")
        return self


class ImageRefPart(Strict):
    type: Literal["image_ref"]
    image_ref: ImageRef


class VideoPart(Strict):
    type: Literal["video_url"]
    video_url: VideoURL


# Tags start with "~" so that `strict.parameter` can leave them out of a parameter's name.
def _by_type(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"~{kind}"


def _by_role(value: Any) -> str:
    role = value.get("role") if isinstance(value, dict) else getattr(value, "role", None)
    return f"~{role}"


def _part_known(where: str, *allowed: str) -> BeforeValidator:
    """A check that gives a part's type a better message than a union can."""

    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            raise PydanticCustomError("part", "should be an object with a type")
        kind = value.get("type")
        if not isinstance(kind, str) or kind not in allowed:
            words = {"kind": shown(kind), "where": where, "allowed": " or ".join(allowed)}
            raise PydanticCustomError("part", "part type {kind} is not known {where}; use {allowed}", words)
        return value

    return BeforeValidator(check)


AnyPart = Annotated[
    Annotated[TextPart, Tag("~text")]
    | Annotated[ImagePart, Tag("~image_url")]
    | Annotated[ImageRefPart, Tag("~image_ref")]
    | Annotated[VideoPart, Tag("~video_url")],
    Discriminator(_by_type),
    _part_known("in a user's message", "text", "image_url", "image_ref", "video_url"),
]
OnlyText = Annotated[TextPart, _part_known("in a message of this role", "text")]


def by_shape(value: Any) -> str | None:
    return "~string" if isinstance(value, str) else "~parts" if isinstance(value, list) else None


_CONTENT = Discriminator(
    by_shape, custom_error_type="content", custom_error_message="should be a string or a list of parts"
)
Text = Annotated[str, Tag("~string")]
TextParts = Annotated[
    list[OnlyText], Tag("~parts"), Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)
]
AnyParts = Annotated[list[AnyPart], Tag("~parts"), Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)]


class InstructionMessage(Strict):
    role: Literal["system", "developer"]
    content: Annotated[Text | TextParts, _CONTENT]


class UserMessage(Strict):
    role: Literal["user"]
    content: Annotated[Text | AnyParts, _CONTENT]


class AssistantMessage(Strict):
    role: Literal["assistant"]
    content: Annotated[Text | TextParts, _CONTENT]


class ToolMessage(Strict):
    role: Literal["tool"]
    content: Annotated[Text | TextParts, _CONTENT]
    tool_call_id: str | None = Field(default=None, max_length=256)


def _message_known(value: Any) -> Any:
    if not isinstance(value, dict):
        raise PydanticCustomError("message", "should be an object with role and content")
    role = value.get("role")
    if not isinstance(role, str) or role not in ("system", "developer", "user", "assistant", "tool"):
        raise PydanticCustomError(
            "role",
            "role {shown} is not one of system, developer, user, assistant, tool",
            {"shown": shown(role)},
        )
    return value


Message = Annotated[
    Annotated[InstructionMessage, Tag("~system")]
    | Annotated[InstructionMessage, Tag("~developer")]
    | Annotated[UserMessage, Tag("~user")]
    | Annotated[AssistantMessage, Tag("~assistant")]
    | Annotated[ToolMessage, Tag("~tool")],
    Discriminator(_by_role),
    BeforeValidator(_message_known),
]
