"""Level of detail over HTTP: what may be asked, what it costs, what a preview shows; what is refused."""

import base64
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from saccade.server.lod_preview import USED_FIELDS, PreviewBody
from tests.parity.oracle import picture
from tests.parity.test_views import VIEWS, write_head
from tests.walk.conftest import Server


@pytest.fixture(scope="module")
def looking(vl_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose checkpoint was trained with views, and has learned whom to trust."""
    folder = shutil.copytree(vl_folder, tmp_path_factory.mktemp("served") / "views")
    config = json.loads((folder / "config.json").read_text())
    views = {**VIEWS, "positions": "registered"}
    section = {"views": views, "relevance": write_head(folder)}
    (folder / "config.json").write_text(json.dumps({**config, "saccade": section}))
    log = tmp_path_factory.mktemp("server") / "log"
    server = Server(folder, log, "--num-blocks", "512", "--limit-mm-per-prompt", "image=20")
    yield server
    server.stop()


def url(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


LARGE = url(picture(250, 256, 21))  # 64 tokens at full detail


def ask(server: Server, *urls: str, detail: Any = None, route: str = "chat/completions", **more: Any) -> Any:
    named = {} if detail is None else {"detail": detail}
    parts = [{"type": "image_url", "image_url": {"url": one, **named}} for one in urls]
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "What is red?"}]}],
        **({"max_tokens": 6, "temperature": 0} if route == "chat/completions" else {}),
        **more,
    }
    return httpx.post(f"{server.url}/v1/{route}", json=body, timeout=60)


def spent(response: Any) -> tuple[int, int]:
    assert response.status_code == 200, response.text
    details = response.json()["usage"]["prompt_tokens_details"]
    return details["visual_tokens"], details["full_visual_tokens"]


def test_usage_tells_what_was_spent_and_what_full_detail_costs(looking: Server) -> None:
    assert spent(ask(looking, LARGE)) == (64, 64)
    assert spent(ask(looking, LARGE, detail="high")) == (64, 64)
    assert spent(ask(looking, LARGE, lod=False)) == (64, 64)
    low, full = spent(ask(looking, LARGE, detail="low"))
    assert (low <= 16, full) == (True, 64)
    assert spent(ask(looking, LARGE, detail="low", lod=False)) == (low, 64)
    for lod in (None, True, False):
        visual, full = spent(ask(looking, LARGE, visual_tokens=50, lod=lod))
        assert 0 < visual <= 50
        assert full == 64
    assert spent(ask(looking, LARGE, visual_tokens=10**6)) == (64, 64)


def test_answers_do_not_change_where_nothing_is_asked_of_detail(looking: Server) -> None:
    texts = [
        ask(looking, LARGE, **more).json()["choices"][0]["message"]["content"]
        for more in ({}, {"detail": "high"}, {"lod": False}, {"visual_tokens": 64})
    ]
    assert len(set(texts)) == 1


def test_twenty_pictures_share_one_budget(looking: Server) -> None:
    urls = [url(picture(200 + number, 180, number)) for number in range(20)]
    visual, full = spent(ask(looking, *urls, visual_tokens=100))
    assert visual <= 100
    assert full > 500
    refused = ask(looking, *urls, visual_tokens=19)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "visual_tokens")
    assert "20 images need a token each" in refused.json()["error"]["message"]


def test_pictures_of_odd_sizes(looking: Server) -> None:
    for size in ((1, 1), (40, 8000), (8000, 40)):
        response = ask(looking, url(Image.new("RGB", size, "red")), visual_tokens=30)
        assert spent(response)[0] <= 30
    refused = ask(looking, url(Image.new("RGB", (10, 8000))), visual_tokens=30)
    assert refused.status_code == 400
    assert "10x8000" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"detail": "ultra"}, "messages[0].content[0].image_url.detail"),
        ({"detail": 3}, "messages[0].content[0].image_url.detail"),
        ({"visual_tokens": 0}, "visual_tokens"),
        ({"visual_tokens": -5}, "visual_tokens"),
        ({"visual_tokens": 1.5}, "visual_tokens"),
        ({"visual_tokens": "64"}, "visual_tokens"),
        ({"visual_tokens": 1 << 40}, "visual_tokens"),
        ({"lod": "yes"}, "lod"),
        ({"detail": "high", "visual_tokens": 20}, "visual_tokens"),
    ],
)
def test_nonsense_is_refused_by_name(looking: Server, more: dict[str, Any], param: str) -> None:
    for route in ("chat/completions", "lod/preview"):
        response = ask(looking, LARGE, route=route, **more)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_a_budget_without_a_picture_is_refused(looking: Server) -> None:
    response = ask(looking, visual_tokens=20)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "visual_tokens")
    response = ask(looking, route="lod/preview")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")


# The value is one a chat body may have: only the preview refuses it.
OF_ANSWERS: dict[str, Any] = {
    "n": 2,
    "logprobs": True,
    "stream": False,
    "max_tokens": 6,
    "max_completion_tokens": 6,
    "min_tokens": 1,
    "temperature": 0,
    "top_p": 0.5,
    "top_k": 4,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 1,
    "frequency_penalty": 1,
    "seed": 3,
    "logit_bias": {"1": 2},
    "stop": "x",
    "stop_token_ids": [1],
    "ignore_eos": True,
    "response_format": {"type": "text"},
    "tools": [{"type": "function", "function": {"name": "look"}}],
    "parallel_tool_calls": False,
    "reasoning_effort": "low",
    "chat_template_kwargs": {"a": 1},
}

# Refused without the field they belong to, by any route.
WITH_OTHERS = ("top_logprobs", "stream_options", "tool_choice")


def test_a_preview_refuses_what_is_about_an_answer(looking: Server) -> None:
    for name, value in OF_ANSWERS.items():
        response = ask(looking, LARGE, route="lod/preview", **{name: value})
        assert response.status_code == 400, name
        error = response.json()["error"]
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert ask(looking, LARGE, route="lod/preview", **dict.fromkeys(OF_ANSWERS)).status_code == 200
    assert {*OF_ANSWERS, *USED_FIELDS, *WITH_OTHERS} == {*PreviewBody.model_fields}
    response = ask(looking, LARGE, route="lod/preview", format="png", png=False)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "png")


def test_a_preview_has_the_maps_and_the_plan(looking: Server) -> None:
    response = ask(looking, LARGE, route="lod/preview", visual_tokens=56)
    assert response.status_code == 200
    assert "total;dur=" in response.headers["server-timing"]
    assert response.headers["x-request-id"].startswith("chatcmpl-")
    shown = response.json()
    assert (shown["object"], shown["budget"], shown["full_visual_tokens"]) == ("lod.preview", 56, 64)
    (one,) = shown["pictures"]
    assert one["size"] == [250, 256]
    rows, columns = one["global_grid"]
    for values in one["maps"].values():
        assert (len(values), len(values[0])) == (rows, columns)
    zooms = sum(region["tokens"] for region in one["regions"])
    assert shown["visual_tokens"] == rows * columns + zooms <= 56
    drawn = Image.open(io.BytesIO(base64.b64decode(one["png"].split(",")[1])))
    assert drawn.width >= 250
    plain = ask(looking, LARGE, route="lod/preview", visual_tokens=56, png=False).json()
    assert "png" not in plain["pictures"][0]
    image = ask(looking, LARGE, route="lod/preview", visual_tokens=56, format="png")
    assert image.headers["content-type"] == "image/png"
    assert Image.open(io.BytesIO(image.content)).format == "PNG"


def test_the_weights_of_the_scorers_follow_from_the_tension_to_explore(looking: Server) -> None:
    (one,) = ask(looking, LARGE, route="lod/preview", visual_tokens=56).json()["pictures"]
    rest = one["tensions"]["explore"] ** 2
    weights = {"propositional": rest / 2, "perspectival": rest / 2, "participatory": 1 - rest}
    assert one["weights"] == pytest.approx(weights, abs=1e-3)


def test_a_preview_of_a_picture_seen_in_full_says_so(looking: Server) -> None:
    (one,) = ask(looking, LARGE, route="lod/preview", detail="high").json()["pictures"]
    assert one["regions"] == []
    assert "full detail" in one["gated"]


def test_the_counters_know(looking: Server) -> None:
    names = {
        "looks": "saccade_looks_total",
        "full": 'saccade_tokens_total{kind="visual_at_full_detail"}',
        "visual": 'saccade_tokens_total{kind="visual"}',
    }
    before = {name: looking.gauge(full) for name, full in names.items()}
    visual, full = spent(ask(looking, LARGE, visual_tokens=56))
    looking.wait_until_empty()
    after = {name: looking.gauge(full) for name, full in names.items()}
    assert after["looks"] == before["looks"] + 1
    assert after["full"] == before["full"] + full
    assert after["visual"] == before["visual"] + visual


def test_a_public_checkpoint_sees_in_full_unless_told(server: Server) -> None:
    assert spent(ask(server, LARGE, detail="auto")) == (64, 64)
    assert spent(ask(server, LARGE, visual_tokens=30))[0] <= 30
