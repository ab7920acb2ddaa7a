"""The registry says what a family takes; `saccade models` prints it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from saccade import SamplingParams
from saccade.checkpoint import open_checkpoint
from saccade.cli.models import command
from saccade.errors import MediaRefused
from saccade.inputs.processor import InputProcessor
from saccade.models.families import FAMILIES
from tests import conftest
from tests.parity.oracle import picture


@pytest.mark.parametrize("family", conftest.FAMILIES)
def test_entries_agree_with_what_checkpoints_of_the_family_take(
    family_folder: Callable[[str], Path], family: str
) -> None:
    checkpoint = open_checkpoint(str(family_folder(family)))
    entry = FAMILIES[checkpoint.architecture]
    assert ("images" in entry.inputs) == (checkpoint.image is not None)
    assert ("videos" in entry.inputs) == (checkpoint.video is not None)
    assert entry.lod == (checkpoint.image is not None and checkpoint.image.supports_lod)


def test_every_family_is_tested(family_folder: Callable[[str], Path]) -> None:
    made = {open_checkpoint(str(family_folder(name))).architecture for name in conftest.FAMILIES}
    assert made == set(FAMILIES)


def test_the_command_lists_every_architecture() -> None:
    table = CliRunner().invoke(command, []).output
    assert all(name in table and entry.name in table for name, entry in FAMILIES.items())
    rows = json.loads(CliRunner().invoke(command, ["--json"]).output)
    assert [row["architecture"] for row in rows] == list(FAMILIES)


@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_an_image_for_a_text_model_is_refused(family_folder: Callable[[str], Path], family: str) -> None:
    inputs = InputProcessor(open_checkpoint(str(family_folder(family))), 4096)
    parts = [{"type": "image", "image": picture(9, 9, 1)}, {"type": "text", "text": "What?"}]
    with pytest.raises(MediaRefused, match="takes no images"):
        inputs.prepare_chat([{"role": "user", "content": parts}], SamplingParams(), "r", trusted=True)


def test_without_a_processor_configuration_images_are_refused(
    family_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    for file in family_folder("qwen2_5_vl").iterdir():
        if "preprocessor" not in file.name:
            (tmp_path / file.name).symlink_to(file)
    inputs = InputProcessor(open_checkpoint(str(tmp_path)), 4096)
    parts = [{"type": "image", "image": picture(9, 9, 1)}, {"type": "text", "text": "What?"}]
    with pytest.raises(MediaRefused, match="takes no images"):
        inputs.prepare_chat([{"role": "user", "content": parts}], SamplingParams(), "r", trusted=True)


def test_older_checkpoints_have_one_processor_file_for_images_and_videos(
    family_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    for file in family_folder("qwen2_5_vl").iterdir():
        if "video" not in file.name:
            (tmp_path / file.name).symlink_to(file)
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.image is not None
    assert checkpoint.video is not None
    assert checkpoint.video.digest == checkpoint.image.digest
    assert checkpoint.video.max_pixels == checkpoint.image.max_pixels
