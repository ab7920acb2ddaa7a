"""The cost model's coefficients before any step is measured: the model's sizes against the chip's rates.

Each part is the longer of two times, bytes over bandwidth and operations over the arithmetic rate. For the
matrices of a step of T tokens that is  max(W / B, 2 P T / F)  =  W / B + max(0, T - ridge) * 2 P / F  with
ridge = W F / (2 P B): W bytes of weights, P parameters, B bytes/s, F operations/s.

No torch: the planner sizes any model from its config.json.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from saccade.models.config import LLAMA_DEFAULTS, PLAIN_VIT_DEFAULTS, positive_int
from saccade.scheduler.cost_model import Coefficients

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Chip:
    name: str
    bandwidth: float  # bytes/s read from memory
    matrix: float  # operations/s of matrix products
    attention: float  # operations/s of causal attention over prompts
    vision_attention: float  # operations/s of the vision tower's attention
    launch: float  # ms a step costs beyond that
    link: float  # bytes/s between device and host memory


# Measured on the chip: HBM 4.69 TB/s; bf16 GEMM 644 TFLOP/s at 1,088 tokens (682 at 8,192); causal GQA
# prefill 321 (flash, 8,192 tokens; cuDNN 561, and 247 at 1,088); ViT attention 360 (cuDNN; flash 229).
# The link is PCIe 5.0 x16 at 80% of its 63 GB/s, not measured; an engine measures its own at start.
H200 = Chip("H200", 4.69e12, 644e12, 321e12, 360e12, 0.1, 50e9)
# A few server cores in fp32: an order of magnitude, corrected by the first steps.
CPU = Chip("CPU", 20e9, 100e9, 50e9, 50e9, 1.0, 5e9)
CHIPS = {"cuda": H200, "cpu": CPU}


@dataclass(frozen=True)
class ModelSize:
    """The sizes that decide how long a step takes and how much memory a token needs."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    parameters: int  # of the decoder that every token passes, the output head included
    value_bytes: int = 2  # of a weight, and of a K or V value unless it is `small`
    vision_depth: int = 0  # 0: no vision tower
    vision_hidden: int = 0
    vision_parameters: int = 0
    idle_parameters: int = 0  # of the experts that a token does not take
    vision_windowed: int = 0  # layers of the tower that attend within windows only
    quantized_kv: bool = False  # K and V are in 8 bits, with a scale of 4 bytes to a head

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of one token."""
        if self.quantized_kv:
            return self.quantized_kv_bytes
        return 2 * self.layers * self.kv_heads * self.head_dim * self.value_bytes

    @property
    def quantized_kv_bytes(self) -> int:
        """The same in 8 bits."""
        return 2 * self.layers * self.kv_heads * (self.head_dim + 4)

    @property
    def weight_bytes(self) -> int:
        return (self.parameters + self.idle_parameters + self.vision_parameters) * self.value_bytes


def read_model_size(config: Config, value_bytes: int, *, small: bool = False) -> ModelSize:
    """`value_bytes`: of a weight, and of a K or V value unless these are in 8 bits (`small`)."""
    inner = config.get("text_config")
    text: Config = inner if isinstance(inner, Mapping) else config
    if text is inner and text.get("model_type") == "llama":
        text = {**LLAMA_DEFAULTS, **text}
    hidden, heads, layers = (
        positive_int(text, key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    kv_heads = positive_int(text, "num_key_value_heads", heads)
    head_dim = positive_int(text, "head_dim", max(hidden // heads, 1))
    vocab = positive_int(text, "vocab_size")
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)  # q, k, v and output
    mlps, idle = _mlp_parameters(text, layers)
    vision = config.get("vision_config")
    tower: Config = vision if isinstance(vision, Mapping) else {}
    if tower and "depth" not in tower and "num_attention_heads" in tower:  # CLIP or SigLIP
        tower = {**PLAIN_VIT_DEFAULTS, **tower}
        tower = {**tower, "depth": tower["num_hidden_layers"]}
    return ModelSize(
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=hidden,
        vocab=vocab,
        parameters=layers * attention + mlps + vocab * hidden,
        idle_parameters=idle,
        value_bytes=value_bytes,
        vision_depth=positive_int(tower, "depth") if tower else 0,
        vision_hidden=_tower_width(tower) if tower else 0,
        vision_parameters=_tower_parameters(tower) if tower else 0,
        vision_windowed=_windowed_layers(tower) if tower else 0,
        quantized_kv=small,
    )


def _mlp_parameters(text: Config, layers: int) -> tuple[int, int]:
    """Of all layers: what a token passes, and the experts it does not take."""
    hidden = positive_int(text, "hidden_size")
    dense = 3 * hidden * positive_int(text, "intermediate_size")
    key = "num_experts" if "num_experts" in text else "num_local_experts"
    if key not in text:
        return layers * dense, 0
    count, chosen = positive_int(text, key), positive_int(text, "num_experts_per_tok")
    expert = 3 * hidden * positive_int(text, "moe_intermediate_size")
    step, plain = positive_int(text, "decoder_sparse_step", 1), text.get("mlp_only_layers") or ()
    sparse = sum(layer not in plain and (layer + 1) % step == 0 for layer in range(layers))
    passed = sparse * (chosen * expert + count * hidden) + (layers - sparse) * dense
    return passed, sparse * (count - chosen) * expert


def _tower_width(tower: Config) -> int:
    """In Qwen2-VL `hidden_size` is the decoder's width."""
    return positive_int(tower, "embed_dim", positive_int(tower, "hidden_size"))


def _windowed_layers(tower: Config) -> int:
    full = tower.get("fullatt_block_indexes")
    return positive_int(tower, "depth") - len(set(full)) if isinstance(full, list | tuple) else 0


def _tower_parameters(tower: Config) -> int:
    hidden, merge = _tower_width(tower), positive_int(tower, "spatial_merge_size", 2)
    inner = positive_int(tower, "intermediate_size", positive_int(tower, "mlp_ratio", 4) * hidden)
    matrices = 3 if "fullatt_block_indexes" in tower else 2  # the MLPs of Qwen2.5-VL have a gate
    layer = 4 * hidden * hidden + matrices * hidden * inner
    merged = hidden * merge * merge
    merger = merged * merged + merged * positive_int(
        tower, "out_hidden_size", positive_int(tower, "hidden_size")
    )
    mergers = 1 + len(tower.get("deepstack_visual_indexes") or ())
    # A merger sees one token per merge * merge patches; counted per patch, as the layers are.
    return positive_int(tower, "depth") * layer + mergers * merger // (merge * merge)


def coefficients(network: ModelSize, chip: Chip) -> Coefficients:
    """Milliseconds per unit of everything a step does."""
    ms = 1e3
    # All experts: a few rows take a few each, but from about 32 rows on most are read.
    weights = (network.parameters + network.idle_parameters) * network.value_bytes
    activations = 16 * network.layers * network.hidden * network.value_bytes  # read and written per token
    return Coefficients(
        fixed=ms * weights / chip.bandwidth + chip.launch,
        mixed=chip.launch,
        row=ms
        * (4 * 4 * network.vocab + activations)
        / chip.bandwidth,  # fp32 logits, passed over four times
        context=ms * network.kv_bytes / chip.bandwidth,
        token=ms * activations / chip.bandwidth,
        crowded=ms * 2 * network.parameters / chip.matrix,
        pair=ms * 4 * network.layers * network.heads * network.head_dim / chip.attention,
        encoding=ms * network.vision_parameters * network.value_bytes / chip.bandwidth + chip.launch,
        patch=ms * 2 * network.vision_parameters / chip.matrix,
        patch_pair=ms
        * 4
        * (network.vision_depth - network.vision_windowed)  # a window's pairs are few
        * network.vision_hidden
        / chip.vision_attention,
        ridge=weights * chip.matrix / (2 * network.parameters * chip.bandwidth),
    )


def early_exit_tokens(network: ModelSize, chip: Chip) -> int:
    """Tokens that an early-exit step may compute, and a later step again: half the ridge, so that they add
    little to a step that reads all weights anyway."""
    return int(coefficients(network, chip).ridge / 2)
