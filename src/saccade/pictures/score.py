"""The scoring rule: equal after trivial normalisation; a description must name the same things in any
order."""

from __future__ import annotations

import re


def normal(text: str) -> str:
    """Lower case, single spaces, no full stop or quotes around, no leading article."""
    text = " ".join(text.casefold().split()).strip("\"'").rstrip(".").strip("\"'")
    return text.removeprefix("the ")


def things(text: str) -> list[str]:
    """The parts of a description, sorted: "There is a red circle and a blue star." -> its two names."""
    text = re.sub(r"^(there is|there are|this is) ", "", normal(text))
    return sorted(re.sub(r"^(an?|the text) ", "", part).strip("\"' ") for part in re.split(r", | and ", text))


def correct_text(task: str, answer: str, text: str) -> bool:
    if task == "describe":
        return things(answer) == things(text)
    return normal(answer) == normal(text)
