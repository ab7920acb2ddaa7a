"""`saccade quantize`: its checkpoints load in transformers and in our engine, and mean the same to both."""

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner
from PIL import Image

from saccade import LLM, SamplingParams
from saccade.checkpoint import open_checkpoint
from saccade.cli.app import app
from saccade.errors import ConfigError
from saccade.models.loader import load_model
from saccade.tools.quantize import writer
from saccade.tools.quantize.calibration import Calibration, calibration_requests
from saccade.tools.quantize.command import QuantizeReport, quantize
from saccade.tools.quantize.folding import scale_source
from saccade.tools.quantize.linear import CalibratedLinear
from saccade.tools.quantize.methods import ErrorCompensation, awq_scale, clipped_scales, output_error
from saccade.tools.quantize.methods import round_to_nearest as nearest
from saccade.tools.quantize.options import QuantizeOptions
from saccade.tools.quantize.quantizer import find_blocks
from saccade.tools.quantize.schemes import Scheme
from tests import checkpoints
from tests.quantization.formats import leave_activations_plain

QUESTION = "How many boats are in the picture?"
TOKENS = 8
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
WIDE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 32,
}  # blocks of 128 divide it


@pytest.fixture(scope="module")
def vl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.qwen3_vl(tmp_path_factory.mktemp("vl") / "model")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.qwen3(tmp_path_factory.mktemp("text") / "model", **WIDE)


def write(source: Path, out: Path, **options: Any) -> QuantizeReport:
    given = {"group_size": 32, "samples": 6, "device": "cpu", "progress": False, **options}
    return quantize(str(source), str(out), QuantizeOptions(**given))


def noise_image() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (96, 128, 3), dtype=np.uint8))


def tokens_of_ours(folder: Path, image: Image.Image | None) -> list[int]:
    parts = [] if image is None else [{"type": "image", "image": image}]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}]
    with contextlib.closing(LLM(str(folder), device="cpu", progress=False)) as llm:
        return list(llm.chat(messages, GREEDY)[0].outputs[0].token_ids)


def add_batch_dimension(module: torch.nn.Module) -> None:
    """compressed-tensors' scales per token take a batch dimension; without one, as in the vision tower, all
    tokens share a scale."""
    module.register_forward_pre_hook(lambda _, given: (given[0][None],))
    module.register_forward_hook(lambda _, given, made: made[0])


def tokens_of_transformers(folder: Path, image: Image.Image | None) -> list[int]:
    pytest.importorskip("compressed_tensors")
    kind = transformers.Qwen3ForCausalLM if image is None else transformers.Qwen3VLForConditionalGeneration
    config = transformers.CompressedTensorsConfig(dequantize=True)
    model, info = kind.from_pretrained(folder, output_loading_info=True, quantization_config=config)
    assert not any(info.values()), info
    if image is not None:
        for module in model.model.visual.modules():
            if isinstance(module, torch.nn.Linear):
                add_batch_dimension(module)
    parts = [] if image is None else [{"type": "image"}]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}]
    inputs = checkpoints.oracle_inputs(folder, messages, () if image is None else (image,))
    made = model.generate(**inputs, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
    return [int(token) for token in made[0, -TOKENS:]]


@pytest.mark.parametrize(
    ("scheme", "method"),
    [
        ("fp8", "rtn"),
        ("fp8", "smoothquant"),
        ("int8", "rtn"),
        ("int8", "smoothquant"),
        ("int8", "gptq"),
        ("int4", "rtn"),
        ("int4", "awq"),
        ("int4", "gptq"),
        ("decoder=int4,vision=fp8", "awq"),
    ],
)
def test_engine_and_transformers_give_the_same_tokens(
    vl: Path, tmp_path: Path, scheme: str, method: str
) -> None:
    out = tmp_path / "out"
    report = write(vl, out, scheme=scheme, method=method)
    assert report.nbytes < report.before
    leave_activations_plain(out)  # the command writes weights; those are compared
    image = noise_image()
    assert tokens_of_ours(out, image) == tokens_of_transformers(out, image)


@pytest.mark.parametrize(("scheme", "method"), [("fp8-block", "rtn"), ("int4", "gptq")])
def test_a_text_model_is_quantised_too(text: Path, tmp_path: Path, scheme: str, method: str) -> None:
    out = tmp_path / "out"
    write(text, out, scheme=scheme, method=method)
    leave_activations_plain(out)
    assert tokens_of_ours(out, None) == tokens_of_transformers(out, None)


def test_several_shards_have_an_index(vl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, split = tmp_path / "whole", tmp_path / "split"
    write(vl, whole)
    monkeypatch.setattr(writer, "SHARD_BYTES", 200_000)
    write(vl, split)
    assert len(list(split.glob("model-*-of-*.safetensors"))) > 2
    assert not list(split.glob("*.part"))
    both = [dict(writer.read_tensors(open_checkpoint(str(one)).weight_files())) for one in (whole, split)]
    assert both[0].keys() == both[1].keys()
    assert all(torch.equal(both[0][name], both[1][name]) for name in both[0])


def test_calibrated_methods_lower_the_output_error(vl: Path, tmp_path: Path) -> None:
    for method in ("awq", "gptq"):
        report = write(vl, tmp_path / method, scheme="int4", method=method, samples=12)
        assert len(report.errors) == 16
        total = [sum(one.error for one in report.errors), sum(one.nearest for one in report.errors)]
        assert total[0] < total[1] * (0.5 if method == "gptq" else 0.9)


def correlated_inputs(columns: int) -> torch.Tensor:
    """Rows of a few directions with noise, some columns much larger: as a language model's are."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(24, columns, generator=generator)
    x = torch.randn(1000, 24, generator=generator) @ directions
    x = x + 0.3 * torch.randn(1000, columns, generator=generator)
    return x * torch.randn(columns, generator=generator).exp()


def test_gptq_halves_the_error_of_a_layer_and_awq_lowers_it() -> None:
    x = correlated_inputs(128)
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    gram, scheme, stored = x.t() @ x, Scheme("int4", 32), torch.bfloat16
    rtn = output_error(nearest(weight, scheme, stored) - weight, gram)
    assert rtn == pytest.approx(
        float(((x @ (nearest(weight, scheme, stored) - weight).t()) ** 2).sum()), 1e-3
    )

    clipped = scheme.expand(clipped_scales(weight, gram, scheme, stored), weight.shape)
    assert output_error(scheme.round(weight, clipped) * clipped - weight, gram) < rtn

    values = ErrorCompensation(gram).round(weight, clipped, scheme)
    assert {int(values.min()), int(values.max())} == {-8, 7}
    assert output_error(values * clipped - weight, gram) < 0.5 * rtn

    scale = awq_scale(weight, x.abs().mean(0), gram, scheme, stored)
    assert output_error(nearest(weight * scale, scheme, stored) / scale - weight, gram) < 0.8 * rtn


def test_folded_scales_leave_the_model_as_it_was(vl: Path) -> None:
    checkpoint = open_checkpoint(str(vl))
    model = load_model(checkpoint, "cpu", torch.float32, online=CalibratedLinear)
    requests = calibration_requests(QuantizeOptions(samples=4), checkpoint)
    before = [hidden.clone() for _, hidden in Calibration(model, checkpoint, requests).decode()]
    generator, folded = torch.Generator().manual_seed(0), []
    with torch.inference_mode():
        for block in find_blocks(model):
            for inner, linear in block.layers.items():
                source = scale_source(model.get_submodule(block.path), inner, torch.bfloat16)
                if source is None:
                    continue
                scale = torch.randn(linear.spec.in_features, generator=generator).exp()
                linear.weight.mul_(source.divide(source.share(scale)))
                folded.append(f"{block.stage} {inner}")
    assert {"vision attention.qkv", "vision up", "decoder attention.qkv", "decoder attention.out"} < set(
        folded
    )
    assert {"decoder mlp.gate_up", "decoder mlp.down"} < set(folded)
    for old, (_, new) in zip(before, Calibration(model, checkpoint, requests).decode(), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-3, atol=1e-3)


def test_the_user_may_give_calibration_images(vl: Path, tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    noise_image().save(images / "a.png")
    (images / "a.txt").write_text("What colour is the house?")
    noise_image().save(images / "b.jpg")
    (images / "c.txt").write_text("Describe the eye.")
    options = QuantizeOptions(calibration=str(images))
    requests = calibration_requests(options, open_checkpoint(str(vl)))
    assert [len(request.media) for request in requests] == [1, 1, 0]
    (tmp_path / "empty").mkdir()
    options = QuantizeOptions(calibration=str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match=r"no images .* or .txt prompts"):
        calibration_requests(options, open_checkpoint(str(vl)))


def test_the_same_prompts_give_the_same_checkpoint(vl: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(vl, tmp_path / name, scheme="int4", method="gptq")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": "int3"}, "'int3' is neither"),
        ({"scheme": "decoder=fp9"}, "'decoder=fp9' is neither"),
        ({"scheme": "decoder=none"}, "quantises nothing"),
        ({"scheme": "int4", "method": "smoothquant"}, "smoothquant does not apply to int4; choose"),
        ({"scheme": "fp8-block", "method": "gptq"}, "gptq does not apply to fp8-block"),
        ({"group_size": 12}, "multiple of 8"),
        ({"samples": 0}, "samples is 0"),
        ({"calibration": "/nowhere"}, "no folder /nowhere"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        QuantizeOptions(**options)


def test_bad_checkpoints_and_folders_are_refused(vl: Path, tmp_path: Path) -> None:
    done = tmp_path / "done"
    write(vl, done)
    with pytest.raises(ConfigError, match="quantised already"):
        write(done, tmp_path / "again")
    with pytest.raises(ConfigError, match="not an empty folder"):
        write(vl, done)
    with pytest.raises(
        ConfigError, match=r"layers\.0\.\S+ has 64 columns, which groups of 128 do not divide"
    ):
        write(vl, tmp_path / "groups", scheme="int4", group_size=128)
    with pytest.raises(ConfigError, match="has experts"):
        write(checkpoints.qwen3_moe(tmp_path / "moe"), tmp_path / "experts")
    tied = checkpoints.qwen3(tmp_path / "tied", tied=True)
    with pytest.raises(ConfigError, match="no linear layers in the stage head"):
        write(tied, tmp_path / "head", scheme="decoder=int8,head=int8")


def test_the_command_writes_a_checkpoint_and_says_what_it_won(vl: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["quantize", str(vl), str(out), "--scheme", "int4", "--method", "gptq", "--group-size", "32"]
    done = CliRunner().invoke(app, [*arguments, "--samples", "4", "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert "28 linear layers" in done.output
    assert "when rounded to nearest" in done.output
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["format"]) == ("compressed-tensors", "pack-quantized")
    assert "lm_head" in config["ignore"]
    assert (out / "tokenizer.json").is_file()


def test_a_tied_head_stays_as_it_is(tmp_path: Path) -> None:
    tied = checkpoints.qwen3(tmp_path / "tied", tied=True)
    write(tied, tmp_path / "out", scheme="int8")
    names = dict(writer.read_tensors(open_checkpoint(str(tmp_path / "out")).weight_files()))
    assert not [name for name in names if name.startswith("lm_head")]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head"]
