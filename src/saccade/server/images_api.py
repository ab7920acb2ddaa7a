"""Pictures a client has sent: is one still known, and forget it.

takes   a picture's hash, or the uuid its owner gave it
gives   where its features are kept; deletes them, and lets no KV computed from them be found again
never   tells one key of another's pictures: a name means nothing without the key it was given under
"""

import asyncio

import msgspec
from fastapi import FastAPI
from fastapi import Request as HTTPRequest
from starlette.responses import Response

from saccade.errors import TimedOut
from saccade.inputs.media.image_names import image_not_found
from saccade.server.asgi import SALT
from saccade.server.state import Service


def add_images(app: FastAPI, service: Service) -> None:
    @app.get("/v1/images/{name:path}")
    async def known(name: str, request: HTTPRequest) -> Response:
        hash_, content = service.front.content(name, request.scope[SALT])
        tiers = await _asked(service, content)
        if not any(tiers.values()):
            raise image_not_found(name)
        return _json({"object": "image", "hash": hash_, "views": tiers})

    @app.delete("/v1/images/{name:path}")
    async def forget(name: str, request: HTTPRequest) -> Response:
        salt = request.scope[SALT]
        hash_, content = service.front.content(name, salt)
        tiers = await _asked(service, content, drop=True)
        service.front.forget_name(name, hash_, salt)  # unless it was given to another picture meanwhile
        return _json({"object": "image.deleted", "hash": hash_, "deleted": True, "views": tiers})


async def _asked(service: Service, content: bytes, *, drop: bool = False) -> dict[str, int]:
    limit = service.config.request_timeout
    try:
        async with asyncio.timeout(limit):
            return await service.link.picture(content, drop=drop)
    except TimeoutError:
        raise TimedOut(f"the engine did not answer within {limit:g} seconds; try again") from None


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
