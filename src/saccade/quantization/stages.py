"""The stages of a model and how `--quantization` names their schemes. Imports no torch."""

from saccade.errors import ConfigError

NONE = "none"
SCHEMES = ("fp8", "int8", "int4", NONE)
STAGES = ("decoder", "vision", "head")
# What a scheme alone means: the stages it is worth its loss for.
DEFAULTS: dict[str, dict[str, str]] = {
    "fp8": {"decoder": "fp8", "vision": NONE, "head": NONE},  # a tower wins about 0.5 of 40 ms (H200)
    "int8": {"decoder": "int8", "vision": "int8", "head": "int8"},
    "int4": {"decoder": "int4", "vision": NONE, "head": NONE},
    NONE: dict.fromkeys(STAGES, NONE),
}


def parse_quantization(text: str) -> dict[str, str]:
    """The scheme of each stage: "fp8", or "decoder=fp8,vision=none"; stages not named are not quantised."""
    if text in DEFAULTS:
        return DEFAULTS[text]
    stages = dict.fromkeys(STAGES, NONE)
    for part in text.split(","):
        stage, _, scheme = part.strip().partition("=")
        if stage not in STAGES or scheme not in SCHEMES:
            raise ConfigError(
                f"--quantization {text!r}: {part.strip()!r} is neither one of {', '.join(SCHEMES)} nor one "
                f"of the stages {', '.join(STAGES)} with one of them, such as decoder=fp8,vision=none"
            )
        stages[stage] = scheme
    return stages


def stage_of(path: str) -> str:
    """The stage a linear layer belongs to, by the path of its module."""
    first = path.partition(".")[0]
    return first if first in ("vision", "head") else "decoder"
