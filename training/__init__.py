"""Training of the embedded model. Runs from the repository root; finds the package in src/ without
installing it."""

import sys
import types
from pathlib import Path

ROOT = Path(__file__).parents[1]

if "saccade" not in sys.modules:
    # A machine that only trains has none of the server's dependencies: give the package its path
    # and skip its __init__.
    package = types.ModuleType("saccade")
    package.__path__ = [str(ROOT / "src/saccade")]
    sys.modules["saccade"] = package
