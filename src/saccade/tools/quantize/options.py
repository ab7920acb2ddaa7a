"""Options of `saccade quantize`, and which method a scheme has. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from saccade.config import Device, check_fields, option_field
from saccade.errors import ConfigError

Method = Literal["rtn", "smoothquant", "awq", "gptq"]

NONE = "none"
STAGES = ("decoder", "vision", "head")
METHODS: dict[str, tuple[Method, ...]] = {
    "fp8": ("rtn", "smoothquant"),
    "fp8-block": ("rtn",),
    "int8": ("rtn", "smoothquant", "gptq"),
    "int4": ("rtn", "awq", "gptq"),
}
# The stages that a scheme named alone applies to, as with --quantization.
DEFAULT_STAGES = {
    "fp8": ("decoder",),
    "fp8-block": ("decoder",),
    "int8": STAGES,
    "int4": ("decoder",),
}


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions:
    scheme: str = option_field(
        "fp8", "fp8, fp8-block, int8 or int4, or one for each stage: decoder=int4,vision=fp8,head=none."
    )
    method: Method = option_field(
        "rtn",
        "rtn: round to nearest. smoothquant (fp8, int8), awq (int4) and gptq (int4, int8) are calibrated."
        " Stages whose scheme the method does not apply to are rounded to nearest.",
    )
    group_size: int = option_field(128, "Columns that share a scale (int4).", at_least=8)
    calibration: str | None = option_field(
        None,
        "A folder of images, each with its prompt in a .txt of the same name, and of .txt prompts without an"
        " image. [default: drawn images with questions, and questions alone]",
        metavar="DIR",
    )
    samples: int = option_field(128, "Calibration prompts.")
    device: Device = option_field("auto", "Device.")
    progress: bool = option_field(True, "Show a progress bar on stderr.")

    def __post_init__(self) -> None:
        check_fields(self)
        schemes = set(self.stages.values())
        if not any(self.method in METHODS[scheme] for scheme in schemes):
            known = "; ".join(f"{scheme}: {', '.join(METHODS[scheme])}" for scheme in sorted(schemes))
            raise ConfigError(f"the method {self.method} does not apply to {self.scheme}; choose ({known})")
        if self.group_size % 8:
            raise ConfigError(f"group_size is {self.group_size}; it must be a multiple of 8")
        if self.calibration is not None and not Path(self.calibration).is_dir():
            raise ConfigError(f"there is no folder {self.calibration}; give --calibration a folder of images")

    @property
    def stages(self) -> Mapping[str, str]:
        """The scheme of each stage that is quantised."""
        if self.scheme in METHODS:
            return dict.fromkeys(DEFAULT_STAGES[self.scheme], self.scheme)
        stages: dict[str, str] = {}
        for part in self.scheme.split(","):
            stage, _, scheme = part.strip().partition("=")
            if stage not in STAGES or scheme not in (*METHODS, NONE):
                raise ConfigError(
                    f"--scheme {self.scheme!r}: {part.strip()!r} is neither one of {', '.join(METHODS)} nor"
                    f" one of the stages {', '.join(STAGES)} with one of them, such as decoder=int4"
                )
            if scheme != NONE:
                stages[stage] = scheme
        if not stages:
            raise ConfigError(f"--scheme {self.scheme!r} quantises nothing; name a scheme for a stage")
        return stages

    def method_of(self, scheme: str) -> Method:
        return self.method if self.method in METHODS[scheme] else "rtn"
