"""All errors, as one tree. Messages are for the caller: value, limit and remedy; never a path or an address.

SaccadeError
├── RequestError            the caller's fault, or no capacity; other requests are not affected
│   ├── InvalidValue        400  a field is wrong: `param` names it
│   │   ├── MediaRefused    400  an image or video that cannot or may not be used
│   │   └── ContextTooLong  400  more tokens than the model's context
│   ├── InvalidHTTP         400  the bytes on the connection are not HTTP
│   ├── NotAllowed          401  missing or wrong API key
│   ├── NotFound            404  no such model or route
│   │   └── ImageNotFound   404  an image was named whose features are not cached
│   ├── WrongMethod         405  the route does not take this method
│   ├── BodyTooSlow         408  the request took too long to arrive
│   ├── BodyTooLarge        413  the request body is over its limit
│   ├── WrongContentType    415  the request body is not declared as JSON
│   ├── HeadersTooLarge     431  the request's headers are over their limit
│   ├── TimedOut            504  the answer took longer than a request may take
│   ├── EncodingFailed      503  the device could not encode an image; a retry may succeed
│   └── Overloaded          503  the queue is full, or the server is shutting down
├── CheckpointError         500  the checkpoint is wrong: the message names the file, tensor or key
├── ConfigError             500  options contradict each other or the machine
└── EngineDied              503  the engine core ended; the server exits
"""

from typing import ClassVar


class SaccadeError(Exception):
    """Base of all errors; `status` is the HTTP status, `kind` the OpenAI error type."""

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "internal_error"
    code: ClassVar[str | None] = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class RequestError(SaccadeError):
    status = 400
    kind = "invalid_request_error"


class InvalidValue(RequestError):
    code = "invalid_value"


class MediaRefused(InvalidValue):
    code = "invalid_media"


class ContextTooLong(InvalidValue):
    code = "context_length_exceeded"


class InvalidHTTP(RequestError):
    code = "invalid_http"


class NotAllowed(RequestError):
    status = 401
    kind = "authentication_error"
    code = "invalid_api_key"


class NotFound(RequestError):
    status = 404
    code = "not_found"


class ImageNotFound(NotFound):
    code = "image_not_found"


class WrongMethod(RequestError):
    status = 405
    code = "method_not_allowed"


class BodyTooSlow(RequestError):
    status = 408
    code = "request_too_slow"


class BodyTooLarge(RequestError):
    status = 413
    code = "body_too_large"


class WrongContentType(RequestError):
    status = 415
    code = "unsupported_media_type"


class HeadersTooLarge(RequestError):
    status = 431
    code = "headers_too_large"


class TimedOut(RequestError):
    status = 504
    kind = "timeout_error"
    code = "request_timeout"


class Overloaded(RequestError):
    status = 503
    kind = "overloaded_error"
    code = "overloaded"


class EncodingFailed(RequestError):
    status = 503
    kind = "engine_error"
    code = "encoding_failed"


# Errors the engine core may report for a request, by code.
ENGINE_ERRORS: dict[str | None, type[SaccadeError]] = {
    error.code: error for error in (InvalidValue, ContextTooLong, Overloaded, ImageNotFound, EncodingFailed)
}


def engine_error(code: str | None, message: str, param: str | None = None) -> SaccadeError:
    """The error the engine core reported as `code` and `message`."""
    return ENGINE_ERRORS.get(code, SaccadeError)(message, param=param)


class CheckpointError(SaccadeError):
    kind = "checkpoint_error"


class ConfigError(SaccadeError):
    kind = "config_error"


class EngineDied(SaccadeError):
    status = 503
    kind = "engine_error"
    code = "engine_died"
