"""Patches of a single view, as the tests of the encoder make them."""

from torch import Tensor

from saccade.encoder.preprocess import Preprocessor
from saccade.inputs.image_processor import PatchSettings
from saccade.request import View


def patches(pixels: Tensor, view: View, processing: PatchSettings) -> Tensor:
    return Preprocessor(processing, pixels.device).patches(pixels, view)
