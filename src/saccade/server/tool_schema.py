"""Tools in request bodies: their fields and limits, and the grammar that enforces a call."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from saccade.request import GrammarSpec
from saccade.server.json_body import StrictModel

MAX_TOOLS = 512
MAX_SCHEMA_DEPTH = 64
MAX_CALLS = 128  # in one assistant message
Choice = Literal["none", "auto", "required"]


def _check_depth(value: Any) -> Any:
    level, pending = 0, [value]
    while pending:
        if level > MAX_SCHEMA_DEPTH:
            raise PydanticCustomError("depth", f"is nested more than {MAX_SCHEMA_DEPTH} levels deep")
        inner: list[Any] = []
        for one in pending:
            inner += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        level, pending = level + 1, inner
    return value


def _check_count(value: Any) -> Any:
    """Before the tools themselves are looked at."""
    if isinstance(value, list) and len(value) > MAX_TOOLS:
        raise PydanticCustomError("count", f"{len(value)} tools are more than the {MAX_TOOLS} allowed")
    return value


AtMostMaxTools = BeforeValidator(_check_count)
ToolName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.\-]+$")]
JsonObject = Annotated[dict[str, Any], AfterValidator(_check_depth)]


class FunctionTool(StrictModel):
    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class ChatTool(StrictModel):
    type: Literal["function"]
    function: FunctionTool


class NamedFunction(StrictModel):
    name: ToolName


class NamedChoice(StrictModel):
    type: Literal["function"]
    function: NamedFunction


class CalledFunction(StrictModel):
    name: Annotated[str, Field(min_length=1, max_length=128)]
    arguments: str


class AssistantCall(StrictModel):
    """A call in a message of the assistant, sent back by the client."""

    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # of streamed deltas, which clients may send back


@dataclass(frozen=True)
class ToolOptions:
    """The tools of a request in OpenAI's form. `choice` may be the name of one."""

    tools: Sequence[Mapping[str, Any]] = ()
    choice: str = "auto"
    named: bool = False  # `choice` is a name
    parallel: bool = True

    @property
    def offered(self) -> Sequence[Mapping[str, Any]]:
        """Tools that the model sees."""
        return () if not self.named and self.choice == "none" else self.tools

    @property
    def forced(self) -> bool:
        return self.named or self.choice == "required"

    def grammar(self) -> GrammarSpec | None:
        """A list of calls, each of one tool with its parameters; None if no call is required."""
        if not self.forced:
            return None
        functions = [tool["function"] for tool in self.tools]
        if self.named:
            functions = [one for one in functions if one["name"] == self.choice]
        items = [_call_schema(one, f"#/items/anyOf/{number}") for number, one in enumerate(functions)]
        schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": items}}
        if self.named or not self.parallel:
            schema["maxItems"] = 1
        return GrammarSpec(kind="json_schema", text=json.dumps(schema))


def _call_schema(function: Mapping[str, Any], root: str) -> dict[str, Any]:
    parameters = function.get("parameters") or {"type": "object"}
    arguments = _move_refs(parameters, f"{root}/properties/arguments")
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _move_refs(value: Any, root: str) -> Any:
    """References within a schema that has become part of another one."""
    if isinstance(value, dict):
        return {
            key: root + inner[1:]
            if key == "$ref" and isinstance(inner, str) and inner.startswith("#")
            else _move_refs(inner, root)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_move_refs(one, root) for one in value]
    return value
