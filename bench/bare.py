"""Lets the kernels load on a machine that has torch and Triton and nothing else of ours.

Import this before anything of `saccade`: the package then stands without its `__init__`, whose imports
(sampling parameters, requests) need packages such a machine may lack. `saccade.kernels` and
`saccade.sampling.rng` need torch alone.
"""

import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent

if "saccade" not in sys.modules:
    package = ModuleType("saccade")
    package.__path__ = [str(ROOT / "src" / "saccade")]
    sys.modules["saccade"] = package
