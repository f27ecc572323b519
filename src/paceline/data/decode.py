"""Image decoding: from the bytes of an image file to the pixels that the network receives.

Preprocessing as in Lerat, Mahmoudi and Mahmoudi, Electronics 11(10):1525 (2022): resize the short side to 256, crop
224x224. This equals a square of 7/8 of the short side, resized to 224; so only that square is resized (its position and
size are whole pixels of the file). Channels are normalised by ImageNet's mean and standard deviation. JPEGs are decoded
by `simplejpeg` if it is installed, else by Pillow; the two may differ by one of 255 levels.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

try:
    import simplejpeg  # type: ignore[import-untyped]
except ImportError:
    simplejpeg = None

SHORT_SIDE, CROP = 256, 224  # pixels
MEAN = torch.tensor((0.485, 0.456, 0.406)).view(3, 1, 1)
STD = torch.tensor((0.229, 0.224, 0.225)).view(3, 1, 1)
_SCALE, _SHIFT = (1 / (255 * STD)).numpy(), (-MEAN / STD).numpy()
_ORIENTATION = 0x0112  # EXIF tag

Pixels = npt.NDArray[np.uint8]


def decode(data: bytes, short_side: int | None = SHORT_SIDE) -> Pixels:
    """*Shapes*: (height, width, 3), upright, the first frame; 16-bit grey scaled to 8 bits.

    JPEGs may be reduced 2, 4 or 8 times, but not below ``short_side``. Raises the decoder's error for damaged files.
    """
    if not data:
        raise ValueError("the file is empty")
    if simplejpeg is not None and data.startswith(b"\xff\xd8\xff") and _is_upright(data):
        try:
            height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
            if colours in ("YCbCr", "Gray", "RGB"):
                least = _reduced(width, height, short_side)
                pixels: Pixels = simplejpeg.decode_jpeg(data, min_width=least[0], min_height=least[1])
                return pixels
        except ValueError:
            pass  # simplejpeg is stricter than Pillow, which decides
    with _opened(data) as file:
        file.draft("RGB", _reduced(file.width, file.height, short_side))
        upright = ImageOps.exif_transpose(file) if _ORIENTATION in file.getexif() else file
        return np.array(_to_rgb(upright))


def _opened(data: bytes) -> ImageFile.ImageFile:
    try:
        return Image.open(io.BytesIO(data))
    except UnidentifiedImageError:
        raise ValueError("no image, or of a kind that Pillow does not know") from None


def _is_upright(data: bytes) -> bool:
    if data.find(b"Exif\0\0", 0, 1 << 17) < 0:
        return True
    with _opened(data) as file:
        return bool(file.getexif().get(_ORIENTATION, 1) == 1)


def _reduced(width: int, height: int, short_side: int | None) -> tuple[int, int]:
    """The size after the largest reduction that a JPEG decoder does for free."""
    factor = 1
    while short_side and factor < 8 and min(width, height) >= 2 * factor * short_side:
        factor *= 2
    return -(-width // factor), -(-height // factor)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        deep = np.asarray(image).astype(np.int64)
        if deep.min() < 0 or deep.max() > 65535:
            raise ValueError(f"pixels of mode {image.mode} range from {deep.min()} to {deep.max()}, beyond 16 bits")
        return Image.fromarray(((deep + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("pixels of mode F are fractions, whose scale is not known")
    if image.mode == "P":
        image = image.convert("RGBA")  # a palette may have transparency, about which a conversion to RGB warns
    return image.convert("RGB")


def crop(pixels: Pixels, words: Sequence[int] | None) -> Pixels:
    """*Shapes*: (height, width, 3) to (3, 224, 224).

    ``words``: 32 random bits each for column, row and mirroring; None: the centre, not mirrored.
    """
    height, width, _ = pixels.shape
    side = max(1, round(min(height, width) * CROP / SHORT_SIDE))
    if words is None:
        left, top = (width - side) // 2, (height - side) // 2
    else:
        left, top = words[0] * (width - side + 1) >> 32, words[1] * (height - side + 1) >> 32
    square = torch.from_numpy(pixels[top : top + side, left : left + side]).permute(2, 0, 1)[None]
    resized: Pixels = torch.nn.functional.interpolate(square, (CROP, CROP), mode="bilinear", antialias=True)[0].numpy()
    return resized[:, :, ::-1] if words is not None and words[2] >> 31 else resized


def normalise(pixels: Pixels, out: npt.NDArray[Any]) -> None:
    """*Shapes*: (3, height, width) bytes into float32 of about mean 0 and deviation 1."""
    # NumPy uses one thread; torch would start a thread pool for each decoding thread
    np.multiply(pixels, _SCALE, out=out)
    np.add(out, _SHIFT, out=out)
