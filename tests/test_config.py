"""Options refuse nonsense, by name."""

import math
from typing import Any

import pytest

from saccade.config import EngineConfig, MediaLimits, ServeConfig
from saccade.errors import ConfigError


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (EngineConfig, "device", "gpu"),
        (EngineConfig, "dtype", "half"),
        (EngineConfig, "load_format", "dumy"),
        (EngineConfig, "overlap", "no"),
        (EngineConfig, "max_num_seqs", 0),
        (EngineConfig, "max_num_seqs", "3"),
        (EngineConfig, "max_model_len", 1),
        (EngineConfig, "block_size", 4096),
        (EngineConfig, "num_blocks", 2.5),
        (EngineConfig, "kv_cache_bytes", 0),
        (EngineConfig, "vision_cache_bytes", -1),
        (EngineConfig, "gpu_memory_utilization", 1.5),
        (EngineConfig, "max_queue_bytes", 0),
        (EngineConfig, "itl_target", -1.0),
        (ServeConfig, "request_timeout", -1),
        (ServeConfig, "read_timeout", 0),
        (ServeConfig, "shutdown_timeout", math.nan),
        (ServeConfig, "slow_request_seconds", -1.0),
        (ServeConfig, "max_body_bytes", 0),
        (ServeConfig, "max_choices", 0),
        (ServeConfig, "port", 70000),
        (ServeConfig, "api_keys", ("",)),
        (MediaLimits, "max_pixels", -1),
        (MediaLimits, "fetch_timeout", -5),
        (MediaLimits, "images_per_prompt", -1),
    ],
)
def test_nonsense_is_refused_by_name(kind: Any, name: str, value: Any) -> None:
    more = {"model": "m"} if kind is EngineConfig else {}
    with pytest.raises(ConfigError, match=name.replace("api_keys", "API key")):
        kind(**{name: value}, **more)


def test_two_sizes_of_one_pool_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="give one"):
        EngineConfig(model="m", num_blocks=4, kv_cache_bytes=4096)
