"""Images by name over HTTP with a real engine: follow-ups, keys, deletion, a restart."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.parity.oracle import picture
from tests.walk.conftest import Server
from tests.walk.test_server import data_uri

Start = Callable[..., Server]


def ask(
    server: Server,
    part: dict[str, Any],
    key: str = "a",
    text: str = "What is it?",
    beside: dict[str, Any] | None = None,
) -> httpx.Response:
    content = [part, *([beside] if beside else []), {"type": "text", "text": text}]
    body = {"model": server.model, "messages": [{"role": "user", "content": content}], "max_tokens": 8}
    return httpx.post(
        f"{server.url}/v1/chat/completions",
        json={**body, "temperature": 0, "ignore_eos": True},
        headers={"authorization": f"Bearer {key}"},
        timeout=60,
    )


def said(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def metric(server: Server, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics", headers={"authorization": "Bearer a"}).text
    return float(next(line.split()[-1] for line in text.splitlines() if line.startswith(name + " ")))


def image(server: Server, method: str, name: str, key: str = "a") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.request(method, f"{server.url}/v1/images/{name}", headers=headers)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("features")


@pytest.fixture(scope="module")
def keyed(start_server: Start, folder: Path) -> Server:
    options = ("--api-key", "a", "--api-key", "b", "--vision-cache", f"gpu=1MiB,disk=1GiB,dir={folder}")
    return start_server(*options)


def test_a_follow_up_names_the_image_even_after_a_restart(
    start_server: Start, keyed: Server, folder: Path
) -> None:
    sent = {"type": "image_url", "image_url": {"url": data_uri(picture(120, 90, 5))}, "uuid": "holiday"}
    first = ask(keyed, sent)
    hash_ = first.json()["usage"]["images"][0]["hash"]
    by_hash = {"type": "image_ref", "image_ref": {"hash": hash_}}
    assert said(ask(keyed, by_hash)) == said(first)
    assert said(ask(keyed, {"type": "image_url", "uuid": "holiday"})) == said(first)
    follow_up = said(ask(keyed, by_hash, text="And now?"))
    new = {"type": "image_url", "image_url": {"url": data_uri(picture(64, 64, 6))}}
    assert said(ask(keyed, by_hash, beside=new)) == said(ask(keyed, sent, beside=new))
    assert metric(keyed, "saccade_vision_encodes_total") == 2  # it and its neighbour
    other = ask(keyed, by_hash, key="b")
    assert (other.status_code, other.json()["error"]["code"]) == (404, "image_not_found")
    assert ask(keyed, {"type": "image_url", "uuid": "holiday"}, key="b").status_code == 404
    assert image(keyed, "GET", hash_).json()["views"]["gpu"] == 1
    assert image(keyed, "GET", hash_, key="b").status_code == 404
    assert image(keyed, "GET", hash_, key="wrong").status_code == 401
    keyed.stop()

    options = ("--api-key", "a", "--vision-cache", f"disk=1GiB,dir={folder}")
    again = start_server(*options)
    assert said(ask(again, by_hash, text="And now?")) == follow_up
    assert said(ask(again, sent)) == said(first)
    assert metric(again, "saccade_vision_encodes_total") == 0
    assert metric(again, 'saccade_feature_cache_hits_total{tier="disk"}') == 1
    assert ask(again, {"type": "image_url", "uuid": "holiday"}).status_code == 200  # given again, above

    assert image(again, "DELETE", "holiday").json()["deleted"] is True
    assert len(list(folder.rglob("*.safetensors"))) == 1  # its neighbour's
    for gone in (by_hash, {"type": "image_url", "uuid": "holiday"}):
        assert ask(again, gone).status_code == 404
    assert image(again, "GET", hash_).status_code == 404
    assert said(ask(again, sent)) == said(first)
    assert metric(again, "saccade_vision_encodes_total") == 1
