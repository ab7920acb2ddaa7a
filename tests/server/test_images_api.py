"""Images by hash and by uuid over HTTP: sending a name instead of bytes, tenants, deletion."""

import asyncio
import base64
import io
from typing import Any

import pytest
from PIL import Image

from saccade.config import ServeConfig
from saccade.errors import ImageNotFound
from saccade.inputs.media.image_names import ImageNames
from saccade.inputs.processor import InputProcessor
from saccade.server.app import create_app
from tests.server.conftest import Site
from tests.server.fakes import FakeLink

NO_SUCH = "0" * 64 + "-64x64"


def picture(colour: int = 0) -> dict[str, Any]:
    buffer = io.BytesIO()
    Image.new("RGB", (80, 60), (colour, 9, 9)).save(buffer, "PNG")
    uri = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": uri}}


def named(**name: str) -> dict[str, Any]:
    return {"type": "image_ref", "image_ref": name}


async def ask(site: Site, part: dict[str, Any]) -> Any:
    return await site.chat([part, {"type": "text", "text": "What?"}])


def asked(link: FakeLink) -> Any:
    """The image of the engine's latest request."""
    return link.requests[-1].media[0]


@pytest.fixture
def tenants(front: InputProcessor, link: FakeLink) -> tuple[Site, Site]:
    app = create_app(front, link, ServeConfig(api_keys=("a", "b")))
    return Site(app, link, {"authorization": "Bearer a"}), Site(app, link, {"authorization": "Bearer b"})


async def test_usage_has_the_hash_which_can_replace_the_image(site: Site) -> None:
    site.link.keeps = True
    answer = await ask(site, picture())
    (told,) = answer.json()["usage"]["images"]
    given = asked(site.link)
    assert not given.without_pixels
    assert (await ask(site, named(hash=told["hash"]))).status_code == 200
    assert asked(site.link).without_pixels
    assert asked(site.link).view == given.view
    assert not asked(site.link).pixels.size


async def test_hash_is_null_for_an_image_that_is_not_cached(site: Site) -> None:
    assert (await ask(site, picture())).json()["usage"]["images"] == [{"hash": None}]
    assert "images" not in (await site.chat("no picture")).json()["usage"]


@pytest.mark.parametrize("form", ["null", "absent", "image_ref"])
async def test_a_uuid_refers_to_the_image_sent_with_it(site: Site, form: str) -> None:
    await ask(site, {**picture(), "uuid": "mine"})
    view = asked(site.link).view
    forms: dict[str, dict[str, Any]] = {
        "null": {"type": "image_url", "image_url": None, "uuid": "mine"},
        "absent": {"type": "image_url", "uuid": "mine"},
        "image_ref": named(uuid="mine"),
    }
    assert (await ask(site, forms[form])).status_code == 200
    assert asked(site.link).view == view
    assert asked(site.link).without_pixels


async def test_a_reused_uuid_refers_to_the_latest_image(site: Site) -> None:
    await ask(site, {**picture(1), "uuid": "mine"})
    first = asked(site.link).view
    await ask(site, {**picture(2), "uuid": "mine"})
    second = asked(site.link).view
    assert first != second
    assert not asked(site.link).without_pixels
    await ask(site, named(uuid="mine"))
    assert asked(site.link).view == second


async def test_names_are_private_to_their_key(tenants: tuple[Site, Site]) -> None:
    mine, theirs = tenants
    mine.link.keeps = True
    told = (await ask(mine, {**picture(), "uuid": "shared"})).json()["usage"]["images"][0]["hash"]
    content = asked(mine.link).view.content
    refused = await ask(theirs, named(uuid="shared"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "image_not_found")
    await ask(theirs, named(hash=told))  # goes to the engine, as a picture nobody has sent under this key
    assert asked(theirs.link).view.content != content
    await ask(theirs, picture())
    assert asked(theirs.link).view.content != content
    for path in (f"/v1/images/{told}", "/v1/images/shared"):
        assert (await mine.get(path)).status_code == 200
    assert (await theirs.get("/v1/images/shared")).status_code == 404
    assert (await theirs.send("DELETE", "/v1/images/shared")).status_code == 404
    await theirs.send("DELETE", f"/v1/images/{told}")
    assert (await mine.get(f"/v1/images/{told}")).status_code == 200


async def test_unknown_image_is_a_404_with_a_remedy(site: Site) -> None:
    for answer in (await ask(site, named(uuid="never")), await site.get("/v1/images/never")):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (404, "image_not_found")
        assert "send the request again with its bytes" in error["message"]
    assert (await site.get(f"/v1/images/{NO_SUCH}")).status_code == 404
    await site.well()


async def test_image_the_engine_does_not_find_is_the_same_404(site: Site) -> None:
    for prompt in ("forgotten", "lost"):  # when it comes; when its turn comes
        part = named(hash=NO_SUCH)
        answer = await site.chat([part, {"type": "text", "text": prompt}])
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "image_not_found")
    await site.well()


async def test_image_the_device_cannot_encode_is_a_503(site: Site) -> None:
    for stream in (False, True):
        answer = await site.chat([picture(), {"type": "text", "text": "unseen"}], stream=stream)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["message"]) == (503, "encoding_failed", "gone")
    await site.well()


async def test_deletion_drops_image_and_name(site: Site) -> None:
    await ask(site, {**picture(), "uuid": "mine"})
    known = await site.get("/v1/images/mine")
    assert known.json() == {
        "object": "image",
        "hash": known.json()["hash"],
        "views": {"gpu": 1, "host": 0, "disk": 0},
    }
    gone = await site.send("DELETE", "/v1/images/mine")
    assert gone.json()["deleted"] is True
    assert site.link.dropped == {asked(site.link).view.content}
    for path in ("/v1/images/mine", f"/v1/images/{known.json()['hash']}"):
        assert (await site.get(path)).status_code == 404
    assert (await site.send("DELETE", f"/v1/images/{known.json()['hash']}")).status_code == 200  # once more


class SlowLink(FakeLink):
    """Deletions end when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.over = asyncio.Event(), asyncio.Event()

    async def image_tiers(self, content: bytes, *, delete: bool = False) -> dict[str, int]:
        if delete:
            self.asked.set()
            await self.over.wait()
        return await super().image_tiers(content, delete=delete)


async def test_a_name_reused_during_deletion_stays(front: InputProcessor) -> None:
    link = SlowLink()
    site = Site(create_app(front, link, ServeConfig()), link)
    await ask(site, {**picture(1), "uuid": "anew"})
    deleting = asyncio.create_task(site.send("DELETE", "/v1/images/anew"))
    await link.asked.wait()
    await ask(site, {**picture(2), "uuid": "anew"})
    second = asked(link).view.content
    link.over.set()
    assert (await deleting).status_code == 200
    assert second not in link.dropped
    assert (await site.get("/v1/images/anew")).status_code == 200
    assert (await ask(site, {"type": "image_url", "uuid": "anew"})).status_code == 200
    assert asked(link).view.content == second


async def test_a_deletion_that_does_not_end_is_a_504(front: InputProcessor) -> None:
    link = SlowLink()
    site = Site(create_app(front, link, ServeConfig(request_timeout=0.05)), link)
    answer = await site.send("DELETE", f"/v1/images/{NO_SUCH}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "request_timeout")


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image_ref"}, "messages[0].content[0].image_ref"),
        (named(), "messages[0].content[0].image_ref"),
        (named(hash="x", uuid="y"), "messages[0].content[0].image_ref"),
        (named(hash="../../etc/passwd"), "messages[0].content[0]"),
        (named(hash="0" * 64), "messages[0].content[0]"),
        (named(hash="0" * 64 + "-0x5"), "messages[0].content[0]"),
        (named(hash="0" * 64 + "-99999999x5"), "messages[0].content[0]"),
        (named(hash="0" * 64 + "-9999x1"), "messages[0].content[0]"),
        (named(uuid=""), "messages[0].content[0].image_ref.uuid"),
        (named(uuid="x" * 257), "messages[0].content[0].image_ref.uuid"),
        ({**picture(), "uuid": 5}, "messages[0].content[0].uuid"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_malformed_name_is_a_400_naming_the_parameter(
    site: Site, part: dict[str, Any], param: str
) -> None:
    answer = await ask(site, part)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    await site.well()


def test_number_of_uuids_is_bounded_and_the_oldest_is_dropped() -> None:
    names = ImageNames(most=2)
    for number in range(3):
        names.learn(b"", f"id {number}", names.find_any(b"", NO_SUCH))
    assert str(names.find_any(b"", "id 2")) == NO_SUCH
    with pytest.raises(ImageNotFound):
        names.find_any(b"", "id 0")
