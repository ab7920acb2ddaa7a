"""Relevance of a step: each request gets its own, failures stay with their request."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from saccade import SamplingParams
from saccade.encoder.encoder_runner import EncoderRunner
from saccade.engine import builder as build
from saccade.lod.image_maps import ImageMapRunner
from tests.parity.test_views import LOOKS, TURN, Bench, bench, boxes, looked

__all__ = ["bench"]  # a fixture

SHORT = "is a cat there?"
LONG = f"please tell me, {'as exactly as you can and with all that you know, ' * 3}what colour the roof has"


def asks(peers: Bench, text: str) -> Any:
    return peers.request(replace(LOOKS[0], text=TURN.format(text)))


def one_behind_the_other(peers: Bench, graphs: str, *, met: bool) -> dict[str, Any]:
    """What becomes of a question when another one, of another size, comes while its look is on its way;
    `met`: both sizes came before."""
    engine = peers.engine(overlap=True, graphs=graphs)
    for text in ("first", *([SHORT + "?", LONG + "?"] if met else [])):
        looked(engine, [asks(peers, text)])
    requests = {"short": asks(peers, SHORT), "long": asks(peers, LONG)}
    names = {request.id: name for name, request in requests.items()}
    found: dict[str, Any] = {name: [] for name in requests}
    engine.submit(requests["short"])
    engine.step()  # its look is launched
    engine.submit(requests["long"])
    while not engine.idle:
        for delta in engine.step():
            found[names[delta.request_id]] += [boxes(delta.zoomed)] if delta.zoomed else []
            found[names[delta.request_id]] += delta.tokens
    return found


@pytest.mark.parametrize("met", [True, False], ids=["sizes met before", "sizes captured now"])
def test_requests_get_their_own_relevance(
    bench: Callable[[str], Bench], met: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a step, or the capture of one, writes over looks that nobody has read yet."""
    peers = bench("stock")
    monkeypatch.setattr(build, "early_exit_tokens", lambda network, chip: 512)
    ordinary = one_behind_the_other(peers, "off", met=False)
    assert ordinary["short"][0] != ordinary["long"][0], "they would not notice"
    assert one_behind_the_other(peers, "on", met=met) == ordinary


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_image_maps_of_a_deleted_image_are_computed_once(
    bench: Callable[[str], Bench], graphs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = bench("stock")
    engine = peers.engine(graphs=graphs)
    computed: list[int] = []
    maps = ImageMapRunner.maps

    def counted(self: ImageMapRunner, *given: Any) -> torch.Tensor:
        computed.append(1)
        return maps(self, *given)

    monkeypatch.setattr(ImageMapRunner, "maps", counted)
    request = peers.request(LOOKS[0], n=1)
    engine.submit(request)
    engine.delete_image(request.media[0].view.content)
    while not engine.idle:
        engine.step()
    assert len(computed) == 1


def test_an_image_that_cannot_be_uploaded_fails_only_its_request(
    bench: Callable[[str], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = bench("stock")
    full: list[bool] = []
    send = EncoderRunner.upload

    def sent(self: EncoderRunner, *given: Any) -> torch.Tensor:
        if full:
            raise torch.OutOfMemoryError("no room")
        return send(self, *given)

    monkeypatch.setattr(EncoderRunner, "upload", sent)  # before the lookout is given it
    engine = peers.engine()
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    engine.submit(peers.front.prepare_prompt("hello there", params, "text", trusted=True))
    engine.step()
    full.append(True)
    engine.submit(peers.request(LOOKS[3], n=1))
    errors: dict[str, str | None] = {}
    tokens = 0
    while not engine.idle:
        for delta in engine.step():
            tokens += len(delta.tokens)
            errors |= {delta.request_id: delta.code} if delta.error else {}
    assert list(errors.values()) == ["encoding_failed"]
    assert "text" not in errors
    assert tokens == 11


def test_image_maps_that_fail_early_are_computed_with_the_relevance(
    bench: Callable[[str], Bench], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is raised: what a compiler says of a kernel is no RuntimeError."""
    peers = bench("stock")
    calls: list[bool] = []
    maps = ImageMapRunner.maps

    class CompilationError(Exception):
        pass

    def failing(self: ImageMapRunner, *given: Any) -> torch.Tensor:
        calls.append(not calls)
        if calls[-1]:
            raise CompilationError("line 7")
        return maps(self, *given)

    monkeypatch.setattr(ImageMapRunner, "maps", failing)
    engine = peers.engine()
    engine.submit(peers.request(LOOKS[0], n=1))
    errors, tokens = [], 0
    while not engine.idle:
        for delta in engine.step():
            tokens += len(delta.tokens)
            errors += [delta.error] if delta.error else []
    assert calls == [True, False]
    assert not errors
    assert tokens > 0
    assert "could not compute its image maps early: line 7" in caplog.text
