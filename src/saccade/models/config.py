"""The dims of a network, read from its config.json. Whatever is not supported is refused by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from saccade.errors import CheckpointError

Config = Mapping[str, Any]
# What transformers takes where the `text_config` of a family around a Llama leaves it out.
LLAMA_DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
# The same for the `vision_config` of CLIP and SigLIP towers.
PLAIN_VIT_DEFAULTS = {"intermediate_size": 3072, "num_hidden_layers": 12, "image_size": 224, "patch_size": 32}
ROPE_KINDS = ("default", "linear", "llama3")
OLDER_KINDS = {"mrope": "default"}  # the sections say the same


@dataclass(frozen=True)
class RopeDims:
    """How positions become rotary angles."""

    kind: str  # one of ROPE_KINDS
    theta: float
    factor: float = 1.0  # linear and llama3: how much longer the context became
    low: float = 1.0  # llama3: periods in the original context below which a frequency is divided
    high: float = 1.0  # llama3: periods above which it is kept
    original: int = 0  # llama3: the original context
    sections: tuple[int, ...] | None = None  # frequencies of (time, row, column); None: one axis
    interleaved: bool = True  # the axes take turns; else time's frequencies come first, then row's, column's


@dataclass(frozen=True)
class ExpertDims:
    """The mixture of experts of some layers."""

    count: int
    chosen: int  # by each token
    inner: int  # of an expert's MLP
    normalized: bool  # the weights of a token's experts add up to one
    stacked: bool  # a checkpoint has one tensor for all experts of a layer
    layers: frozenset[int]


@dataclass(frozen=True)
class DecoderDims:
    layers: int
    hidden: int
    inner: int  # of the MLP
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    eps: float
    tied: bool
    attention_bias: bool  # of query, key and value
    out_bias: bool  # of the projection after attention
    mlp_bias: bool
    qk_norm: bool
    rope: RopeDims
    windows: tuple[int | None, ...]  # per layer; None: full attention
    experts: ExpertDims | None = None


@dataclass(frozen=True)
class VisionDims:
    depth: int
    hidden: int
    inner: int
    heads: int
    activation: str
    channels: int
    patch: int
    frames: int  # temporal patch size
    merge: int
    out: int
    positions: int  # learned positions along each side
    theta: float
    deep: tuple[int, ...]  # layers whose output is a DeepStack level


def _required(config: Config, key: str, default: object) -> object:
    value = config.get(key)
    if value is None and default is None:
        raise CheckpointError(f"config.json lacks {key!r}")
    return default if value is None else value


def positive_int(config: Config, key: str, default: int | None = None) -> int:
    value = _required(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json: {key!r} is {value!r}; it must be a positive whole number")
    return value


def positive_float(config: Config, key: str, default: float | None = None) -> float:
    value = _required(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise CheckpointError(f"config.json: {key!r} is {value!r}; it must be a positive number")
    return float(value)


def inner_config(config: Config, key: str) -> Config:
    inner = config.get(key)
    if not isinstance(inner, Mapping):
        raise CheckpointError(f"config.json lacks the section {key!r}")
    return inner


def read_decoder(
    config: Config,
    *,
    tied: bool,
    qk_norm: bool,
    default_head_dim: int | None,
    default_theta: float,
    default_sections: tuple[int, int, int] | None = None,
    interleaved: bool = True,  # the sections
    qkv_bias: bool = False,  # always, and none after attention
) -> DecoderDims:
    """The defaults are the family's, for files that omit them."""
    hidden, heads = positive_int(config, "hidden_size"), positive_int(config, "num_attention_heads")
    kv_heads = positive_int(config, "num_key_value_heads", heads)
    head_dim = positive_int(config, "head_dim", default_head_dim or hidden // heads)
    if heads % kv_heads:
        raise CheckpointError(f"config.json: {heads} attention heads cannot share {kv_heads} kv heads evenly")
    if head_dim % 2:
        raise CheckpointError(f"config.json: 'head_dim' is {head_dim}; rotary positions need an even number")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(f"config.json: 'hidden_act' {activation!r} is not supported; 'silu' is")
    layers = positive_int(config, "num_hidden_layers")
    biased = bool(config.get("attention_bias", False))
    return DecoderDims(
        layers=layers,
        hidden=hidden,
        inner=positive_int(config, "intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=positive_int(config, "vocab_size"),
        max_positions=positive_int(config, "max_position_embeddings"),
        eps=positive_float(config, "rms_norm_eps", 1e-6),
        tied=tied,
        attention_bias=biased or qkv_bias,
        out_bias=biased and not qkv_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=qk_norm,
        rope=read_rope(config, head_dim, default_theta, default_sections, interleaved),
        windows=read_windows(config, layers),
    )


def read_rope(
    config: Config,
    head_dim: int,
    default_theta: float,
    default_sections: tuple[int, int, int] | None,
    interleaved: bool = True,
) -> RopeDims:
    """`rope_parameters`, or the older `rope_scaling` beside `rope_theta`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise CheckpointError(f"config.json: the rotary parameters are {rope!r}; they must be a section")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    kind = OLDER_KINDS.get(kind, kind)
    if kind not in ROPE_KINDS:
        raise CheckpointError(
            f"config.json: the rotary type {kind!r} is not supported; {', '.join(ROPE_KINDS)} are"
        )
    theta = positive_float(rope, "rope_theta", positive_float(config, "rope_theta", default_theta))
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise CheckpointError(f"config.json: 'partial_rotary_factor' {partial!r} is not supported; 1 is")
    sections = _read_sections(rope, head_dim, default_sections, interleaved)
    if kind == "default":
        return RopeDims(kind, theta, sections=sections, interleaved=interleaved)
    factor = positive_float(rope, "factor")
    if kind == "linear":
        return RopeDims(kind, theta, factor, sections=sections, interleaved=interleaved)
    low, high = positive_float(rope, "low_freq_factor"), positive_float(rope, "high_freq_factor")
    if not low < high:
        raise CheckpointError(f"config.json: 'low_freq_factor' {low} is not below 'high_freq_factor' {high}")
    original = positive_int(rope, "original_max_position_embeddings")
    return RopeDims(kind, theta, factor, low, high, original, sections, interleaved)


def _read_sections(
    rope: Config, head_dim: int, default: tuple[int, int, int] | None, interleaved: bool
) -> tuple[int, ...] | None:
    sections = rope.get("mrope_section", default)
    if sections is None:
        return None
    if bool(rope.get("mrope_interleaved", interleaved)) != interleaved:
        known = str(interleaved).lower()
        raise CheckpointError(
            f"config.json: 'mrope_interleaved' is {rope['mrope_interleaved']}; the family supports {known}"
        )
    if not isinstance(sections, list | tuple) or len(sections) != 3 or sum(sections) != head_dim // 2:
        raise CheckpointError(
            f"config.json: 'mrope_section' is {sections!r}; it must share "
            f"{head_dim // 2} frequencies among 3 axes"
        )
    return tuple(int(share) for share in sections)


def read_windows(config: Config, layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer; None: full attention."""
    kinds = config.get("layer_types")
    if kinds is None:
        sliding = bool(config.get("use_sliding_window", False))
        first = positive_int(config, "max_window_layers", layers) if sliding else layers
        kinds = ["full_attention" if layer < first else "sliding_attention" for layer in range(layers)]
    if len(kinds) != layers:
        raise CheckpointError(f"config.json: 'layer_types' names {len(kinds)} layers of {layers}")
    windows: list[int | None] = []
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise CheckpointError(
                f"config.json: the layer type {kind!r} is not supported; 'full_attention' and "
                "'sliding_attention' are"
            )
        windows.append(positive_int(config, "sliding_window") if kind == "sliding_attention" else None)
    return tuple(windows)


def read_vision(config: Config, activations: tuple[str, ...]) -> VisionDims:
    hidden, heads = positive_int(config, "hidden_size"), positive_int(config, "num_heads")
    if hidden % heads or hidden // heads % 4:
        raise CheckpointError(
            f"config.json: a vision width of {hidden} over {heads} heads leaves no multiple of 4 per head, "
            "which 2-D rotary positions need"
        )
    activation = config.get("hidden_act", "gelu_pytorch_tanh")
    if activation not in activations:
        raise CheckpointError(
            f"config.json: the vision 'hidden_act' {activation!r} is not supported; "
            f"{', '.join(activations)} are"
        )
    count = positive_int(config, "num_position_embeddings")
    side = round(count**0.5)
    if side * side != count:
        raise CheckpointError(f"config.json: 'num_position_embeddings' is {count}; it must be a square")
    depth = positive_int(config, "depth")
    deep = tuple(config.get("deepstack_visual_indexes") or ())
    if len(set(deep)) != len(deep) or any(
        not isinstance(layer, int) or not 0 <= layer < depth for layer in deep
    ):
        raise CheckpointError(
            f"config.json: 'deepstack_visual_indexes' is {list(deep)}; it must name different "
            f"layers of {depth}"
        )
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type", "axial") != "axial":
        raise CheckpointError(
            f"config.json: the vision rotary type {rope['rope_type']!r} is not supported; 'axial' is"
        )
    return VisionDims(
        depth=depth,
        hidden=hidden,
        inner=positive_int(config, "intermediate_size"),
        heads=heads,
        activation=activation,
        channels=positive_int(config, "in_channels", 3),
        patch=positive_int(config, "patch_size"),
        frames=positive_int(config, "temporal_patch_size"),
        merge=positive_int(config, "spatial_merge_size"),
        out=positive_int(config, "out_hidden_size"),
        positions=side,
        theta=positive_float(rope, "rope_theta", 10000.0),
        deep=deep,
    )
