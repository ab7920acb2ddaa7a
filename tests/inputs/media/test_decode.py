"""Images of anybody: allowed formats to RGB by the reference's rule, the rest refused, nothing escapes."""

import io
import random
import struct
import subprocess
import sys
import textwrap
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from transformers.image_transforms import convert_to_rgb

from saccade.config import MediaLimits
from saccade.errors import MediaRefused
from saccade.inputs.media.decode import _webp_size, decode, from_array, from_image, sniff
from saccade.request import Pixels

LIMITS = MediaLimits()
NOISE = np.random.default_rng(0).integers(0, 256, (24, 36, 3), dtype=np.uint8)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, data: bytes, *extra: bytes, depth: int = 8, colour: int = 2) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    body = chunk(b"IHDR", header) + b"".join(extra) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def reference(data: bytes) -> Pixels:
    """What the reference processor makes of the upright image."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    pixels: Pixels = convert_to_rgb(image, return_numpy=True)
    return pixels


# --- what is taken -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_allowed_formats_decode_as_in_pillow(kind: str) -> None:
    data = encoded(Image.fromarray(NOISE), kind)
    found = decode(data, LIMITS)
    assert found.format == kind == sniff(data)
    assert found.pixels.shape == (1, 24, 36, 3)
    assert found.pixels.dtype == np.uint8
    np.testing.assert_array_equal(found.pixels[0], reference(data))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(Image.fromarray(NOISE), "PNG", exif=exif)
    upright = decode(data, LIMITS).pixels[0]
    np.testing.assert_array_equal(upright, reference(data))
    assert upright.shape[:2] == ((24, 36) if orientation < 5 else (36, 24))


def _modes() -> list[tuple[str, bytes]]:
    colour = Image.fromarray(NOISE)
    alpha = Image.fromarray(np.dstack([NOISE, NOISE[:, :, 0]]))
    palette = colour.quantize(16)
    return [
        ("RGBA", encoded(alpha, "PNG")),
        ("LA", encoded(alpha.convert("LA"), "PNG")),
        ("L", encoded(colour.convert("L"), "PNG")),
        ("1", encoded(colour.convert("1"), "PNG")),
        ("P", encoded(palette, "PNG")),
        ("P transparent", encoded(palette, "PNG", transparency=3)),
        ("RGB transparent", encoded(colour, "PNG", transparency=tuple(int(one) for one in NOISE[0, 0]))),
        ("CMYK", encoded(colour.convert("CMYK"), "JPEG")),
        ("L jpeg", encoded(colour.convert("L"), "JPEG")),
        ("webp alpha", encoded(alpha, "WEBP", lossless=True)),
        ("gif transparent", encoded(palette, "GIF", transparency=3)),
    ]


@pytest.mark.parametrize(
    ("name", "data"), _modes(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_mode_is_converted_to_rgb_as_in_pillow(name: str, data: bytes) -> None:
    np.testing.assert_array_equal(decode(data, LIMITS).pixels[0], reference(data))


def test_transparency_is_composited_over_white() -> None:
    clear = Image.new("RGBA", (4, 4), (10, 20, 30, 0))
    assert (decode(encoded(clear, "PNG"), LIMITS).pixels == 255).all()


def test_sixteen_bits_keep_their_high_byte_in_grey_and_colour_alike() -> None:
    samples = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    grey = decode(encoded(Image.fromarray(samples), "PNG"), LIMITS).pixels[0]
    rows = np.repeat(samples[:, :, None], 3, axis=2).astype(">u2")
    raw = b"".join(b"\0" + row.tobytes() for row in rows)
    colour = decode(png(8, 8, zlib.compress(raw), depth=16), LIMITS).pixels[0]
    np.testing.assert_array_equal(grey[:, :, 0], (samples >> 8).astype(np.uint8))
    np.testing.assert_array_equal(grey, colour)


def test_a_transparent_grey_of_sixteen_bits_is_white() -> None:
    samples = np.array([[0, 1000], [2000, 65535]], dtype=">u2")
    raw = b"".join(b"\0" + row.tobytes() for row in samples)
    data = png(2, 2, zlib.compress(raw), chunk(b"tRNS", struct.pack(">H", 1000)), depth=16, colour=0)
    assert decode(data, LIMITS).pixels[0, :, :, 0].tolist() == [[0, 255], [2000 >> 8, 255]]


def test_an_animation_gives_its_first_frame_and_the_rest_is_not_read() -> None:
    frames = [Image.new("P", (8, 8), index % 250) for index in range(2000)]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=10, optimize=False)
    first = decode(data, LIMITS).pixels
    np.testing.assert_array_equal(first[0], reference(data))
    # Broken from the second frame on, it decodes all the same.
    np.testing.assert_array_equal(decode(data[: len(data) // 2] + b"\xff" * 99, LIMITS).pixels, first)


@pytest.mark.parametrize("size", [(1, 1), (1, 200), (200, 1)])
def test_small_and_long_images_up_to_200_to_1_are_taken(size: tuple[int, int]) -> None:
    assert decode(encoded(Image.new("RGB", size), "PNG"), LIMITS).pixels.shape == (1, size[1], size[0], 3)


# --- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(1, 20000), (20000, 1), (1, 201)])
def test_images_longer_than_200_to_1_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(MediaRefused, match="200 times"):
        decode(encoded(Image.new("RGB", size), "PNG"), LIMITS)


@pytest.mark.parametrize(("width", "height"), [(0, 5), (5, 0), (0, 0)])
def test_a_side_of_zero_is_refused(width: int, height: int) -> None:
    with pytest.raises(MediaRefused):
        decode(png(width, height, zlib.compress(b"\0" * 64)), LIMITS)


@pytest.mark.parametrize("kind", ["TIFF", "PPM", "ICO", "JPEG2000", "EPS", "TGA", "AVIF"])
def test_other_formats_are_refused_even_if_pillow_reads_them(kind: str) -> None:
    try:
        data = encoded(Image.fromarray(NOISE), kind)
    except (KeyError, OSError):
        pytest.skip(f"this Pillow writes no {kind}")
    with pytest.raises(MediaRefused, match="no known format"):
        decode(data, LIMITS)


@pytest.mark.parametrize(
    "data",
    [
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"8BPS\0\1" + b"\0" * 64,
        b"%!PS-Adobe-3.0 EPSF-3.0\n",
        b"not a picture",
        b"\0" * 100,
        b"\x00\x00\x00\x20ftypavif",
    ],
)
def test_bytes_that_are_not_an_image_are_refused(data: bytes) -> None:
    with pytest.raises(MediaRefused, match="no known format"):
        decode(data, LIMITS)


@pytest.mark.parametrize("kind", ["TIFF", "PPM", "EPS"])
def test_another_format_behind_the_first_bytes_of_jpeg_is_refused(kind: str) -> None:
    with pytest.raises(MediaRefused, match="damaged"):
        decode(b"\xff\xd8\xff" + encoded(Image.fromarray(NOISE), kind), LIMITS)


def test_empty_and_oversized_data_are_refused() -> None:
    with pytest.raises(MediaRefused, match="empty"):
        decode(b"", LIMITS)
    with pytest.raises(MediaRefused, match="at most 100"):
        decode(encoded(Image.fromarray(NOISE), "PNG"), MediaLimits(max_bytes=100))


def test_too_many_pixels_are_refused_by_the_header() -> None:
    data = png(13000, 13000, b"")
    with pytest.raises(MediaRefused, match=r"13000x13000.*at most 64000000"):
        decode(data, LIMITS)
    with pytest.raises(MediaRefused):
        decode(png(100_000, 100_000, b""), MediaLimits(max_pixels=1 << 40))  # beyond what Pillow ever takes


@pytest.mark.parametrize(
    "header",
    [
        b"VP8X" + struct.pack("<I", 10) + b"\x02\0\0\0" + (16383).to_bytes(3, "little") * 2,
        b"VP8L" + struct.pack("<I", 10) + b"\x2f" + (16382 | 16382 << 14).to_bytes(4, "little") + b"\0" * 5,
        b"VP8 " + struct.pack("<I", 10) + b"\0\0\0\x9d\x01\x2a" + struct.pack("<HH", 16383, 16383),
    ],
)
def test_large_webp_canvases_are_refused_before_opening(header: bytes) -> None:
    data = b"RIFF" + struct.pack("<I", 4 + len(header)) + b"WEBP" + header
    with pytest.raises(MediaRefused, match=r"1638\dx1638\d.*at most 64000000"):
        decode(data, LIMITS)


@pytest.mark.parametrize("options", [{}, {"lossless": True}, {"exif": b"Exif\0\0MM\0*\0\0\0\x08\0\0"}])
def test_the_webp_header_is_read_as_pillow_reads_it(options: dict[str, Any]) -> None:
    for size in ((36, 24), (1, 1), (257, 300)):
        data = encoded(Image.new("RGB", size), "WEBP", **options)
        assert _webp_size(data) == size


BOMBS = textwrap.dedent(
    """
    import resource, struct, sys, zlib
    from saccade.config import MediaLimits
    from saccade.errors import MediaRefused
    from saccade.inputs.media.decode import decode
    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    def png(width, height, data, *extra):
        header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        body = chunk(b"IHDR", header) + b"".join(extra) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
        return b"\\x89PNG\\r\\n\\x1a\\n" + body
    def squeezed(count):
        packer = zlib.compressobj(9)
        parts = [packer.compress(b"\\0" * (1 << 20)) for _ in range(count >> 20)]
        return b"".join(parts) + packer.flush()
    tiny = zlib.compress(b"\\0" * 16)
    text = chunk(b"zTXt", b"k\\0\\0" + squeezed(100 << 20))
    profile = chunk(b"iCCP", b"k\\0\\0" + squeezed(100 << 20))
    bombs = {"raster": png(13000, 13000, squeezed(64 << 20)[:20000]), "text": png(2, 2, tiny, text),
             "profile": png(2, 2, tiny, profile)}
    decode(png(2, 2, tiny), MediaLimits())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        decode(bombs[sys.argv[1]], MediaLimits())
    except MediaRefused:
        pass
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
    """
)


@pytest.mark.parametrize("bomb", ["raster", "text", "profile"])
def test_bombs_cost_less_than_50_megabytes(bomb: str) -> None:
    run = subprocess.run([sys.executable, "-c", BOMBS, bomb], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 50


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_cut_off_images_are_refused(kind: str) -> None:
    data = encoded(Image.fromarray(NOISE), kind)
    for part in (0.3, 0.6, 0.9):
        with pytest.raises(MediaRefused):
            decode(data[: int(len(data) * part)], LIMITS)


def mutated(data: bytes, draw: random.Random) -> bytes:
    """The same bytes with some changed, cut out, doubled, or cut off."""
    work = bytearray(data)
    for _ in range(draw.randint(1, 8)):
        place = draw.randrange(len(work))
        match draw.randrange(5):
            case 0:
                work[place] = draw.randrange(256)
            case 1:
                work[place] ^= 1 << draw.randrange(8)
            case 2:
                del work[place : place + draw.randint(1, 16)]
            case 3:
                work[place:place] = work[place : place + draw.randint(1, 16)]
            case _:
                work = work[: max(12, place)]
        if len(work) < 2:
            break
    return bytes(work)


def fuzz(count: int, seed: int) -> tuple[int, int]:
    """How many mutated images were taken and how many refused; anything but a refusal raises."""
    draw = random.Random(seed)
    small = Image.fromarray(NOISE)
    exif = Image.Exif()
    exif[0x0112] = 6
    seeds = [
        encoded(small, "JPEG", exif=exif),
        encoded(small, "JPEG", progressive=True, quality=30),
        encoded(small, "PNG"),
        encoded(small.quantize(8), "PNG", transparency=1),
        encoded(small, "WEBP"),
        encoded(small, "WEBP", lossless=True),
        encoded(small, "GIF"),
        encoded(small, "BMP"),
    ]
    limits = MediaLimits(max_pixels=4_000_000)
    taken = refused = 0
    for number in range(count):
        try:
            found = decode(mutated(seeds[number % len(seeds)], draw), limits)
        except MediaRefused:
            refused += 1
        else:
            taken += 1
            if found.pixels.dtype != np.uint8 or found.pixels.ndim != 4 or found.pixels.shape[3] != 3:
                raise AssertionError("a damaged picture came out misshapen")
    return taken, refused


def test_damaged_images_are_refused_or_decoded_and_nothing_else() -> None:
    taken, refused = fuzz(400, seed=1)
    assert refused > 100
    assert taken + refused == 400


# --- the library's own forms -------------------------------------------------------------------------------


def test_pil_images_and_arrays_are_converted_alike() -> None:
    np.testing.assert_array_equal(from_image(Image.fromarray(NOISE), LIMITS)[0], NOISE)
    np.testing.assert_array_equal(from_array(NOISE, LIMITS)[0], NOISE)
    grey = NOISE[:, :, 0]
    np.testing.assert_array_equal(from_array(grey, LIMITS), from_array(grey[:, :, None], LIMITS))
    alpha = np.dstack([NOISE, grey])
    np.testing.assert_array_equal(
        from_array(alpha, LIMITS)[0], convert_to_rgb(Image.fromarray(alpha), return_numpy=True)
    )


@pytest.mark.parametrize(
    "array", [NOISE.astype(np.float32), NOISE[None], NOISE[:, :, :2], np.zeros((0, 4, 3), np.uint8)]
)
def test_arrays_of_other_kinds_are_refused(array: Any) -> None:
    with pytest.raises(MediaRefused):
        from_array(array, LIMITS)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_modes_of_unknown_range_are_refused(mode: str) -> None:
    with pytest.raises(MediaRefused, match="convert it"):
        from_image(Image.new(mode, (4, 4)), LIMITS)
