"""Real JPEGs of ImageNet size, cut out of the photographs that scikit-image ships in its package (no download)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image

#: Colour photographs that are inside scikit-image's wheel; the class of a cut is the photograph it comes from.
PHOTOGRAPHS = (
    "astronaut.png",
    "chelsea.png",
    "coffee.png",
    "hubble_deep_field.jpg",
    "motorcycle_left.png",
    "rocket.jpg",
)
#: ImageNet's most frequent size, and about its JPEG quality.
IMAGE_HEIGHT, IMAGE_WIDTH, JPEG_QUALITY = 375, 500, 90


def cut(out_dir: Path, num_images: int) -> Iterator[Path]:
    """Writes ``out_dir/<photograph>/<number>.jpg`` and yields each path, so that a caller can show progress.

    The cuts are the same on every machine (seed 0). Only photographs that this scikit-image has are used.

    Args:
        out_dir: Where the class folders go; created when missing.
        num_images: How many files in all, at least 1.

    Raises:
        FileNotFoundError: The installed scikit-image ships none of the photographs.
    """
    photographs = [_load(path) for path in _shipped()]
    rng = random.Random(0)
    for idx in range(num_images):
        name, photograph = photographs[idx % len(photographs)]
        target = out_dir / name / f"{idx:04d}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        _crop(photograph, rng).save(target, quality=JPEG_QUALITY)
        yield target


def _shipped() -> list[Path]:
    """Paths of the photographs in the installed package."""
    import skimage.data

    folder = Path(skimage.data.__file__).parent
    paths = [folder / name for name in PHOTOGRAPHS if (folder / name).is_file()]
    if not paths:
        raise FileNotFoundError(f"scikit-image in {folder} ships none of {', '.join(PHOTOGRAPHS)}")
    return paths


def _load(path: Path) -> tuple[str, Image.Image]:
    """Reads a photograph, enlarged where a cut would not fit in."""
    from PIL import Image

    image = Image.open(path).convert("RGB")
    scale = max(1.0, 1.2 * IMAGE_WIDTH / image.width, 1.2 * IMAGE_HEIGHT / image.height)
    return path.stem, image.resize((round(image.width * scale), round(image.height * scale)))


def _crop(image: Image.Image, rng: random.Random) -> Image.Image:
    """Cuts a random rectangle within 10 % of ImageNet's usual size."""
    width = min(image.width, round(IMAGE_WIDTH * rng.uniform(0.9, 1.1)))
    height = min(image.height, round(IMAGE_HEIGHT * rng.uniform(0.9, 1.1)))
    left, top = rng.randint(0, image.width - width), rng.randint(0, image.height - height)
    return image.crop((left, top, left + width, top + height))
