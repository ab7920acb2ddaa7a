"""Puts the pieces of a run's weights together and writes the checkpoint folder.

python -m training.join FOLDER_WITH_weights.pt.0_1_2
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from . import ROOT
from .export import write
from .shape import Shape


def main() -> None:
    pieces = sorted(Path(sys.argv[1]).glob("weights.pt.*"), key=lambda p: int(p.suffix[1:]))
    whole = ROOT / "training/.state/weights.pt"
    whole.parent.mkdir(parents=True, exist_ok=True)
    whole.write_bytes(b"".join(piece.read_bytes() for piece in pieces))
    saved = torch.load(whole, map_location="cpu", weights_only=True)
    write(saved["model"], saved["heads"], Shape())
    print(f"step {saved['step']}, progress {saved['progress']:.3f}: checkpoint folder written, {whole} kept")


if __name__ == "__main__":
    main()
