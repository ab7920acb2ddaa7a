"""A JSON object that means exactly what it says, and the error when it does not.

takes   parsed JSON
gives   `Strict`, the base of every wire shape, and `refusal`, a validation error as OpenAI words it
never   coerces: a string is not a number, 1.0 is not an integer, an unknown field is an error
"""

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import ErrorDetails

from saccade.errors import InvalidValue

# Parts of OpenAI's (or another server's) interface this server does not have. Asking for one is an error
# that says so; a null is the same as not asking.
_NOT_YET = "it is not supported by this server"
UNSUPPORTED: Mapping[str, str] = {
    **dict.fromkeys(("tools", "tool_choice", "parallel_tool_calls", "tool_calls"), "tools are not supported"),
    **dict.fromkeys(("functions", "function_call"), "functions are not supported"),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_grammar", "guided_choice", "structured_outputs"),
        "structured output is not supported",
    ),
    **dict.fromkeys(
        ("chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
        "the checkpoint's chat template is used as it is",
    ),
    **dict.fromkeys(("audio", "modalities", "prompt_embeds", "mm_processor_kwargs"), _NOT_YET),
    **dict.fromkeys(
        ("best_of", "suffix", "use_beam_search", "length_penalty", "logits_processors"), _NOT_YET
    ),
    **dict.fromkeys(("metadata", "store", "service_tier", "prediction", "web_search_options"), _NOT_YET),
    **dict.fromkeys(("reasoning_effort", "verbosity", "prompt_cache_key", "safety_identifier"), _NOT_YET),
    **dict.fromkeys(("name", "refusal", "annotations", "reasoning_content"), _NOT_YET),
    **dict.fromkeys(("include_obfuscation", "prompt_logprobs", "priority"), _NOT_YET),
}


class UnknownParameter(InvalidValue):
    code = "unknown_parameter"


class UnsupportedParameter(InvalidValue):
    code = "unsupported_parameter"


class MissingParameter(InvalidValue):
    code = "missing_required_parameter"


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        if isinstance(data, dict) and any(data[key] is None for key in data if key in UNSUPPORTED):
            return {key: value for key, value in data.items() if value is not None or key not in UNSUPPORTED}
        return data


def shown(value: object) -> str:
    """A scalar as a message may repeat it: short, and never a whole picture."""
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else value[:40] + "…")
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return "a number of more than 64 bits"
    if isinstance(value, int | float):
        return repr(value)
    return "a list" if isinstance(value, list) else "an object"


def parameter(location: tuple[int | str, ...]) -> str:
    """("messages", 0, "~user", "content") -> "messages[0].content"."""
    name = ""
    for step in location:
        if isinstance(step, int):
            name += f"[{step}]"
        elif not step.startswith("~"):
            name += f".{step[:64]}" if name else step[:64]
    return name


def refusal(error: ErrorDetails) -> InvalidValue:
    """What a client is told about the first thing that is wrong."""
    location, kind = error["loc"], error["type"]
    param = parameter(location)
    if kind == "missing":
        return MissingParameter(f"missing required parameter: '{param}'", param=param)
    if kind == "extra_forbidden":
        leaf = str(location[-1])
        if leaf in UNSUPPORTED:
            return UnsupportedParameter(f"unsupported parameter '{param}': {UNSUPPORTED[leaf]}", param=param)
        return UnknownParameter(f"unknown parameter: '{param}'", param=param)
    message = error["msg"].removeprefix("Input ").removeprefix("String ").replace(" after validation", "")
    message = re.sub(r"valid dictionary( or instance of \w+)?", "valid object", message)
    given = error["input"]
    got = "" if isinstance(given, list | dict) else f"; got {shown(given)}"
    return InvalidValue(f"invalid '{param}': {message}{got}", param=param)
