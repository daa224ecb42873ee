"""The colours of every figure, on light and on dark paper.

Eight colours of Okabe and Ito (2008) and two greys, which everyone can tell apart; on dark paper their lighter kin. Ordered
things (layers, heat maps) run through viridis.
"""

from __future__ import annotations

# name: on light paper, on dark paper. Yellow and purple are darkened on light paper, to be seen as thin lines.
_COLOURS = {
    "blue": ("#0072B2", "#56B4E9"),
    "orange": ("#D55E00", "#FF9A4D"),
    "green": ("#009E73", "#3CCFA4"),
    "purple": ("#AA3377", "#E58BC0"),
    "black": ("#333333", "#E8E8E8"),
    "sky": ("#56B4E9", "#9AD5F7"),
    "yellow": ("#8A6D00", "#F0E442"),
    "amber": ("#E69F00", "#FFC659"),
    "grey": ("#767676", "#A0A7B4"),
    "silver": ("#A3A3A3", "#717A89"),
}
# Colours of series that have no meaning of their own, in this order.
CYCLE = ("blue", "orange", "green", "purple", "black", "sky", "yellow", "amber")
DEPTHS = 12
# Stops of the colour map viridis (van der Walt and Smith 2015): even steps look even, also in grey and to the colour-blind.
VIRIDIS = (
    (68, 1, 84), (72, 36, 117), (65, 68, 135), (53, 95, 141), (42, 120, 142), (33, 145, 140), (34, 168, 132), (68, 191, 112),
    (122, 209, 81), (189, 223, 38), (253, 231, 37),
)  # fmt: skip
# Above this luminance black has the larger contrast, below it white (WCAG 2.2, contrast ratio).
_READABLE = 0.179


def palette(theme: str) -> dict[str, str]:
    """All colours by name, on ``light`` or ``dark`` paper; ``depth0``, ``depth1``, … run from the first layer to the last.

    Example:
        >>> palette("light")["blue"]
        '#0072B2'
    """
    if theme not in ("light", "dark"):
        raise ValueError(f"theme must be 'light' or 'dark', got {theme!r}")
    which = 0 if theme == "light" else 1
    # Without the end of viridis that would vanish on the paper.
    start, end = ((0.0, 0.85), (0.25, 1.0))[which]
    depths = {f"depth{k}": viridis(start + (end - start) * k / (DEPTHS - 1)) for k in range(DEPTHS)}
    return {name: pair[which] for name, pair in _COLOURS.items()} | depths


def viridis(t: float) -> str:
    """A colour of the map, t from 0 to 1."""
    place = min(max(t, 0.0), 1.0) * (len(VIRIDIS) - 1)
    k = min(int(place), len(VIRIDIS) - 2)
    mixed = (a + (place - k) * (b - a) for a, b in zip(VIRIDIS[k], VIRIDIS[k + 1], strict=True))
    return "#" + "".join(f"{round(channel):02x}" for channel in mixed)


def ink_on(colour: str) -> str:
    """Black or white, whichever can be read on a colour.

    Example:
        >>> ink_on(viridis(0.0)), ink_on(viridis(1.0))
        ('#ffffff', '#000000')
    """
    channels = (int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return "#000000" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > _READABLE else "#ffffff"
