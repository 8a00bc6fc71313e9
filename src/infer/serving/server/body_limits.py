"""The body of a request: limited in bytes and in time. The body of a POST must be JSON."""

import asyncio

from starlette.requests import Request

from infer.serving.server.http_errors import ApiError
from infer.serving.server_settings import ServerSettings

# A larger body is read and dropped up to this multiple of the limit, so that its sender sees the answer.
_DRAINED = 8
_MOST_DIGITS = 20  # of a Content-Length: a number with more digits exceeds every limit
_CHARSETS = {"utf-8", "utf8", "us-ascii", "ascii"}
_CURLS = {"", "application/x-www-form-urlencoded"}
_OF_BROWSERS = ("origin", "sec-fetch-site")  # a browser's page cannot leave out either of them
_CLOSE = {"Connection": "close"}


async def receive_body(request: Request, settings: ServerSettings) -> bytes:
    """Return the request's body. Raises ApiError 408, 413 or 415, and ClientDisconnect."""
    if request.method == "POST":
        _check_type(request)
    try:
        async with asyncio.timeout(settings.body_seconds):
            return await _count(request, settings.max_body_bytes)
    except TimeoutError:
        message = f"the body did not arrive within {settings.body_seconds:g} s"
        raise ApiError(408, message, code="timeout", headers=_CLOSE) from None


def _check_type(request: Request) -> None:
    """Raise ApiError 415 unless the type is JSON, or one that curl sends by itself, and the body is not compressed.

    A page of another origin can send curl's types without a preflight. But the browser then names the page's origin.
    """
    coding = request.headers.get("content-encoding", "identity")
    if coding.strip().lower() not in ("", "identity"):
        message = f"Content-Encoding must be identity, got {coding!r:.60}: send the body uncompressed"
        raise ApiError(415, message, code="unsupported_media_type")
    sent = request.headers.get("content-type", "")
    if sent in _CURLS and not any(name in request.headers for name in _OF_BROWSERS):
        return
    kind, *parameters = (part.strip().lower() for part in sent.split(";"))
    charsets = {part.partition("=")[2].strip('"') for part in parameters if part.startswith("charset=")}
    if kind != "application/json" or charsets - _CHARSETS:
        given = f"got {sent!r:.60}" if sent else "got none"
        message = f"Content-Type must be application/json, in UTF-8, {given}"
        raise ApiError(415, message, code="unsupported_media_type")


async def _count(request: Request, most: int) -> bytes:
    digits = request.headers.get("content-length", "").lstrip("0")
    announced = int(digits[:_MOST_DIGITS]) if digits.isdecimal() else 0
    if announced > _DRAINED * most or (announced > most and "expect" in request.headers):
        raise _too_large(most)
    body, num_bytes = bytearray(), 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > _DRAINED * most:
            break
        if num_bytes <= most:
            body += chunk
    if num_bytes > most:
        raise _too_large(most)
    return bytes(body)


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body must have at most {most} bytes", code="body_too_large", headers=_CLOSE)
