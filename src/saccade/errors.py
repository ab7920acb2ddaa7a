"""All errors, as one tree. Messages for the caller: value, limit and remedy; never a path or an address."""

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
    """The caller's fault, or no capacity; other requests are not affected."""

    status = 400
    kind = "invalid_request_error"


class InvalidValue(RequestError):
    code = "invalid_value"  # `param` names the field


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
    code = "image_not_found"  # an image was named whose features are not cached


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
    code = "overloaded"  # the queue is full, or the server is shutting down


class EncodingFailed(RequestError):
    status = 503
    kind = "engine_error"
    code = "encoding_failed"  # a retry may succeed


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
