"""Photograph-like JPEGs made in memory, so that the scripts need no files: smooth shapes with grain."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image


def jpegs(num: int, width: int, height: int) -> list[bytes]:
    """``num`` different JPEGs; the grain makes the decoder work as hard as on a photograph."""
    draw = np.random.default_rng(0)
    return [_jpeg(draw, width, height) for _ in range(num)]


def _jpeg(draw: np.random.Generator, width: int, height: int) -> bytes:
    coarse = Image.fromarray(draw.integers(0, 256, (height // 32, width // 32, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
    grainy = np.clip(smooth + draw.normal(0, 12, smooth.shape), 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(grainy).save(file, "JPEG", quality=90)
    return file.getvalue()
