"""A checkpoint folder, read once and validated, without the weights. Pickled files are never opened."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from saccade.errors import CheckpointError
from saccade.inputs.image_processor import ImageProcessor, VideoProcessor
from saccade.inputs.qwen_vl_processor import (
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLVideoProcessor,
)
from saccade.inputs.tile_processor import CLIPImageProcessor, Idefics3ImageProcessor

EMBEDDED = "embedded"
# Image and video processors, by the class name in the processor's configuration or by the architecture.
IMAGE_PROCESSORS: dict[str, type[ImageProcessor]] = {
    "Qwen2VLImageProcessor": Qwen2VLImageProcessor,
    "Qwen2VLImageProcessorFast": Qwen2VLImageProcessor,
    "Qwen2VLImageProcessorPil": Qwen2VLImageProcessor,
    "LlavaForConditionalGeneration": CLIPImageProcessor,
    "Idefics3ForConditionalGeneration": Idefics3ImageProcessor,
    "SmolVLMForConditionalGeneration": Idefics3ImageProcessor,
}
VIDEO_PROCESSORS: dict[str, type[VideoProcessor]] = {
    "Qwen3VLVideoProcessor": Qwen3VLVideoProcessor,
    "Qwen2VLVideoProcessor": Qwen2VLVideoProcessor,
    "Qwen2VLForConditionalGeneration": Qwen2VLVideoProcessor,
    "Qwen2_5_VLForConditionalGeneration": Qwen2VLVideoProcessor,
}
# Files downloaded from a hub repository: no code, no pickles.
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")

Json = dict[str, Any]
Processor = TypeVar("Processor", ImageProcessor, VideoProcessor)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Everything but the weights. A missing file is None; the code that needs it raises."""

    path: Path
    name: str  # as the user named it, or the folder's name
    config: Json  # config.json
    architecture: str  # architectures[0]
    generation: dict[str, float]  # sampling defaults of generation_config.json, by `Sampling`'s names
    image: ImageProcessor | None
    video: VideoProcessor | None
    tokenizer_file: Path | None  # tokenizer.json
    chat_template: str | None
    special_tokens: dict[str, str]  # bos_token, eos_token, ... as templates may name them
    eos_ids: tuple[int, ...]
    bos_id: int | None
    image_token_id: int | None
    video_token_id: int | None
    vision_start_id: int | None
    vision_end_id: int | None
    max_position_embeddings: int
    vocab_size: int  # rows of the embedding table; ids at or above it do not exist

    @property
    def text_config(self) -> Json:
        """The decoder's part of the configuration: `text_config`, or all of it."""
        inner = self.config.get("text_config")
        return inner if isinstance(inner, dict) else self.config

    def weight_files(self) -> tuple[Path, ...]:
        """The safetensors files, every one inside the folder and present."""
        index = self.path / "model.safetensors.index.json"
        single = self.path / "model.safetensors"
        if index.is_file():
            return self._indexed(index)
        if single.is_file():
            return (single,)
        pickled = sorted(file.name for pattern in PICKLED for file in self.path.glob(pattern))
        if pickled:
            raise CheckpointError(
                f"{self.name} has its weights in {pickled[0]}, a pickle, which is never loaded;"
                " convert the checkpoint to safetensors"
            )
        raise CheckpointError(
            f"{self.name} has neither model.safetensors nor model.safetensors.index.json;"
            " complete the folder, or use load format dummy"
        )

    def _indexed(self, index: Path) -> tuple[Path, ...]:
        entries = _read_json(index).get("weight_map")
        if not isinstance(entries, dict) or not entries:
            raise CheckpointError(f"{index.name} has no weight_map")
        files = []
        for file in sorted({str(value) for value in entries.values()}):
            # A plain file name: an index must not lead out of the folder.
            if Path(file).name != file or file in ("", ".", "..") or "\\" in file:
                raise CheckpointError(f"{index.name} names {file!r}, which is not a file name in the folder")
            if not file.endswith(".safetensors"):
                raise CheckpointError(f"{index.name} names {file!r}; only safetensors are loaded: convert it")
            if not (self.path / file).is_file():
                raise CheckpointError(f"{index.name} names {file!r}, which is missing; complete the folder")
            files.append(self.path / file)
        return tuple(files)


def open_checkpoint(model: str) -> Checkpoint:
    """Reads a folder, the embedded model or a hub id, which is downloaded if it is not on this machine."""
    if model == EMBEDDED:
        return _read(Path(__file__).parent / "embedded", EMBEDDED)
    folder = Path(model).expanduser()
    if folder.is_dir():
        return _read(folder.resolve(), folder.resolve().name)
    if model.startswith((".", "/", "~")) or model.count("/") > 1 or "\\" in model:
        raise CheckpointError(
            f"there is no folder {model}; give a checkpoint folder, a hub id or {EMBEDDED!r}"
        )
    return _read(_download(model), model)


def _download(model: str) -> Path:
    try:
        return Path(snapshot_download(model, allow_patterns=HUB_PATTERNS, ignore_patterns=["*/*"]))
    except HFValidationError as error:
        raise CheckpointError(
            f"{model!r} is neither a folder nor a hub id; give a checkpoint folder, a hub id or {EMBEDDED!r}"
        ) from error
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{model} is not on this machine and the hub cannot be reached; download it where there is a"
            " network and give its folder"
        ) from error
    except HfHubHTTPError as error:
        raise CheckpointError(
            f"the hub would not give {model}: check the name, and log in if the model is gated"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{model} could not be downloaded; download it and give its folder") from error


def _read(path: Path, name: str) -> Checkpoint:
    config = _read_json(path / "config.json")
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    generation = _read_json_or_empty(path / "generation_config.json")
    tokenizer_config = _read_json_or_empty(path / "tokenizer_config.json")
    tokenizer_file = path / "tokenizer.json"
    architecture = _architecture(config)
    image, video = _processors(path, config, architecture)
    return Checkpoint(
        path=path,
        name=name,
        config=config,
        architecture=architecture,
        generation=_generation(generation),
        image=image,
        video=video,
        tokenizer_file=tokenizer_file if tokenizer_file.is_file() else None,
        chat_template=_chat_template(path, tokenizer_config),
        special_tokens=_special_tokens(tokenizer_config),
        eos_ids=_eos_ids(generation, config, text),
        bos_id=_bos_id(generation, config, text),
        image_token_id=_first_id(config, "image_token_id", "image_token_index"),
        video_token_id=_optional_id(config, "video_token_id"),
        vision_start_id=_optional_id(config, "vision_start_token_id"),
        vision_end_id=_optional_id(config, "vision_end_token_id"),
        max_position_embeddings=_required_int(text, "max_position_embeddings"),
        vocab_size=_required_int(text, "vocab_size"),
    )


def _read_json(path: Path) -> Json:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.name} is missing in {path.parent}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}; an object is needed")
    return value


def _read_json_or_empty(path: Path) -> Json:
    return _read_json(path) if path.is_file() else {}


def _architecture(config: Json) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise CheckpointError("config.json names no architecture (`architectures`)")
    return names[0]


def _required_int(config: Json, key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json has {key} {value!r}; a positive whole number is needed")
    return value


def _optional_id(config: Json, key: str) -> int | None:
    value = config.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise CheckpointError(f"the configuration has {key} {value!r}; a token id is needed")
    return value


def _first_id(config: Json, *keys: str) -> int | None:
    found = (_optional_id(config, key) for key in keys)
    return next((token for token in found if token is not None), None)


def _eos_ids(*configs: Json) -> tuple[int, ...]:
    """End tokens of all files, in order, without duplicates."""
    found: list[int] = []
    for config in configs:
        value = config.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if token is not None and _optional_id({"eos_token_id": token}, "eos_token_id") not in found:
                found.append(token)
    return tuple(found)


def _bos_id(*configs: Json) -> int | None:
    """The first begin token in any of the files."""
    found = (_optional_id(config, "bos_token_id") for config in configs)
    return next((token for token in found if token is not None), None)


def _generation(config: Json) -> dict[str, float]:
    found: dict[str, float] = {}
    for key in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"generation_config.json has {key} {value!r}; a number is needed")
        found[key] = max(0, int(value)) if key == "top_k" else float(value)
    if config.get("do_sample") is False:  # explicitly off; a missing key means sampling
        found["temperature"] = 0.0
    return found


def _chat_template(path: Path, tokenizer_config: Json) -> str | None:
    """The template's own file first, then the older JSON, then the tokenizer's configuration."""
    plain = path / "chat_template.jinja"
    if plain.is_file():
        return plain.read_text(encoding="utf-8")
    value: Any = _read_json_or_empty(path / "chat_template.json").get("chat_template")
    if value is None:
        value = tokenizer_config.get("chat_template")
    if isinstance(value, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    if value is None or isinstance(value, str):
        return value
    raise CheckpointError("the chat template is neither a text nor a list with a template named default")


def _special_tokens(tokenizer_config: Json) -> dict[str, str]:
    """bos_token, eos_token and the like, as text; older files wrap them in an object."""
    tokens: dict[str, str] = {}
    for key, value in tokenizer_config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            tokens[key] = content
    return tokens


def _processors(
    path: Path, config: Json, architecture: str
) -> tuple[ImageProcessor | None, VideoProcessor | None]:
    """From processor_config.json if it has them, else from the two files of older checkpoints."""
    sections = _read_json_or_empty(path / "processor_config.json")
    image, video = sections.get("image_processor"), sections.get("video_processor")
    image = image if isinstance(image, dict) else _read_json_or_empty(path / "preprocessor_config.json")
    video = video if isinstance(video, dict) else _read_json_or_empty(path / "video_preprocessor_config.json")
    if not video and architecture in VIDEO_PROCESSORS:
        video = image  # the first checkpoints have one file for both
    still = moving = None
    if image:
        kind = image.get("image_processor_type", "Qwen2VLImageProcessor")
        still = _find(IMAGE_PROCESSORS, architecture, kind, "image").from_config(image, config)
    if video and not (still is not None and still.no_video):
        kind = video.get("video_processor_type", "Qwen3VLVideoProcessor")
        moving = _find(VIDEO_PROCESSORS, architecture, kind, "video").from_config(video, config)
    if still is not None and moving is not None and still.digest != moving.digest:
        raise CheckpointError(
            "the video processor's patch sizes, image_mean, image_std or rescale_factor differ from the image"
            " processor's; that is not implemented"
        )
    return still, moving


def _find(
    registry: Mapping[str, type[Processor]], architecture: str, kind: str, what: str
) -> type[Processor]:
    found = registry.get(architecture) or registry.get(kind)
    if found is None:
        raise CheckpointError(f"the {what} processor is a {kind}; implemented are {', '.join(registry)}")
    return found
