"""`LLM` from the outside: prompt forms, outputs, seeds, stops, errors without side effects."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import saccade.llm as library
from saccade import LLM, SamplingParams
from saccade.config import MediaLimits
from saccade.errors import ConfigError, ContextTooLong, InvalidValue, MediaRefused
from saccade.inputs.media import decode
from saccade.request import Delta, Pixels, Request
from tests.parity.oracle import picture

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(vl_folder: Path) -> Iterator[LLM]:
    made = LLM(str(vl_folder), device="cpu", progress=False, num_blocks=256)
    yield made
    made.close()


def texts(llm: LLM, prompts: Any, params: SamplingParams) -> list[list[str]]:
    return [[choice.text for choice in output.outputs] for output in llm.generate(prompts, params)]


def test_every_form_of_a_prompt_gives_the_same_answer(llm: LLM, tmp_path: Path) -> None:
    image = picture(90, 60, 1)
    path = tmp_path / "picture.png"
    image.save(path)
    prompt = IMAGE + "What is it?"
    ids = llm.processor.tokenizer.encode(prompt)
    forms = [
        {"prompt": prompt, "images": [image]},
        {"prompt": prompt, "images": [path]},
        {"prompt": prompt, "images": [str(path)]},
        {"prompt": prompt, "images": [path.read_bytes()]},
        {"prompt_token_ids": ids, "images": [image]},
    ]
    answers = texts(llm, forms, GREEDY)
    assert answers == [answers[0]] * len(forms)


def test_more_prompts_than_the_queue_holds_are_answered_in_order(llm: LLM) -> None:
    short = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    prompts = [[5 + number % 40, 6] for number in range(5000)]
    outputs = llm.generate(prompts, short)
    assert [output.prompt_token_ids for output in outputs] == [tuple(prompt) for prompt in prompts]
    tokens = [output.outputs[0].token_ids for output in outputs]
    assert tokens[:40] == tokens[40:80] == tokens[4960:]


def test_a_single_prompt_is_a_list_of_one(llm: LLM) -> None:
    ids = llm.processor.tokenizer.encode("The eye jumps")
    one = texts(llm, "The eye jumps", GREEDY)
    for form in ([ids], ids, np.array(ids), [np.array(ids)]):
        assert texts(llm, form, GREEDY) == one


def test_outputs_have_tokens_finish_reason_and_usage(llm: LLM) -> None:
    asked = {"prompt": IMAGE + "What is it?", "images": [picture(64, 64, 2)]}
    (output,) = llm.generate(asked, SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, logprobs=3))
    (choice,) = output.outputs
    assert len(choice.token_ids) == len(choice.logprobs) == 5
    assert choice.finish_reason == "length"
    for token, told in zip(choice.token_ids, choice.logprobs, strict=True):
        assert told.sampled.id == token == told.top[0].id
        assert len(told.top) == 3
        assert told.sampled.logprob == told.top[0].logprob >= told.top[1].logprob
    usage = output.usage
    assert usage.visual_tokens == 4
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(output.prompt_token_ids) + 3, 5)


def test_a_seed_reproduces_its_tokens_in_any_batch(llm: LLM) -> None:
    seeded = SamplingParams(max_tokens=20, temperature=1.5, seed=7, ignore_eos=True)
    alone = texts(llm, "The eye", seeded)
    crowd = [SamplingParams(max_tokens=20, temperature=1.0, seed=index) for index in range(6)]
    among = llm.generate(
        ["A picture of"] * 3 + ["The eye"] + ["Read the"] * 3, [*crowd[:3], seeded, *crowd[3:]]
    )
    assert [among[3].outputs[0].text] == alone[0]
    other = SamplingParams(max_tokens=20, temperature=1.5, seed=8, ignore_eos=True)
    assert texts(llm, "The eye", other) != alone


def test_choices_of_one_request_differ_and_repeat(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.5, seed=3, n=4, ignore_eos=True)
    first, second = texts(llm, "The eye", params)[0], texts(llm, "The eye", params)[0]
    assert first == second
    assert len(set(first)) == 4


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    whole = texts(llm, "The eye jumps", SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))[0][0]
    stop = whole[10:13]
    (output,) = llm.generate(
        "The eye jumps", SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, stop=[stop])
    )
    assert output.outputs[0].text == whole[: whole.index(stop)]
    assert output.outputs[0].finish_reason == "stop"
    assert llm.engine.idle


def test_a_stop_token_ends_it_after_min_tokens(llm: LLM) -> None:
    ids = llm.generate("The eye jumps", GREEDY)[0].outputs[0].token_ids
    early = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, stop_token_ids=(ids[3],))
    assert llm.generate("The eye jumps", early)[0].outputs[0].token_ids == ids[: ids.index(ids[3]) + 1]
    late = SamplingParams(
        max_tokens=12, min_tokens=8, temperature=0, ignore_eos=True, stop_token_ids=(ids[3],)
    )
    assert len(llm.generate("The eye jumps", late)[0].outputs[0].token_ids) >= 8


def test_logit_bias_decides(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logit_bias={42: 100.0})
    assert llm.generate("The eye", params)[0].outputs[0].token_ids == [42] * 4


def test_repetition_is_penalised(llm: LLM) -> None:
    biased = {42: 60.0}
    params = SamplingParams(
        max_tokens=4, temperature=0, ignore_eos=True, logit_bias=biased, repetition_penalty=10.0
    )
    assert llm.generate("The eye", params)[0].outputs[0].token_ids.count(42) == 1


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("", InvalidValue),
        (IMAGE, InvalidValue),
        ({"prompt": "no place", "images": [picture(40, 40, 1)]}, InvalidValue),
        ({"prompt": IMAGE, "images": [b"no picture"]}, MediaRefused),
        ({"prompt": "a", "pictures": []}, InvalidValue),
        ({"images": []}, InvalidValue),
        ("hello " * 5000, ContextTooLong),
        ([512], InvalidValue),
    ],
)
def test_a_bad_prompt_cancels_the_whole_call(llm: LLM, prompt: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        llm.generate(["a good one", prompt, "another"], GREEDY)
    llm.engine.step()
    assert llm.engine.idle
    assert llm.engine.stats().blocks_used == 0
    llm.engine.check()
    assert sys.getswitchinterval() == pytest.approx(0.005)
    assert gc.get_freeze_count() == 0


def test_switch_interval_is_short_while_threads_prepare(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[float, bool]] = []
    step = llm.engine.step

    def watched() -> list[Delta]:
        found.append((sys.getswitchinterval(), gc.get_freeze_count() > 0))
        return step()

    monkeypatch.setattr(llm.engine, "step", watched)
    llm.generate(["one", "other"], GREEDY)
    assert found
    assert all(seconds == pytest.approx(library.SWITCH_SECONDS) and frozen for seconds, frozen in found)
    assert sys.getswitchinterval() == pytest.approx(0.005)


def test_overlapping_calls_restore_the_switch_interval() -> None:
    first, second = library._worker_threads(), library._worker_threads()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(0.005)
    assert gc.get_freeze_count() == 0


def test_first_step_waits_for_few_requests_and_later_steps_add_more(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "FIRST_STEP_REQUESTS", 3)
    came: list[int] = []  # requests there are, at every step
    submit, step = llm.engine.submit, llm.engine.step
    submitted: list[str] = []

    def noted(request: Request) -> None:
        submitted.append(request.id)
        submit(request)

    def watched() -> list[Delta]:
        came.append(len(submitted))
        return step()

    monkeypatch.setattr(llm.engine, "submit", noted)
    monkeypatch.setattr(llm.engine, "step", watched)
    prompts = [[5 + number, 6] for number in range(40)]
    assert len(llm.generate(prompts, GREEDY)) == 40
    assert came[0] == 3
    assert all(count <= 3 * 2**place for place, count in enumerate(came))
    assert came[-1] == 40


def test_chat_takes_one_conversation_or_several(llm: LLM) -> None:
    content = [{"type": "image", "image": picture(70, 50, 3)}, {"type": "text", "text": "What is it?"}]
    one = [{"role": "user", "content": content}]
    (first,) = llm.chat(one, GREEDY)
    again = llm.chat([one, one], GREEDY)
    assert [output.outputs[0].text for output in again] == [first.outputs[0].text] * 2
    assert again[0].usage.cached_tokens > 0


def test_options_that_cannot_be_met_are_refused(vl_folder: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len is 999999"):
        LLM(str(vl_folder), device="cpu", progress=False, max_model_len=999_999)
    with pytest.raises(ConfigError, match="holds 64 tokens"):
        LLM(str(vl_folder), device="cpu", progress=False, max_model_len=128, num_blocks=4)
    small = LLM(str(vl_folder), device="cpu", progress=False, max_num_seqs=1, max_model_len=64, num_blocks=40)
    assert small.engine.info.num_blocks == 40  # what was asked for, more than one row needs
    with pytest.raises(ConfigError, match="at least 1"):
        LLM(str(vl_folder), device="cpu", progress=False, max_num_seqs=0)
    with pytest.raises(TypeError):
        LLM(str(vl_folder), device="cpu", shiny=True)


def test_nan_logits_fail_only_their_request(vl_folder: Path) -> None:
    llm = LLM(str(vl_folder), device="cpu", progress=False, num_blocks=256)
    good = llm.generate("The eye jumps", GREEDY)[0].outputs[0].text
    logits = llm.engine._executor.runner._model.logits

    def poisoned(hidden: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = logits(hidden)
        if len(values) > 1:
            values[1] = torch.nan
        return values

    llm.engine._executor.runner._model.logits = poisoned  # type: ignore[method-assign]
    for name, prompt in (("good", "The eye jumps"), ("bad", "How many boats")):
        llm.engine.submit(llm.processor.prepare_prompt(prompt, GREEDY, name, trusted=True))
    deltas = [delta for _ in range(40) for delta in llm.engine.step()]
    ends = {delta.request_id: (delta.finish, bool(delta.error)) for delta in deltas if delta.finish}
    assert ends == {"good": ("length", False), "bad": ("error", True)}
    tokens = [token for delta in deltas if delta.request_id == "good" for token in delta.tokens]
    assert llm.processor.tokenizer.decode(tokens) == good
    llm.engine.check()


def test_an_image_shared_by_prompts_is_read_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    plain = decode.from_image

    def counted(image: Image.Image, limits: MediaLimits) -> Pixels:
        read.append(id(image))
        return plain(image, limits)

    monkeypatch.setattr(decode, "from_image", counted)
    one, other = (Image.new("RGB", (40, 32), colour) for colour in ("red", "blue"))
    token = llm.processor.checkpoint.image_token_id
    prompts: list[Any] = [{"prompt_token_ids": [5, token, 6 + n], "images": [one]} for n in range(4)]
    prompts += [{"prompt_token_ids": [5, token, 9], "images": [other]}]
    answers = llm.generate(prompts, SamplingParams(max_tokens=2, temperature=0))
    assert sorted(read) == sorted([id(one), id(other)])
    one.paste("blue", (0, 0, 40, 32))  # changed afterwards: another picture in the next call
    again = llm.generate([prompts[0], prompts[0]], SamplingParams(max_tokens=2, temperature=0))
    assert read.count(id(one)) == 2
    same = llm.generate(dict(prompts[0], images=[other]), SamplingParams(max_tokens=2, temperature=0))
    assert again[0].outputs[0].token_ids == same[0].outputs[0].token_ids
    assert answers[0].usage.prompt_tokens == again[0].usage.prompt_tokens
