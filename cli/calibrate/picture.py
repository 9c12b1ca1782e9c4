"""The cost-quality curve as a PNG, drawn with what every installation has: numpy and zlib."""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

from ...classifier.evaluation.cost_quality import CostQualityCurve

__all__ = ["curve_png"]

_WIDTH, _HEIGHT = 900, 560
_LEFT, _RIGHT, _TOP, _BOTTOM = 90, 30, 30, 90
_SCALE = 3  # of a letter's dots
_BLACK, _GREY, _PALE = (40, 40, 40), (150, 150, 150), (225, 225, 225)
_ROUTER, _ORACLE, _TARGET = (20, 90, 200), (30, 150, 80), (210, 50, 40)
# Letters of 3 x 5 dots, a row an octal digit.
_LETTERS = {
    **dict(zip("012345", ("75557", "26227", "71747", "71717", "55711", "74717"), strict=True)),
    **dict(zip("6789.%", ("74757", "71244", "75757", "75717", "00002", "51245"), strict=True)),
    **dict(zip("abcdef", ("25755", "65656", "34443", "65556", "74647", "74644"), strict=True)),
    **dict(zip("ghiklm", ("34553", "55755", "72227", "55655", "44447", "57755"), strict=True)),
    **dict(zip("noprst", ("65555", "25552", "65644", "65655", "34216", "72222"), strict=True)),
    **dict(zip("uvwxyz", ("55557", "55552", "55775", "55255", "55222", "71247"), strict=True)),
}


def curve_png(router: CostQualityCurve, oracle: CostQualityCurve, point: tuple[float, float]) -> bytes:
    """Score against the share that goes to the cloud: the router, what no router beats, one that tosses coins, and
    where the target lies.
    """
    low = min(router.accuracy.min(), router.weak)
    high = max(oracle.accuracy.max(), low + 1e-9)
    image = np.full((_HEIGHT, _WIDTH, 3), 255, np.uint8)
    for fraction in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = _x(fraction), _y(fraction)
        image[_TOP : _HEIGHT - _BOTTOM, x] = image[y, _LEFT : _WIDTH - _RIGHT] = _PALE
        _write(image, x - 20, _HEIGHT - _BOTTOM + 10, f"{fraction:.0%}", _BLACK)
        _write(image, 5, y - 8, f"{low + fraction * (high - low):.1%}", _BLACK)
    chance = CostQualityCurve(np.array([0.0, 1.0]), np.array([router.weak, router.strong]), router.weak, router.strong)
    for curve, color in ((chance, _GREY), (oracle, _ORACLE), (router, _ROUTER)):
        shares = np.linspace(0, 1, _x(1.0) - _LEFT + 1)
        heights = [_y((score - low) / (high - low)) for score in np.interp(shares, curve.share, curve.accuracy)]
        for column, (y, before) in enumerate(zip(heights, [heights[0], *heights], strict=False)):
            image[min(y, before) - 1 : max(y, before) + 2, _LEFT + column] = color
    x, y = _x(point[0]), _y(min(1.0, max(0.0, (point[1] - low) / (high - low))))
    image[y - 5 : y + 6, x - 5 : x + 6] = _TARGET
    at = _LEFT
    legend = (("router", _ROUTER), ("best possible", _ORACLE), ("random", _GREY), ("target", _TARGET))
    for name, color in legend:
        at = _write(image, at, _HEIGHT - 25, name, color) + 30
    _write(image, _LEFT, _HEIGHT - 55, "score by share to the cloud", _BLACK)
    return _png(image)


def _x(share: float) -> int:
    return _LEFT + round(share * (_WIDTH - _LEFT - _RIGHT - 1))


def _y(fraction: float) -> int:
    return _HEIGHT - _BOTTOM - 1 - round(fraction * (_HEIGHT - _TOP - _BOTTOM - 1))


def _write(image: NDArray[np.uint8], x: int, y: int, text: str, color: tuple[int, int, int]) -> int:
    """Draw a line of text, and give the column behind it."""
    for letter in text:
        for row, bits in enumerate(_LETTERS.get(letter, "00000")):
            for column in range(3):
                if int(bits) >> (2 - column) & 1:
                    top, left = y + row * _SCALE, x + column * _SCALE
                    image[top : top + _SCALE, left : left + _SCALE] = color
        x += 4 * _SCALE
    return x


def _png(image: NDArray[np.uint8]) -> bytes:
    """RGB, 8 bits a channel, no filter."""
    height, width, _ = image.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), image.reshape(height, -1)], axis=1).tobytes()
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
