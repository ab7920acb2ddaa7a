"""Saccade: an inference and serving engine for vision-language models.

from saccade import LLM, AsyncEngine, LodParams, SamplingParams
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from saccade.lod.types import LodParams
from saccade.sampling_params import SamplingParams

if TYPE_CHECKING:
    from saccade.async_llm import AsyncEngine
    from saccade.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncEngine", "LodParams", "SamplingParams", "__version__"]

# Imported on first use: the API server imports this package and must not load torch.
_LATE = {"LLM": "saccade.llm", "AsyncEngine": "saccade.async_llm"}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'saccade' has no attribute {name!r}")
    return getattr(import_module(_LATE[name]), name)
