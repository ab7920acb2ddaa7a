"""Everything that can go wrong, as one tree.

    SaccadeError
    ├── RequestError            the caller's fault, or want of room; nothing else is harmed
    │   ├── InvalidValue        400  a field is wrong: names the field
    │   │   ├── MediaRefused    400  a picture or video that cannot or may not be used
    │   │   └── ContextTooLong  400  more tokens than the model holds
    │   ├── NotAllowed          401  missing or wrong key
    │   ├── NotFound            404  no such model or route
    │   │   └── ImageNotFound   404  a picture was named that is not kept
    │   ├── WrongMethod         405  the route exists, the method does not
    │   ├── BodyTooSlow         408  the request took too long to arrive
    │   ├── BodyTooLarge        413  the request body is over its limit
    │   ├── WrongContentType    415  the request body does not say that it is JSON
    │   ├── TimedOut            504  the answer took longer than a request may take
    │   ├── EncodingFailed      503  the device could not encode a picture; it may the next time
    │   └── Overloaded          503  the queue is full, or the server drains
    ├── CheckpointError         500  the model folder is wrong: names the file, tensor or key
    ├── ConfigError             500  options that contradict each other or the machine
    └── EngineDied              503  the engine process ended; nothing more can be answered

Messages are for the caller: they name the value, the limit and the remedy, never a path of the server,
an address or a class.
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
