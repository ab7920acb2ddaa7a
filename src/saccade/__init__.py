"""Saccade: an inference and serving engine for vision-language models.

    from saccade import LLM, AsyncEngine, LodParams, SamplingParams

Importing the package is cheap; `LLM` and `AsyncEngine` bring what they need when they are first named.
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

# The front process imports this package and must not load torch: names that need it are looked up late.
_LATE = {"LLM": "saccade.llm", "AsyncEngine": "saccade.async_llm"}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'saccade' has no attribute {name!r}")
    return getattr(import_module(_LATE[name]), name)
