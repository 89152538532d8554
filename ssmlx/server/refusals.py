"""How requests are refused: errors with what the clients of both APIs read, and their JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException

from ..errors import ContextLengthError, InputError, NoRoomError, one_line
from ..turns import TurnError

AGAIN = {"Retry-After": "1"}  # for refusals after which a later request may succeed
# The header by which OpenAI's and Anthropic's clients do not repeat what would fail again.
_NEVER = {"x-should-retry": "false"}
# What Anthropic's API calls an error, by its status; OpenAI's has kinds of its own for few.
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    504: "timeout_error",
}
_MOST_LETTERS = 80  # of what a client sent that a message shows
# Both phrases are looked for: Anthropic's, and OpenAI's.
_TOO_LONG = (
    "prompt is too long: {}{} tokens > {} maximum; expected less than the model's maximum context "
    "length; shorten it"
)


class RequestError(InputError):
    """A field of a request that cannot be followed, by the name that its API has for it."""

    def __init__(
        self,
        param: str | None,  # None for several fields, or the whole request
        found: str,  # begins with `param`
        expected: str,
        do: str = "correct the field, or omit it",
        details: Mapping[str, Any] | None = None,  # what Anthropic's clients read beside the words
    ) -> None:
        super().__init__(found, expected=expected, do=do)
        self.param = param
        self.details = details

    def renamed(self, other_name_by_own: Mapping[str, str]) -> "RequestError":
        """Return the same error under another API's name of the field, in `found` too."""
        param = other_name_by_own.get(self.param or "", self.param)
        found = self.found
        if param and self.param and found.startswith(self.param):
            found = param + found.removeprefix(self.param)
        return RequestError(param, found, self.expected, self.do, self.details)


class DetailedHTTPException(HTTPException):
    """An HTTP error that also has the fields of OpenAI's and Anthropic's error objects."""

    def __init__(
        self,
        status_code: int,
        detail: str,
        headers: Mapping[str, str] | None = None,
        *,
        param: str | None = None,  # the request's field
        code: str | None = None,  # OpenAI's
        details: Mapping[str, Any] | None = None,  # what Anthropic's clients read beside the words
    ) -> None:
        super().__init__(status_code, detail, headers)
        self.param = param
        self.code = code
        self.details = details


def as_http_error(failure: Exception) -> HTTPException:
    """Return the HTTP error for an exception; one that is not the client's is for the log."""
    match failure:
        case HTTPException():
            return failure
        case ContextLengthError(num_tokens=tokens, limit=limit, is_counted=is_counted):
            detail = _TOO_LONG.format("" if is_counted else "at least ", tokens, limit)
            return DetailedHTTPException(400, detail, code="context_length_exceeded")
        case NoRoomError(wanted=wanted, limit=limit):
            again = AGAIN if wanted <= limit else _NEVER
            return DetailedHTTPException(503, str(failure), again, code="no_room")
        case RequestError():
            return DetailedHTTPException(
                400, str(failure), param=failure.param, details=failure.details
            )
        case TurnError():
            return DetailedHTTPException(400, str(failure), param=failure.place)
        case InputError():
            return HTTPException(400, str(failure))
        case TimeoutError():
            return HTTPException(504, "the answer took too long", _NEVER)
    return HTTPException(500, "the answer failed; see the server's log")


def route_error(
    failure: HTTPException,  # 404 or 405
    method: str,
    path: str,
    paths: Sequence[str],  # of the routes that there are
) -> DetailedHTTPException:
    """Return the error for a path that the server has not, or not for this method."""
    shown = one_line(path[:_MOST_LETTERS])
    if failure.status_code == 405:
        allowed = (failure.headers or {}).get("Allow", "another method")
        detail = f"{shown} is not for {one_line(method)}; expected {allowed}; correct the method"
        return DetailedHTTPException(405, detail, failure.headers, code="unknown_url")
    ends = {one.removeprefix("/v1"): one for one in paths if one != "/"}
    near = next((one for end, one in ends.items() if path.endswith(end)), "")
    detail = (
        f"there is no {shown} on this server, which answers with text alone: it has no embeddings, "
        f"audio or images; expected {', '.join(paths)}; use {near or 'one of these'}"
    )
    return DetailedHTTPException(404, detail, code="unknown_url")


def error_object(http_error: HTTPException) -> dict[str, Any]:
    """Return the JSON object of an error, with the fields of OpenAI's and of Anthropic's."""
    usual = "api_error" if http_error.status_code >= 500 else "invalid_request_error"
    error = {"message": http_error.detail, "param": None, "code": None}
    if isinstance(http_error, DetailedHTTPException):
        error |= {"param": http_error.param, "code": http_error.code}
    kind = _KINDS.get(http_error.status_code, usual)
    if http_error.headers == AGAIN:
        kind = "overloaded_error"
    inner: dict[str, Any] = {"type": kind, **error}
    if isinstance(http_error, DetailedHTTPException) and http_error.details is not None:
        inner["details"] = http_error.details
    return {"type": "error", **error, "error": inner}
