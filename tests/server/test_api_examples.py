"""The Python examples of docs/api.md run against a server."""

import asyncio
import re
from pathlib import Path

import pytest

from tests.server.conftest import running
from tests.server.fakes import AGENT_TEMPLATE, FakeLink, make_processor

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = re.findall(
    r"^```python\n(.*?)^```", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE | re.DOTALL
)


def run_example(source: str, url: str) -> None:
    exec(compile(source.replace("http://127.0.0.1:8000", url), "docs/api.md", "exec"), {})


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
async def test_example_of_the_api_guide_runs(
    number: int, tmp_path: Path, link: FakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    processor = make_processor(tmp_path / "agent", AGENT_TEMPLATE)
    async with running(processor, link, served_model_names=("embedded",)) as url:
        await asyncio.to_thread(run_example, EXAMPLES[number], url)
    assert link.requests
