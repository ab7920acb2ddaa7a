"""Invalid options are refused by name."""

import math
from typing import Any

import pytest

from saccade.config import EngineConfig, MediaLimits, ServeConfig, VisionCache
from saccade.errors import ConfigError


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (EngineConfig, "device", "gpu"),
        (EngineConfig, "dtype", "half"),
        (EngineConfig, "load_format", "dumy"),
        (EngineConfig, "overlap", "no"),
        (EngineConfig, "kernels", "cuda"),
        (EngineConfig, "graphs", True),
        (EngineConfig, "early_launch", "yes"),
        (EngineConfig, "deterministic", None),
        (EngineConfig, "max_num_seqs", 0),
        (EngineConfig, "max_num_seqs", "3"),
        (EngineConfig, "max_model_len", 1),
        (EngineConfig, "block_size", 4096),
        (EngineConfig, "num_blocks", 2.5),
        (EngineConfig, "kv_cache_bytes", 0),
        (EngineConfig, "kv_cache_dtype", "fp4"),
        (EngineConfig, "kv_vision_dtype", None),
        (EngineConfig, "kv_vision_share", 1.0),
        (EngineConfig, "kv_vision_share", math.nan),
        (EngineConfig, "kv_vision_views", "some"),
        (EngineConfig, "vision_cache", "gpu=1GiB"),
        (EngineConfig, "swap_bytes", -1),
        (EngineConfig, "pinned_prefix_bytes", -1),
        (EngineConfig, "pin_prefix", "You are helpful"),
        (EngineConfig, "pin_prefix", (" ",)),
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
def test_invalid_value_is_refused_by_name(kind: Any, name: str, value: Any) -> None:
    more = {"model": "m"} if kind is EngineConfig else {}
    with pytest.raises(ConfigError, match=name.replace("api_keys", "API key")):
        kind(**{name: value}, **more)


def test_num_blocks_and_kv_cache_bytes_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="give one"):
        EngineConfig(model="m", num_blocks=4, kv_cache_bytes=4096)


def test_one_eight_bit_format_at_a_time() -> None:
    with pytest.raises(ConfigError, match="leave out kv_vision_dtype int8"):
        EngineConfig(model="m", kv_cache_dtype="fp8", kv_vision_dtype="int8")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("8GiB", "not a part of a vision cache"),
        ("gpu", "not a part"),
        ("gpu=", "not a part"),
        ("gpu=8GiB,ram=2GiB", "'ram=2GiB' is not a part"),
        ("gpu=much", "'much' is not a size"),
        ("gpu=-1", "gpu is -1"),
        ("host=nan", "'nan' is not a size"),
        ("gpu=1,gpu=2", "gpu is given twice"),
        ("disk=1GiB", "give a dir"),
        ("dir=/tmp", "disk is 0"),
        ("ttl=soon", "ttl is 'soon'"),
        ("ttl=0", "ttl is 0.0"),
        ("", "not a part"),
    ],
)
def test_invalid_vision_cache_is_refused_with_a_remedy(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        VisionCache.parse(text)


def test_every_tier_of_the_vision_cache_can_be_set() -> None:
    parsed = VisionCache.parse("gpu=8GiB, host=32GiB,disk=1.5TiB,dir=/x,ttl=60")
    assert parsed == VisionCache(gpu=8 << 30, host=32 << 30, disk=3 << 39, dir="/x", ttl=60.0)
    assert VisionCache.parse(str(parsed)) == parsed
    assert VisionCache.parse("host=0") == VisionCache()


@pytest.mark.parametrize("text", ["fp9", "decoder=fp8,wat=int8", "vision=", "decoder=fp8;head=none", ""])
def test_a_quantisation_that_is_none_is_refused_before_a_start(text: str) -> None:
    with pytest.raises(ConfigError, match="decoder=fp8,vision=none"):
        EngineConfig(model="m", quantization=text)
