"""JSON over HTTP: reading bodies within limits, strict parsing and validation, responses and errors.

Nothing is coerced or guessed: duplicate keys, lone surrogates, unknown fields, 1.0 for an integer are errors.
"""

import asyncio
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import ErrorDetails
from starlette.types import Receive, Send

from saccade.errors import (
    BodyTooLarge,
    BodyTooSlow,
    HeadersTooLarge,
    InvalidValue,
    NotAllowed,
    Overloaded,
    SaccadeError,
    WrongContentType,
)

# JSON values in one body. A comma separates any two values of an object or list, so counting commas bounds
# what parsing allocates; no model's context holds a text with more of them.
MAX_VALUES = 1 << 20
MAX_KEYS = 2048  # of one object; logit_bias is the largest that is allowed
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


Headers = list[tuple[bytes, bytes]]

TENANT_SALT = "saccade.salt"  # bytes: the tenant's cache salt, set by AuthMiddleware
ABORT_CONNECTION = "saccade.abort"  # closes the connection and drops unsent bytes, set by LimitedHttpProtocol


class Disconnected(Exception):
    """The client closed the connection."""


def check_content_type(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Refuse bodies that are not declared as JSON.

    Browsers let any web page send other content types without a preflight request, so this keeps web pages
    from using a server that has no keys.
    """
    given = [value for name, value in headers if name == b"content-type"]
    if len(given) != 1 or given[0].partition(b";")[0].strip().lower() != b"application/json":
        raise WrongContentType("the request must have the header 'Content-Type: application/json'")


async def read_body(
    receive: Receive,
    headers: Iterable[tuple[bytes, bytes]],
    limit: int,
    timeout: float,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> bytes:
    """The whole body, within `timeout` seconds in total; `on_bytes` gets the size of every chunk."""
    given = dict(headers)
    too_large = f"the request body is larger than the {limit} bytes allowed; send smaller or fewer images"
    length = given.get(b"content-length", b"")
    exceeded = length.isdigit() and int(length[:20]) > limit
    if exceeded and b"expect" in given:  # "Expect: 100-continue": the client has not sent the body yet
        raise BodyTooLarge(too_large)
    chunks: list[bytes] = []
    size, more = 0, True
    try:
        async with asyncio.timeout(timeout):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Disconnected
                chunk = message.get("body", b"")
                more = message.get("more_body", False)
                size += len(chunk)
                exceeded = exceeded or size > limit
                if (
                    exceeded
                ):  # read to its end: closing earlier sends a reset, which may overtake the response
                    chunks.clear()
                    continue
                on_bytes(len(chunk))
                chunks.append(chunk)
    except TimeoutError:
        if not exceeded:
            late = f"the body did not arrive within {timeout:g} seconds; send it faster"
            raise BodyTooSlow(late) from None
    if exceeded:
        raise BodyTooLarge(too_large)
    return b"".join(chunks)


def parse_json(body: bytes) -> object:
    """The JSON value in `body`. Duplicate keys and lone surrogates are errors.

    NaN and numbers out of range become floats that are not finite: the schema refuses them and can name the
    parameter. A body with a 1.4 MB image takes about 1.3 ms.
    """
    if len(body) > MAX_VALUES and body.count(b",") > MAX_VALUES:
        raise InvalidValue(f"the body holds more than {MAX_VALUES} JSON values")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidValue(f"the body is not valid UTF-8 (byte {error.start})") from None
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_int=_integer)
    except RecursionError:
        raise InvalidValue("the body is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise InvalidValue(f"the body is not valid JSON: {error.msg} at character {error.pos}") from None
    if "\\" in text and _SURROGATE.search(text):
        _refuse_lone_surrogates(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        raise InvalidValue(f"an object of the body has {len(pairs)} keys; {MAX_KEYS} are allowed")
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                name = key[:64].encode(errors="replace").decode()
                raise InvalidValue(f"the body names '{name}' twice in one object", param=name)
            seen.add(key)
    return result


def _integer(digits: str) -> int | float:
    # Conversion is quadratic in the digits, and Python refuses more than 4300.
    return int(digits) if len(digits) <= 400 else math.copysign(math.inf, -1 if digits[0] == "-" else 1)


def _refuse_lone_surrogates(value: object) -> None:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            try:
                item.encode()
            except UnicodeEncodeError:
                raise InvalidValue("the body holds half of a surrogate pair, which is no character") from None
        elif isinstance(item, dict):
            pending.extend(item)
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)


# --- validation -----------------------------------------------------------------------------------------

# Parameters of OpenAI's API, or of other servers, that this server does not have. Setting one is an error
# that says so; null is the same as absent.
_UNSUPPORTED_GROUPS = {
    "use tools and tool_choice": "functions function_call",
    "structured output is not supported": (
        "guided_json guided_regex guided_grammar guided_choice structured_outputs"
    ),
    "the checkpoint's chat template is used as it is": (
        "chat_template add_generation_prompt continue_final_message"
    ),
    "it is not supported by this server": (
        "audio modalities prompt_embeds mm_processor_kwargs best_of suffix use_beam_search length_penalty"
        " logits_processors metadata store service_tier prediction web_search_options"
        " verbosity prompt_cache_key safety_identifier name refusal annotations"
        " include_obfuscation prompt_logprobs priority"
    ),
}
UNSUPPORTED: Mapping[str, str] = {
    name: reason for reason, names in _UNSUPPORTED_GROUPS.items() for name in names.split()
}


class UnknownParameter(InvalidValue):
    code = "unknown_parameter"


class UnsupportedParameter(InvalidValue):
    code = "unsupported_parameter"


class MissingParameter(InvalidValue):
    code = "missing_required_parameter"


class StrictModel(BaseModel):
    """Base of every request schema: no coercion, no unknown fields, no NaN or infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_unsupported_nulls(cls, data: Any) -> Any:
        if isinstance(data, dict) and any(data[key] is None for key in data if key in UNSUPPORTED):
            return {key: value for key, value in data.items() if value is not None or key not in UNSUPPORTED}
        return data


def short_repr(value: object) -> str:
    """A JSON value for an error message; long strings are cut."""
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else value[:40] + "…")
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return "a number of more than 64 bits"
    if isinstance(value, int | float):
        return repr(value)
    return "a list" if isinstance(value, list) else "an object"


def parameter_name(location: tuple[int | str, ...]) -> str:
    """("messages", 0, "~user", "content") -> "messages[0].content". Union tags start with "~"."""
    name = ""
    for step in location:
        if isinstance(step, int):
            name += f"[{step}]"
        elif not step.startswith("~"):
            name += f".{step[:64]}" if name else step[:64]
    return name


def validation_error(error: ErrorDetails) -> InvalidValue:
    """A pydantic error as our error, in OpenAI's words."""
    location, kind = error["loc"], error["type"]
    param = parameter_name(location)
    if kind == "missing":
        return MissingParameter(f"missing required parameter: '{param}'", param=param)
    if kind == "extra_forbidden":
        reason = UNSUPPORTED.get(str(location[-1]))
        if reason is not None:
            return UnsupportedParameter(f"unsupported parameter '{param}': {reason}", param=param)
        return UnknownParameter(f"unknown parameter: '{param}'", param=param)
    message = error["msg"].removeprefix("Input ").removeprefix("String ").replace(" after validation", "")
    message = re.sub(r"valid dictionary( or instance of \w+)?", "valid object", message)
    given = error["input"]
    got = "" if isinstance(given, list | dict) else f"; got {short_repr(given)}"
    return InvalidValue(f"invalid '{param}': {message}{got}", param=param)


# --- responses ------------------------------------------------------------------------------------------


def internal_error() -> SaccadeError:
    """The error for an unexpected failure; its message carries no detail of the cause."""
    return SaccadeError("the server failed to answer this request; the failure has been logged")


def error_body(error: SaccadeError) -> bytes:
    fields = {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": fields})


def error_headers(error: SaccadeError) -> Headers:
    headers = [(b"content-type", b"application/json")]
    if isinstance(error, NotAllowed):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, Overloaded):
        headers.append((b"retry-after", b"1"))
    if isinstance(error, BodyTooSlow | HeadersTooLarge):
        headers.append((b"connection", b"close"))
    return headers


async def send_error(
    send: Send,
    error: SaccadeError,
    *extra: tuple[bytes, bytes],
    encode: Callable[[SaccadeError], bytes] = error_body,
) -> None:
    """Send the whole response for an error; nothing may have been sent before."""
    await send_body(send, error.status, encode(error), [*error_headers(error), *extra])


async def send_body(send: Send, status: int, body: bytes, headers: Headers) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})
