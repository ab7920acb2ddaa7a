"""The official client against a real socket."""

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest

from saccade.inputs.processor import InputProcessor
from tests.server import client_checks
from tests.server.conftest import MODEL, running
from tests.server.fakes import FakeLink


@pytest.mark.parametrize("check", client_checks.SYNC_CHECKS, ids=lambda check: check.__name__)
async def test_sync_client(front: InputProcessor, link: FakeLink, check: Callable[..., Any]) -> None:
    async with running(front, link) as url:
        await asyncio.to_thread(check, url, MODEL)
        assert not link.open


async def test_async_client(front: InputProcessor, link: FakeLink) -> None:
    async with running(front, link) as url:
        await client_checks.check_chat_async(url, MODEL)


async def test_client_with_a_key(front: InputProcessor, link: FakeLink) -> None:
    async with running(front, link, api_keys=("one", "two")) as url:
        await asyncio.to_thread(client_checks.check_chat_stream, url, MODEL, api_key="two")
        await client_checks.check_chat_async(url, MODEL, api_key="one")
        with pytest.raises(openai.AuthenticationError):
            await asyncio.to_thread(client_checks.check_chat, url, MODEL, api_key="three")
