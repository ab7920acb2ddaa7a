"""Pictures a client has sent: is one still known, and forget it.

takes   a picture's hash, or the uuid its owner gave it
gives   where its features are kept; deletes them, and lets no KV computed from them be found again
never   tells one key of another's pictures: a name means nothing without the key it was given under
"""

import msgspec
from fastapi import FastAPI
from fastapi import Request as HTTPRequest
from starlette.responses import Response

from saccade.api.asgi import SALT
from saccade.api.service import Service
from saccade.media.names import unknown


def add_images(app: FastAPI, service: Service) -> None:
    @app.get("/v1/images/{name:path}")
    async def known(name: str, request: HTTPRequest) -> Response:
        hash_, content = service.front.content(name, request.scope[SALT])
        tiers = await service.link.picture(content)
        if not any(tiers.values()):
            raise unknown(name)
        return _json({"object": "image", "hash": hash_, "views": tiers})

    @app.delete("/v1/images/{name:path}")
    async def forget(name: str, request: HTTPRequest) -> Response:
        salt = request.scope[SALT]
        hash_, content = service.front.content(name, salt)
        tiers = await service.link.picture(content, drop=True)
        service.front.forget_name(name, salt)
        return _json({"object": "image.deleted", "hash": hash_, "deleted": True, "views": tiers})


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
