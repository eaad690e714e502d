"""Write the records of ``examples/data/note_fields_*.jsonl``: a clinic note, and the fields that it holds.

Everything is made up, from the lists below and a fixed seed: ``python examples/make_note_fields.py``.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

DATA = Path(__file__).resolve().parent / "data"
NAMES = (
    "Abel Adam Asher Boaz Caleb Dan Daniel David Eli Enoch Esther Eve Gad Hannah Isaac Jacob Joel Jonah "
    "Judah Laban Leah Levi Lot Martha Micah Moses Naomi Nathan Noah Rachel Ruth Samson Sarah Saul Seth "
    "Solomon"
)
TITLES = ["Mr", "Mrs"]
OWNERS = "Barley Brook Field Ford Gates Hill Lamb Marsh Rivers Rock Salt Shepherd Stone Vine Waters Wells"
BREEDS = {
    "dog": ["beagle", "collie", "terrier", "hound", "spaniel"],
    "cat": ["tabby", "tortoiseshell", "black cat", "ginger tom"],
    "horse": ["mare", "pony", "colt", "cob"],
    "sheep": ["ewe", "ram", "lamb"],
}
FINDINGS = {
    "leg": [
        "lame on the left fore since yesterday",
        "will not bear weight on the right hind",
        "limps after rest",
    ],
    "skin": ["scratches day and night", "sores on the back", "lost hair about the neck"],
    "belly": ["sick three times in the night", "will not eat", "has not eaten for two days"],
    "eye": ["left eye red and shut", "eyes run with water", "right eye dim"],
}
NUMBERS = ["two", "three", "four", "five", "six", "seven", "ten"]


def record(chance: random.Random) -> dict[str, str]:
    """One note and its fields."""
    kind, trouble = chance.choice(list(BREEDS)), chance.choice(list(FINDINGS))
    name, breed, days = chance.choice(NAMES.split()), chance.choice(BREEDS[kind]), chance.choice(NUMBERS)
    owner = f"{chance.choice(TITLES)} {chance.choice(OWNERS.split())}"
    finding = chance.choice(FINDINGS[trouble]).capitalize()
    note = f"Seen: {name}, {breed}, owner {owner}. {finding}. Come again in {days} days."
    fields = f" name: {name}; kind: {kind}; owner: {owner}; trouble: {trouble}; again: {days} days"
    return {"prompt": f"{note} Fields:", "completion": fields}


def main() -> None:
    """Training and held-out records; no note is in both."""
    chance = random.Random(1611)
    unique = {}
    while len(unique) < 640:
        made = record(chance)
        unique[made["prompt"]] = made
    records = list(unique.values())
    for name, part in (("train", records[:600]), ("heldout", records[600:])):
        lines = "".join(json.dumps(each) + "\n" for each in part)
        (DATA / f"note_fields_{name}.jsonl").write_text(lines)


if __name__ == "__main__":
    main()
