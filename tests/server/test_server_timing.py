"""Time per stage: in the Server-Timing header, the metrics, and the log of slow requests."""

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


async def test_full_responses_have_all_stages(site: Site) -> None:
    seconds = stages((await site.chat("say: hi")).headers["server-timing"])
    assert list(seconds) == [*IN_TEXT, "total"]
    assert sum(seconds.values()) - seconds["total"] <= seconds["total"] + 0.1  # each is rounded to 0.01 ms


async def test_images_add_their_stages(site: Site) -> None:
    content = [{"type": "image_url", "image_url": {"url": picture()}}, {"type": "text", "text": "What?"}]
    seconds = stages((await site.chat(content)).headers["server-timing"])
    assert seconds["fetch"] > 0
    assert seconds["unpack"] > 0


async def test_streams_have_the_stages_up_to_the_first_token(site: Site) -> None:
    answer = await site.chat("say: hi", stream=True)
    seconds = stages(answer.headers["server-timing"])
    assert list(seconds) == IN_TEXT
    assert seconds["decode"] == 0


async def test_every_prompt_of_a_request_is_timed(site: Site) -> None:
    assert (await site.complete(["say: a", "say: b"])).status_code == 200
    text = (await site.get("/metrics")).text
    for name in ("receive", "queue", "decode", "total"):
        assert f'saccade_stage_seconds_count{{stage="{name}"}} 2.0' in text
    assert all(f'saccade_stage_seconds_count{{stage="{name}"}}' in text for name in STAGES)


@pytest.fixture
def logging_site(front: InputProcessor, link: FakeLink) -> Site:
    return Site(create_app(front, link, ServeConfig(slow_request_seconds=0.05, request_timeout=0.3)), link)


async def test_a_slow_request_is_logged_without_its_text(
    logging_site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    logging_site.link.pause = 0.03
    with caplog.at_level(logging.WARNING, logger="saccade.slow"):
        answer = await logging_site.chat("say: secret")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "saccade.slow"]
    seconds = json.loads(line)
    assert seconds["slow_request"] == answer.json()["id"]
    assert seconds["finish"] == ["stop"]
    assert seconds["completion_tokens"] == 7
    assert seconds["preempted"] == 0
    assert seconds["seconds"]["decode"] >= 0.15
    assert list(seconds["seconds"]) == [*IN_TEXT, "total"]
    assert "secret" not in line


async def test_a_timed_out_request_is_logged_with_its_last_stage(
    logging_site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="saccade.slow"):
        assert (await logging_site.chat("never")).status_code == 504
    (line,) = [record.getMessage() for record in caplog.records if record.name == "saccade.slow"]
    seconds = json.loads(line)
    assert seconds["ended_in"] == "queue"
    assert seconds["finish"] == ["cancelled"]
    assert seconds["seconds"]["total"] >= 0.3


async def test_fast_requests_are_not_logged_and_zero_disables_the_log(
    front: InputProcessor, link: FakeLink, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    link.pause = 0.01
    with caplog.at_level(logging.WARNING, logger="saccade.slow"):
        for limit in (0.0, 60.0):
            config = ServeConfig(slow_request_seconds=limit)
            assert (await Site(create_app(front, link, config), link).chat("say: hi")).status_code == 200
    assert not [record for record in caplog.records if record.name == "saccade.slow"]
