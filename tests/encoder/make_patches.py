"""Patches of a single view, as the tests of the encoder make them."""

from torch import Tensor

from saccade.encoder.preprocess import PixelProcessing, Preprocessor
from saccade.request import View


def patches(pixels: Tensor, view: View, processing: PixelProcessing) -> Tensor:
    return Preprocessor(processing, pixels.device).patches(pixels, view)
