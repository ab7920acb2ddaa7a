"""A look's participatory map, beside what transformers' hidden states and attention weights say."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from saccade import SamplingParams
from saccade.config import EngineConfig
from saccade.encoder.prompt_layout import lay_out_prompt
from saccade.engine.core import Engine
from saccade.errors import CheckpointError
from saccade.lod import relevance_pass as lookout
from saccade.lod.detail import DetailRequest
from saccade.lod.relevance_pass import HostCopy, ImageMapsTransfer, RelevanceSlice, RelevanceTransfer
from saccade.lod.scorers import NUM_IMAGE_MAPS
from saccade.lod.types import ImageMaps, LodParams, RelevanceMaps
from saccade.request import Request, View, ZoomResult
from saccade.step_plan import PromptLayout, StepPlan
from saccade.worker.model_runner import LaunchedStep, ModelRunner
from tests.parity.test_views import HEAD_LAYER, HEAD_WIDTH, LOOKS, Bench, Question, bench, looked, patches_of

__all__ = ["bench"]  # the fixture


def make_preview(peers: Bench, question: Question, budget: int | None) -> Request:
    return peers.front.prepare_prompt(
        question.text,
        SamplingParams(max_tokens=4, temperature=0),
        f"look{next(peers.numbers)}",
        images=question.pictures,
        trusted=True,
        detail_req=DetailRequest(params=LodParams(budget=budget, gate=False), preview_only=True),
    )


def preview_only(peers: Bench, number: int, **options: Any) -> tuple[Request, ZoomResult, PromptLayout]:
    """The same question looked at twice by one engine: by itself, and on the caches the first one left."""
    question = LOOKS[number]
    engine = peers.engine(**options)
    told = []
    for _ in range(2):
        request = make_preview(peers, question, question.budget)
        engine.submit(request)
        while not engine.idle:
            told += [delta.zoomed for delta in engine.step() if delta.zoomed]
            engine.check()
    first, second = told
    for one, other in zip(first.looks, second.looks, strict=True):
        assert np.allclose(one.participatory, other.participatory, atol=1e-5)
        assert np.array_equal(one.propositional, other.propositional)
        assert np.array_equal(one.lost, other.lost)
    assert engine.stats().prefix_hit_tokens > 0
    return request, second, lay_out_prompt(request)


@torch.inference_mode()
def inside(peers: Bench, request: Request, layout: PromptLayout) -> tuple[torch.Tensor, Any]:
    """transformers' states before the head's layer, and attention weights, up to where the question ends."""
    model = peers.oracle.model
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    states: list[torch.Tensor] = []
    hook = model.model.language_model.layers[HEAD_LAYER].register_forward_pre_hook(
        lambda layer, arguments: states.append(arguments[0])
    )
    try:
        ids = torch.tensor([layout.tokens])
        result = model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            pixel_values=patches_of(peers.front, request),
            image_grid_thw=torch.tensor([[1, *span.view.grid] for span in layout.spans]),
            mm_token_type_ids=(ids == peers.oracle.config.image_token_id).long(),
            position_ids=torch.from_numpy(layout.positions)[:, None],
            output_attentions=True,
        )
        return states[0][0], result.attentions
    finally:
        hook.remove()
        model.set_attn_implementation(before)


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 5, "block_size": 4}], ids=["whole", "chunks"]
)
def test_the_head_scores_what_its_definition_says(
    bench: Callable[[str], Bench], number: int, options: dict[str, Any]
) -> None:
    peers = bench("registered")
    request, told, layout = preview_only(peers, number, **options)
    states, _ = inside(peers, request, layout)
    weights = load_file(peers.folder / "head.safetensors")

    def normed(x: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weights["relevance_norm.weight"]

    asked = weights["question.weight"] @ normed(states[-1])
    for look, span in zip(told.looks, layout.spans, strict=True):
        places = normed(states[span.start : span.stop]) @ weights["place.weight"].T
        scores = places @ asked / HEAD_WIDTH**0.5
        shown = scores.softmax(0).reshape(span.view.token_grid)
        assert shown.max() < 0.9, "a map of one place would say little"
        assert np.allclose(look.participatory, shown.numpy(), atol=1e-5)
        assert math.isclose(look.strength, float(scores.logsumexp(0)), rel_tol=1e-4)


def test_without_a_head_attention_at_the_middle_layers_counts(bench: Callable[[str], Bench]) -> None:
    peers = bench("stock")
    request, told, layout = preview_only(peers, 0, max_num_batched_tokens=5, block_size=4)
    _, attentions = inside(peers, request, layout)
    layers = sorted({int(4 * part) for part in (0.4, 0.5, 0.625)})
    (span,) = layout.spans
    weight = torch.stack([attentions[layer][0, :, -1, span.start : span.stop] for layer in layers])
    share = weight / weight.sum(-1, keepdim=True)  # [layers, heads, tokens]
    entropy = -(share * share.clamp(min=1e-9).log()).sum(-1) / math.log(span.view.tokens)
    mixed = (share * (1 - entropy).clamp(min=1e-4).square()[..., None]).sum((0, 1))
    shown = (mixed / mixed.sum()).reshape(span.view.token_grid)
    assert np.allclose(told.looks[0].participatory, shown.numpy(), atol=1e-4)


def test_a_head_of_another_shape_is_refused(bench: Callable[[str], Bench], tmp_path: Any) -> None:
    peers = bench("registered")
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in peers.folder.iterdir():
        (broken / file.name).symlink_to(file)
    (broken / "config.json").unlink()
    text = (peers.folder / "config.json").read_text()
    (broken / "config.json").write_text(text.replace(f'"width": {HEAD_WIDTH}', '"width": 5'))
    with pytest.raises(CheckpointError, match=r"question\.weight is \(8, 64\); the model needs \(5, 64\)"):
        Engine(EngineConfig(model=str(broken), device="cpu", num_blocks=64), progress=False)
    (broken / "head.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"head\.safetensors, which config\.json names"):
        Engine(EngineConfig(model=str(broken), device="cpu", num_blocks=64), progress=False)


def test_image_maps_of_a_deleted_image_are_dropped(bench: Callable[[str], Bench]) -> None:
    """Whether it is deleted after it was looked at, or while a request that will look at it waits."""
    peers = bench("registered")
    engine = peers.engine()
    stills = engine._executor.runner._vision.relevance._cached_maps  # type: ignore[union-attr]
    kept: list[list[int]] = []
    for waiting in (False, True):
        request = peers.request(LOOKS[0], n=1)
        engine.submit(request)
        contents = {item.view.content for item in request.media}
        counts = []
        if waiting:
            for content in contents:
                engine.delete_image(content)
        while not engine.idle:
            engine.step()
        counts.append(len(stills))
        for content in contents:
            engine.delete_image(content)
        kept.append([*counts, len(stills)])
    assert kept == [[len(contents), 0], [0, 0]]


def test_image_maps_are_copied_to_the_host_once(
    bench: Callable[[str], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later looks refer to it; another view of the picture has its own; what was deleted comes anew, and so
    does what others took the place of."""
    peers = bench("registered")
    engine = peers.engine()
    came: list[int] = []  # numbers, of each lot
    stills: list[ImageMaps] = []
    wait, take = RelevanceTransfer.wait, HostCopy.wait

    def noted(self: RelevanceTransfer) -> tuple[tuple[RelevanceMaps, ...], ...]:
        found = wait(self)
        stills.extend(look.image_maps for row in found for look in row)
        return found

    def taken(self: HostCopy) -> Any:
        came.append(take(self).size)
        return take(self)

    monkeypatch.setattr(RelevanceTransfer, "wait", noted)
    monkeypatch.setattr(HostCopy, "wait", taken)

    def ask(question: Question, budget: int | None = None) -> View:
        """With a budget of its own, only looked at: this checkpoint zooms behind views of one size alone."""
        request = make_preview(peers, question, budget) if budget else peers.request(question, n=1)
        looked(engine, [request])
        return request.media[0].view

    seen = ask(LOOKS[0])
    ask(LOOKS[1])  # something else about the same picture
    assert came == [seen.tokens + 1, NUM_IMAGE_MAPS * seen.tokens, seen.tokens + 1]
    assert stills[0] is stills[1]
    larger = ask(LOOKS[0], budget=40)
    assert larger.content == seen.content
    assert came[3:] == [larger.tokens + 1, NUM_IMAGE_MAPS * larger.tokens]
    assert stills[2].propositional.shape == larger.token_grid != seen.token_grid

    def delete() -> None:
        engine.delete_image(seen.content)

    def crowd_out() -> None:
        monkeypatch.setattr(lookout, "MAX_CACHED_TOKENS", seen.tokens)
        ask(LOOKS[3])

    for lose in (delete, crowd_out):
        lose()
        before = len(came)
        ask(LOOKS[0])
        ask(LOOKS[1])
        assert came[before:] == [seen.tokens + 1, NUM_IMAGE_MAPS * seen.tokens, seen.tokens + 1]
        assert stills[-1] is stills[-2]
        assert all(stills[-1] is not one for one in stills[:-2])
        assert np.array_equal(stills[-1].propositional, stills[0].propositional)
    keeping = engine._executor.runner._vision
    assert keeping is not None
    assert len(keeping.relevance._cached_maps) == 1
    assert keeping.relevance._cached_tokens == seen.tokens


def test_targets_of_one_step_share_the_image_maps() -> None:
    maps = torch.rand(NUM_IMAGE_MAPS, 2, 3)
    still, other = ImageMapsTransfer(b"one", (2, 3), maps), ImageMapsTransfer(b"other", (2, 3), maps + 1)
    numbers = [[float(number)] * 6 + [number + 0.5] for number in range(3)]
    told = HostCopy(torch.tensor(numbers).flatten())
    looks = [
        RelevanceSlice((2, 3), one, 7 * place, 7 * place + 6)
        for place, one in enumerate((still, still, other))
    ]
    host = RelevanceTransfer(told, (tuple(looks),))
    assert host.ready
    (found,) = host.wait()
    assert host.wait()[0] is found
    assert found[0].image_maps is found[1].image_maps is still.wait()
    assert [look.strength for look in found] == [0.5, 1.5, 2.5]
    for number, (look, raw) in enumerate(zip(found, (maps, maps, maps + 1), strict=True)):
        assert np.array_equal(look.participatory, np.full((2, 3), number, np.float32))
        assert np.array_equal(look.propositional, raw[0].numpy())
        assert np.array_equal(look.lost, raw[2].numpy())


def test_zoomed_views_are_launched_before_the_relevance_step_is_updated(
    bench: Callable[[str], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lone question: its look is heard before the rest of its step is learnt, and the views are launched in
    between."""
    peers = bench("stock")
    engine = peers.engine(overlap=True)
    did: list[str] = []
    wait, execute = RelevanceTransfer.wait, ModelRunner.execute

    def waited(self: RelevanceTransfer) -> Any:
        did.append("looked")
        return wait(self)

    def launched(self: ModelRunner, plan: StepPlan) -> LaunchedStep:
        did.append("launched")
        return execute(self, plan)

    monkeypatch.setattr(RelevanceTransfer, "wait", waited)
    monkeypatch.setattr(ModelRunner, "execute", launched)
    engine.submit(peers.request(LOOKS[0], n=1))
    while not engine.idle:
        engine.step()
        engine.check()
        did.append("told")
    assert did[:6] == ["launched", "told", "looked", "launched", "looked", "told"]
