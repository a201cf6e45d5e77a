"""Makes tiny generated data for other people's programs: a folder of images per class, and a YOLO set.

``python make_data.py OUT`` writes ``OUT/folder/{train,val}/class*/*.jpg`` and ``OUT/yolo/data.yaml``.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

SPLITS = {"train": 32, "val": 8}


def image(kind: int, size: int, rng: np.random.Generator) -> Image.Image:
    """Noise with one bright band, whose colour tells the class."""
    pixels = rng.integers(0, 80, (size, size, 3), dtype=np.uint8)
    pixels[..., kind % 3] += 120
    pixels[size // 4 : size // 2, :, (kind + 1) % 3] = 250
    return Image.fromarray(pixels)


def make_folder(out: Path, rng: np.random.Generator) -> None:
    """An ImageFolder of three classes."""
    for split, num_images in SPLITS.items():
        for kind in range(3):
            folder = out / split / f"class{kind}"
            folder.mkdir(parents=True)
            for idx in range(num_images):
                image(kind, int(rng.integers(80, 160)), rng).save(folder / f"{idx:03d}.jpg", quality=90)


def make_yolo(out: Path, rng: np.random.Generator) -> None:
    """A YOLO detection set of two classes; some images have no box."""
    for split, num_images in SPLITS.items():
        images, labels = out / "images" / split, out / "labels" / split
        images.mkdir(parents=True)
        labels.mkdir(parents=True)
        for idx in range(num_images):
            image(idx, 96, rng).save(images / f"{idx:03d}.jpg")
            boxes = (f"{k % 2} {0.3 + 0.1 * k:.2f} 0.5 0.2 0.3\n" for k in range(idx % 4))
            (labels / f"{idx:03d}.txt").write_text("".join(boxes))
    names = "names:\n  0: a\n  1: b\n"
    (out / "data.yaml").write_text(f"path: {out.resolve()}\ntrain: images/train\nval: images/val\n{names}")


if __name__ == "__main__":
    target = Path(sys.argv[1])
    generator = np.random.default_rng(0)
    make_folder(target / "folder", generator)
    make_yolo(target / "yolo", generator)
