"""One palette for print and page: a colour for every role, on light and on dark paper.

Okabe and Ito's colours, which everyone can tell apart; on dark paper their lighter kin. Layers run through viridis, without
its end that would vanish on the paper.
"""

from __future__ import annotations

from lipscope.report.charts import DEPTHS
from lipscope.report.heat import viridis

_ROLES = {
    "measured": ("#0072B2", "#56B4E9"),
    "power": ("#D55E00", "#FF9A4D"),
    "saturating": ("#009E73", "#3CCFA4"),
    "guide0.5": ("#767676", "#A0A7B4"),
    "guide0.25": ("#A3A3A3", "#717A89"),
    "certified": ("#AA3377", "#E58BC0"),
    "refined": ("#8A6D00", "#F0E442"),
    "paper": ("#333333", "#E8E8E8"),
    "first": ("#0072B2", "#56B4E9"),
    "second": ("#D55E00", "#FF9A4D"),
    "scope0": ("#0072B2", "#56B4E9"),
    "scope1": ("#D55E00", "#FF9A4D"),
    "scope2": ("#009E73", "#3CCFA4"),
    "scope3": ("#AA3377", "#E58BC0"),
    "scope4": ("#333333", "#E8E8E8"),
}


def palette(theme: str) -> dict[str, str]:
    """Colours of all roles on ``light`` or ``dark`` paper.

    Example:
        >>> palette("light")["measured"]
        '#0072B2'
    """
    if theme not in ("light", "dark"):
        raise ValueError(f"theme must be 'light' or 'dark', got {theme!r}")
    which = 0 if theme == "light" else 1
    start, end = ((0.0, 0.85), (0.25, 1.0))[which]
    depths = {f"depth{k}": viridis(start + (end - start) * k / (DEPTHS - 1)) for k in range(DEPTHS)}
    return {role: pair[which] for role, pair in _ROLES.items()} | depths
