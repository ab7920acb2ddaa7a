"""Where a request's time went: told in the header, in the metrics, and in the log when it was slow."""

import json
import logging
from pathlib import Path

import pytest

from saccade.config import ServeConfig
from saccade.inputs.processor import InputProcessor
from saccade.metrics import STAGES
from saccade.server.app import create_app
from tests.server.client_checks import picture
from tests.server.conftest import Site
from tests.server.fakes import FakeLink

IN_TEXT = ["receive", "prepare", "tokenise", "send", "queue", "prefill", "first_token", "decode"]


def stages(header: str) -> dict[str, float]:
    parts = (part.partition(";dur=") for part in header.split(", "))
    return {name: float(milliseconds) for name, _, milliseconds in parts}


async def test_whole_answers_tell_their_stages(site: Site) -> None:
    told = stages((await site.chat("say: hi")).headers["server-timing"])
    assert list(told) == [*IN_TEXT, "total"]
    assert sum(told.values()) - told["total"] <= told["total"] + 0.1  # each is rounded to 0.01 ms


async def test_pictures_add_their_stages(site: Site) -> None:
    content = [{"type": "image_url", "image_url": {"url": picture()}}, {"type": "text", "text": "What?"}]
    told = stages((await site.chat(content)).headers["server-timing"])
    assert told["fetch"] > 0
    assert told["unpack"] > 0


async def test_streams_tell_the_stages_up_to_the_first_token(site: Site) -> None:
    answer = await site.chat("say: hi", stream=True)
    told = stages(answer.headers["server-timing"])
    assert list(told) == IN_TEXT
    assert told["decode"] == 0


async def test_every_prompt_of_a_request_is_timed(site: Site) -> None:
    assert (await site.complete(["say: a", "say: b"])).status_code == 200
    text = (await site.get("/metrics")).text
    for name in ("receive", "queue", "decode", "total"):
        assert f'saccade_stage_seconds_count{{stage="{name}"}} 2.0' in text
    assert all(f'saccade_stage_seconds_count{{stage="{name}"}}' in text for name in STAGES)


@pytest.fixture
def watchful(front: InputProcessor, link: FakeLink) -> Site:
    return Site(create_app(front, link, ServeConfig(slow_request_seconds=0.05, request_timeout=0.3)), link)


async def test_a_slow_request_is_logged_without_what_was_said(
    watchful: Site, caplog: pytest.LogCaptureFixture
) -> None:
    watchful.link.pause = 0.03
    with caplog.at_level(logging.WARNING, logger="saccade.slow"):
        answer = await watchful.chat("say: secret")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "saccade.slow"]
    told = json.loads(line)
    assert told["slow_request"] == answer.json()["id"]
    assert told["finish"] == ["stop"]
    assert told["completion_tokens"] == 7
    assert told["preempted"] == 0
    assert told["seconds"]["decode"] >= 0.15
    assert list(told["seconds"]) == [*IN_TEXT, "total"]
    assert "secret" not in line


async def test_a_request_that_was_never_answered_is_logged_with_where_it_stood(
    watchful: Site, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="saccade.slow"):
        assert (await watchful.chat("never")).status_code == 504
    (line,) = [record.getMessage() for record in caplog.records if record.name == "saccade.slow"]
    told = json.loads(line)
    assert told["ended_in"] == "queue"
    assert told["finish"] == ["cancelled"]
    assert told["seconds"]["total"] >= 0.3


async def test_quick_requests_and_a_limit_of_nothing_log_nothing(
    front: InputProcessor, link: FakeLink, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    link.pause = 0.01
    with caplog.at_level(logging.WARNING, logger="saccade.slow"):
        for limit in (0.0, 60.0):
            config = ServeConfig(slow_request_seconds=limit)
            assert (await Site(create_app(front, link, config), link).chat("say: hi")).status_code == 200
    assert not [record for record in caplog.records if record.name == "saccade.slow"]
