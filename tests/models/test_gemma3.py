"""Gemma 3's configuration: older spellings mean the same, what is not implemented is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from saccade.checkpoint import open_checkpoint
from saccade.errors import CheckpointError
from saccade.models.gemma3 import build
from saccade.models.layers import ModelBuilder

META = ModelBuilder(torch.device("meta"), torch.float32)


@pytest.fixture
def config(family_folder: Callable[[str], Path]) -> dict[str, Any]:
    return json.loads((family_folder("gemma3") / "config.json").read_text())  # type: ignore[no-any-return]


def frequencies(config: dict[str, Any]) -> list[list[float]]:
    model: Any = build(config, ModelBuilder(torch.device("cpu"), torch.float32))
    return [model._frequencies[windowed].tolist() for windowed in (False, True)]


def test_older_files_rotate_as_newer_ones(config: dict[str, Any]) -> None:
    older = {key: value for key, value in config.items() if key != "rope_parameters"}
    older |= {"rope_theta": 20000.0, "rope_local_base_freq": 1000.0}
    older |= {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    assert frequencies(older) == frequencies(config)


def test_every_sixth_layer_is_full_where_layers_are_not_listed(config: dict[str, Any]) -> None:
    model: Any = build({**config, "layer_types": None, "num_hidden_layers": 13}, META)
    assert [index for index, window in enumerate(model._windows) if window is None] == [5, 11]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("use_bidirectional_attention", True),
        ("hidden_activation", "relu"),
        ("sliding_window", None),
        ("query_pre_attn_scalar", -1),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    config: dict[str, Any], field: str, value: object
) -> None:
    with pytest.raises(CheckpointError, match=field):
        build({**config, field: value}, META)


def test_the_checkpoint_opens_as_a_text_model(family_folder: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(str(family_folder("gemma3")))
    assert checkpoint.architecture == "Gemma3ForCausalLM"
    assert checkpoint.image is None
