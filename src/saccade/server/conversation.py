"""One conversation as every chat API hands it on: messages in OpenAI's form, tools, template variables.

The APIs of OpenAI (chat completions, responses) and Anthropic (messages) are adapters: they validate their
body, build a `Conversation` and bring an encoder for their response format.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from saccade.errors import InvalidValue
from saccade.inputs.answer.answer_format import AnswerPlan, tool_parameters
from saccade.inputs.chat_template import Scalar
from saccade.inputs.media.cancellation import CancelToken
from saccade.inputs.processor import FULL_DETAIL
from saccade.lod.detail import DetailRequest
from saccade.request import Request, RequestTiming
from saccade.sampling_params import SamplingParams
from saccade.server.generation import ServerState
from saccade.server.json_body import UnsupportedParameter
from saccade.server.request_handler import ParsedRequest, ResponseEncoder
from saccade.server.tool_schema import ToolOptions

NO_TOOLS = ToolOptions()
# Values of `reasoning_effort`, and whether they turn thinking off.
EFFORTS: Mapping[str, bool] = {
    "none": True,
    "minimal": False,
    "low": False,
    "medium": False,
    "high": False,
    "xhigh": False,
    "max": False,
}


@dataclass(frozen=True)
class Conversation:
    model: str
    messages: Callable[[], Sequence[Mapping[str, Any]]]  # called in a thread: converting them takes time
    has_media: bool
    params: SamplingParams
    stream: bool = False
    tools: ToolOptions = NO_TOOLS
    template_variables: Mapping[str, Scalar] = field(default_factory=dict)
    detail_req: DetailRequest = FULL_DETAIL
    user: str | None = None


def effort_variables(effort: str | None) -> dict[str, Scalar]:
    """What chat templates know of `reasoning_effort`."""
    if effort is None:
        return {}
    return {"enable_thinking": False} if EFFORTS[effort] else {"reasoning_effort": effort}


def parse_conversation(
    state: ServerState, conversation: Conversation, encoder: ResponseEncoder
) -> ParsedRequest:
    """The request that the handler runs."""
    processor, options = state.processor, conversation.tools
    check_tools(state, options)
    tools = [dict(tool) for tool in options.offered]
    plan = None
    if tools or processor.answer_format.reasoning is not None:
        plan = AnswerPlan(processor.answer_format, tool_parameters(tools), options.forced, options.parallel)

    def prepare(request_id: str, salt: bytes, *, cancel: CancelToken, timing: RequestTiming) -> Request:
        return processor.prepare_chat(
            conversation.messages(),
            conversation.params,
            request_id,
            salt,
            tools or None,
            template_variables=conversation.template_variables,
            cancel=cancel,
            timing=timing,
            detail_req=conversation.detail_req,
        )

    return ParsedRequest(
        model=conversation.model,
        params=conversation.params,
        prompts=[prepare],
        has_media=conversation.has_media,
        stream=conversation.stream,
        encoder=encoder,
        user=conversation.user,
        plan=plan,
    )


def check_tools(state: ServerState, options: ToolOptions) -> None:
    names = [tool["function"]["name"] for tool in options.tools]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidValue(f"invalid 'tools': two tools are named '{twice}'; rename one", param="tools")
    if options.forced and not names:
        message = "a call can only be required with tools; give at least one"
        raise InvalidValue(f"invalid 'tool_choice': {message}", param="tool_choice")
    if options.named and options.choice not in names:
        message = f"no tool is named '{options.choice[:64]}'; name one of tools"
        raise InvalidValue(f"invalid 'tool_choice': {message}", param="tool_choice")
    if options.forced:
        reason = "calls are not enforced yet; use 'auto' or 'none'"
        raise UnsupportedParameter(f"unsupported parameter 'tool_choice': {reason}", param="tool_choice")
    if options.offered and state.processor.answer_format.tool_parser is None:
        message = "the chat template of this model takes no tools; leave them out"
        raise InvalidValue(f"invalid 'tools': {message}", param="tools")
