"""A model folder as it lies on the disk, read once and checked.

takes   a folder, a hub id, or the word "embedded"
gives   a frozen `Checkpoint`: configuration, processing, special ids, template, names of the weight files
never   imports torch; reads a weight; opens anything pickled
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from saccade.errors import CheckpointError
from saccade.inputs.image_processor import ImageProcessing, VideoProcessing

EMBEDDED = "embedded"
BICUBIC = 3
# What the processors take where a file says nothing.
CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
HALVES = [0.5, 0.5, 0.5]
IMAGE_PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
# What a checkpoint needs of a hub repository. Never code, never pickles.
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """What the checkpoint's authors sample with; used where a request is silent. None: not said."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def given(self) -> dict[str, float | int]:
        """Only what the checkpoint says, by the names `Sampling` uses."""
        values = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
        }
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Everything but the weights. Files that are missing are None; who needs them says so."""

    path: Path
    name: str  # as the user named it, or the folder's name
    config: Json  # config.json
    architecture: str  # architectures[0]
    generation: GenerationDefaults
    image: ImageProcessing | None
    video: VideoProcessing | None
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
    """Reads a folder, the packaged model ("embedded"), or a hub id (downloading what is not there yet)."""
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
    image, video = _processing(path)
    return Checkpoint(
        path=path,
        name=name,
        config=config,
        architecture=_architecture(config),
        generation=_generation(generation),
        image=image,
        video=video,
        tokenizer_file=tokenizer_file if tokenizer_file.is_file() else None,
        chat_template=_chat_template(path, tokenizer_config),
        special_tokens=_special_tokens(tokenizer_config),
        eos_ids=_eos_ids(generation, config, text),
        bos_id=_bos_id(generation, config, text),
        image_token_id=_optional_id(config, "image_token_id"),
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


def _eos_ids(*configs: Json) -> tuple[int, ...]:
    """All end tokens any of the files names, in order, once."""
    found: list[int] = []
    for config in configs:
        value = config.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if token is not None and _optional_id({"eos_token_id": token}, "eos_token_id") not in found:
                found.append(token)
    return tuple(found)


def _bos_id(*configs: Json) -> int | None:
    """The first begin token any of the files names."""
    found = (_optional_id(config, "bos_token_id") for config in configs)
    return next((token for token in found if token is not None), None)


def _generation(config: Json) -> GenerationDefaults:
    def number(key: str) -> float | None:
        value = config.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise CheckpointError(f"generation_config.json has {key} {value!r}; a number is needed")
        return None if value is None else float(value)

    top_k = number("top_k")
    greedy = config.get("do_sample") is False  # said, not merely left out: the authors decode greedily
    return GenerationDefaults(
        temperature=0.0 if greedy else number("temperature"),
        top_p=number("top_p"),
        top_k=None if top_k is None else max(0, int(top_k)),
        min_p=number("min_p"),
        repetition_penalty=number("repetition_penalty"),
    )


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


def _processing(path: Path) -> tuple[ImageProcessing | None, VideoProcessing | None]:
    """From processor_config.json where it has them, else from the two files of older checkpoints."""
    processor = _read_json_or_empty(path / "processor_config.json")
    image = _section(path, processor, "image_processor", "preprocessor_config.json")
    video = _section(path, processor, "video_processor", "video_preprocessor_config.json")
    still = _image_processing(image) if image else None
    moving = _video_processing(video) if video else None
    if still is not None and moving is not None and still.digest != moving.digest:
        raise CheckpointError(
            "the video processor's patch sizes, image_mean, image_std or rescale_factor differ from the image"
            " processor's; that is not implemented"
        )
    return still, moving


def _section(path: Path, processor: Json, key: str, file: str) -> Json:
    inner = processor.get(key)
    return inner if isinstance(inner, dict) else _read_json_or_empty(path / file)


def _image_processing(config: Json) -> ImageProcessing:
    where = "the image processor"
    kind = config.get("image_processor_type", IMAGE_PROCESSORS[0])
    if kind not in IMAGE_PROCESSORS:
        raise CheckpointError(f"{where} is a {kind}; only {IMAGE_PROCESSORS[0]} is implemented")
    common = _common(config, where, patch_size=14, mean=CLIP_MEAN, std=CLIP_STD)
    least, most = _area(config, where, (56 * 56, 28 * 28 * 1280))
    return ImageProcessing(min_pixels=least, max_pixels=most, **common)


def _video_processing(config: Json) -> VideoProcessing:
    where = "the video processor"
    kind = config.get("video_processor_type", "Qwen3VLVideoProcessor")
    if kind != "Qwen3VLVideoProcessor":
        raise CheckpointError(f"{where} is a {kind}; only Qwen3VLVideoProcessor is implemented")
    common = _common(config, where, patch_size=16, mean=HALVES, std=HALVES)
    least, most = _area(config, where, (128 * 32 * 32, 32 * 32 * 768))
    if config.get("num_frames") is not None or config.get("do_sample_frames") is False:
        raise CheckpointError(
            f"{where} fixes num_frames or turns do_sample_frames off; only fps is implemented"
        )
    fps = _number(config, where, "fps", 2.0)
    capped = bool(config.get("cap_pixels_per_frame", False))
    return VideoProcessing(
        min_pixels=least,
        max_pixels=most,
        fps=fps,
        min_frames=int(_number(config, where, "min_frames", 4)),
        max_frames=int(_number(config, where, "max_frames", 768)),
        frame_tokens=int(_number(config, where, "max_video_tokens", 768)) if capped else None,
        **common,
    )


def _common(config: Json, where: str, patch_size: int, mean: list[float], std: list[float]) -> Json:
    """The values pictures and frames share; refuses steps we do not take."""
    for step in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if config.get(step, True) is False:
            raise CheckpointError(f"{where} turns {step} off; that is not implemented")
    for step in ("do_pad", "do_center_crop"):
        if config.get(step):
            raise CheckpointError(f"{where} turns {step} on; that is not implemented")
    resample = config.get("resample", BICUBIC)
    if resample != BICUBIC:
        raise CheckpointError(
            f"{where} resamples with filter {resample!r}; only bicubic ({BICUBIC}) is implemented"
        )
    return {
        "patch_size": int(_number(config, where, "patch_size", patch_size)),
        "merge_size": int(_number(config, where, "merge_size", 2)),
        "temporal_patch_size": int(_number(config, where, "temporal_patch_size", 2)),
        "mean": _triple(config, where, "image_mean", mean),
        "std": _triple(config, where, "image_std", std),
        "rescale_factor": _number(config, where, "rescale_factor", 1 / 255),
    }


def _area(config: Json, where: str, default: tuple[int, int]) -> tuple[int, int]:
    """Least and most pixels; `min_pixels`/`max_pixels` of older files win over `size`, as they did there."""
    size = config.get("size")
    size = size if isinstance(size, dict) else {}
    least = config.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels") or default[0]
    most = config.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels") or default[1]
    for value in (least, most):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{where} has the area limit {value!r}; a positive whole number is needed")
    if least > most:
        raise CheckpointError(f"{where} wants at least {least} and at most {most} pixels; that cannot be")
    return least, most


def _number(config: Json, where: str, key: str, default: float) -> float:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise CheckpointError(f"{where} has {key} {value!r}; a positive number is needed")
    return float(value)


def _triple(config: Json, where: str, key: str, default: list[float]) -> tuple[float, float, float]:
    value = config.get(key, default)
    if (
        not isinstance(value, list)
        or len(value) != 3
        or not all(isinstance(one, int | float) for one in value)
    ):
        raise CheckpointError(f"{where} has {key} {value!r}; three numbers are needed")
    return float(value[0]), float(value[1]), float(value[2])
